"""Ranks that die, hang and differ on NCCL, by the real command line: exit code, words, the rest.

Nothing of NCCL's tells of them: kernels run on, and the host waits for its device.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulated_gpu.machine import Machine

HERE = Path(__file__).parent
PATIENCE_S = 400


class Launch:
    """A job on two GPUs of a machine.

    Attributes:
        code: its exit code.
        said: on stderr.
        failure: what failure.json says.
    """

    def __init__(self, folder: Path, fault: str, *, gpu: dict[str, Any], **keys: Any) -> None:
        shutil.copy(HERE / "faulty.py", folder)
        job = {
            "name": "faulty",
            "model": {"call": "faulty.py:Net", "args": {"fault": fault}},
            "data": "faulty.py:data",
            "steps": 6,
            "batch": 8,
            "slots": 2,
            "device": "cuda",
            "threads": 1,
            "zero": {"stage": 3, "bucket": 64},
            "log": {"every": 1},
            **keys,
        }
        job["limits"] = {"hang_s": 600, "first_step_s": 600, **keys.get("limits", {})}
        (folder / "job.yaml").write_text(
            "".join(f"{key}: {json.dumps(value)}\n" for key, value in job.items())
        )
        machine = Machine(folder, "dgx1v")
        environment = machine.gpu_environment(**gpu) | {"ZRUN_ESTIMATE": "off"}
        environment["PYTHONPATH"] += f"{os.pathsep}{HERE.parents[1]}"
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "zrun",
                "train",
                "job.yaml",
                "--run-dir",
                "run",
                "--ui",
                "plain",
            ],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        self.code = done.returncode
        self.said = done.stderr
        report = folder / "run" / "failure.json"
        self.failure = json.loads(report.read_text()) if report.exists() else {}


def what_runs_in(folder: Path) -> list[str]:
    """Processes that are left."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and folder in Path(os.readlink(entry / "cwd")).parents:
                found.append(entry.name)
        except OSError:
            continue
    return found


def test_a_rank_that_hangs_is_named_with_what_the_other_waits_for(tmp_path: Path) -> None:
    ended = Launch(tmp_path, "sleep", gpu={}, limits={"hang_s": 3})
    assert ended.code == 6, ended.said
    assert "no progress for 3 s (limits.hang_s): rank 1 of 2 (" in ended.said
    assert "cuda:1) is stuck in forward of step 3" in ended.said
    waits = ended.failure["ranks"][0]
    assert (waits["does"], waits["awaits"]["ranks"]) == ("waits", [1])
    assert "all_gather" in waits["awaits"]["what"]
    assert what_runs_in(tmp_path) == []


def test_a_rank_that_is_killed_is_named_and_the_other_does_not_outlive_it(tmp_path: Path) -> None:
    ended = Launch(tmp_path, "kill", gpu={})
    assert ended.code == 5, ended.said
    assert "rank 1 of 2 (" in ended.said
    assert "cuda:1) was killed by SIGKILL after step" in ended.said
    assert what_runs_in(tmp_path) == []


def test_a_rank_without_memory_says_what_it_has(tmp_path: Path) -> None:
    ended = Launch(tmp_path, "fill", gpu={"memory": 1 << 30})
    assert ended.code == 5, ended.said
    assert "out of memory" in ended.said
    assert (ended.failure["rank"], ended.failure["type"]) == (1, "OutOfMemoryError")
    assert what_runs_in(tmp_path) == []


def test_ranks_that_compute_different_modules_are_told_apart(tmp_path: Path) -> None:
    ended = Launch(tmp_path, "leave out a block", gpu={})
    assert ended.code == 6, ended.said
    assert "ranks disagree on the order of " in ended.said
    assert "'blocks.1'" in ended.said
    assert "zero.leaf" in ended.said
    assert what_runs_in(tmp_path) == []


def test_a_wait_that_is_too_long_ends_before_torch_ends_it(tmp_path: Path) -> None:
    ended = Launch(tmp_path, "sleep", gpu={}, limits={"collective_s": 25})
    assert ended.code == 6, ended.said
    assert "rank 0 has waited for more than 25 s (limits.collective_s) for all_gather" in ended.said
    assert "to which rank 1 has not come" in ended.said
    assert (ended.failure["rank"], ended.failure["kind"]) == (0, "zrun")
    assert "Watchdog caught" not in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert what_runs_in(tmp_path) == []


def test_where_torch_ends_a_rank_its_words_are_told_with_what_it_waited_for(
    tmp_path: Path,
) -> None:
    """A host that looks at a value waits for its device, and nobody knows."""
    ended = Launch(tmp_path, "look", gpu={})
    assert ended.code == 6, ended.said
    assert "torch ended the rank: its NCCL _ALLGATHER_BASE " in ended.said
    assert "did not finish within 3 s; it waited for all_gather" in ended.said
    assert "to which rank 1 has not come" in ended.said
    assert ended.failure["rank"] == 0
    assert "Watchdog caught" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert what_runs_in(tmp_path) == []


@pytest.mark.parametrize("tells", [0, 1])
def test_a_run_ends_in_order_whether_or_not_nccl_tells_of_ranks_that_leave(
    tmp_path: Path, tells: int
) -> None:
    ended = Launch(tmp_path, "none", gpu={"nccl_remote_errors": tells, "delay_us": 2000})
    assert ended.code == 0, ended.said
    for rank in range(2):
        log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert "Error" not in log
        assert "Watchdog" not in log
