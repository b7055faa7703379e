"""States beside the devices are held to what their host has, all its ranks together."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zrun_core.errors import PreflightError
from zrun_core.memory.buffers import Buffer, Kind, Tier
from zrun_core.memory.room import Limit, Room
from zrun_core.spine import memory_limits
from zrun_core.spine.config import JobConfig
from zrun_core.spine.spec import BatchPlan, LaunchPlan, RankPlace, RunSpec
from zrun_core.train.host_room import host_room

MIB = 1 << 20
STATES = [
    Buffer("a", Kind.PARAM, 5 * MIB),
    Buffer("b", Kind.OPTIM, 3 * MIB, Tier.HOST),
    Buffer("c", Kind.OPTIM, 3 * MIB - 1, Tier.HOST),
    Buffer("d", Kind.OPTIM, 2 * MIB, Tier.DISK),
]


def spec(folder: Path, *, device: str = "cuda:0", memory: int | None = MIB, **keys: Any) -> RunSpec:
    required = {"name": "j", "model": "m:f", "data": "m:f", "steps": 1, "batch": {"micro": 1}}
    hosts = ["a", "a", "b"]
    return RunSpec(
        job=JobConfig.model_validate(required | keys),
        plan=LaunchPlan(
            ranks=[
                RankPlace(rank=rank, host=host, local_rank=rank % 2, device=device)
                for rank, host in enumerate(hosts)
            ]
        ),
        batch=BatchPlan(global_size=3, micro=1, accumulation=1, ranks=3),
        job_dir=str(folder),
        run_dir=str(folder),
        run_id="r",
        memory_bytes=memory,
    )


def test_what_all_ranks_of_the_host_take_together_counts():
    Room(2, Limit(12 * MIB, "free now"), Limit(4 * MIB, "free in /scratch")).check(STATES)
    Room(2).check(STATES)
    with pytest.raises(PreflightError) as refused:
        Room(2, host=Limit(12 * MIB - 1, "offload.host_memory")).check(STATES)
    assert str(refused.value) == (
        "the model's states on the 2 ranks of this host take 12.0 MiB of the host's memory, more "
        "than 12.0 MiB (offload.host_memory): zrun estimate says what would fit"
    )
    with pytest.raises(
        PreflightError, match=r"states take 2.0 MiB of the disk, more than 1.0 MiB \(free in /sc"
    ):
        Room(1, disk=Limit(MIB, "free in /scratch")).check(STATES)


def test_the_tightest_limit_of_the_host_counts(tmp_path: Path) -> None:
    both = {"optimizer": "disk", "grad": "host"}
    room = host_room(spec(tmp_path, offload=both), 1)
    assert room.ranks == 2
    assert room.host is not None
    assert room.disk is not None
    assert 0 < room.host.num_bytes <= memory_limits.host_total()
    assert room.disk.why == f"free in {tmp_path}"
    keys = {"offload": {**both, "host_memory": 9, "disk_space": 8}, "limits": {"memory": 10}}
    room = host_room(spec(tmp_path, **keys), 2)
    assert room == Room(1, Limit(9, "offload.host_memory"), Limit(8, "offload.disk_space"))
    keys["limits"] = {"memory": 7}
    assert host_room(spec(tmp_path, **keys), 2).host == Limit(7, "limits.memory")


def test_where_nothing_is_held_to_a_limit_nothing_is_refused(tmp_path: Path) -> None:
    assert host_room(spec(tmp_path, memory=None, offload="disk"), 0) == Room(2)
    assert host_room(spec(tmp_path, offload="host"), 0).disk is None
    on_cpu = host_room(spec(tmp_path, device="cpu", offload="disk"), 0)
    assert on_cpu.host is None, "that is where the ranks compute, which has a limit of its own"


def test_what_the_shell_lets_a_process_allocate_is_a_limit() -> None:
    code = "from zrun_core.spine import memory_limits; print(memory_limits.process_available())"

    def run(**options: Any) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, **options
        )
        return done.stdout.strip()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, resource.RLIM_INFINITY))

    assert run() == "None"
    assert 0 < int(run(preexec_fn=limit)) < 1 << 30
