"""The bytes that a step moves between tiers, and holds there, are those of the plan, exactly."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import PLACEMENTS, SETTINGS, WITH_PARAMETERS, sharded_at
from runs import job, run
from toys import Net, data, make_sharded, train_sharded

from zrun_core.memory.buffers import Placement, Tier
from zrun_core.memory.tier_traffic import Direction, Move
from zrun_core.zero.account import allocated_memory, planned_memory, planned_moves
from zrun_core.zero.sharded_model import ShardedModel

Ranks = Callable[[int], Any]
STEPS = [
    (3, "overlap", SETTINGS["bf16, clipped"]),
    (1, "serial", SETTINGS["sgd"]),
    (1, "overlap", SETTINGS["lion, bf16"]),
    (2, "overlap", SETTINGS["fp32"]),
]


def moved_and_planned(
    stage: int, placement: Placement, accumulation: int, schedule: str, settings: dict[str, Any]
) -> tuple[dict[Move, int], dict[Move, int]]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        sharded = sharded_at(stage, placement, folder, settings, schedule=schedule)
        assert sharded.tiers is not None
        train_sharded(sharded, data(2), accumulation=accumulation)  # the first makes the moments
        with sharded.evaluation(), torch.no_grad():
            sharded.module(*data(1)[0])  # is no traffic of a step
        with sharded.gathered():
            pass
        train_sharded(sharded, data(3)[2:], accumulation=accumulation)
        moved = {move: size for move, size in sharded.updates.step_counts.moved.items() if size}
        planned, allocated = planned_memory(sharded), allocated_memory(sharded)
        assert planned.by_kind == allocated.by_kind
        assert +planned.elsewhere == +allocated.elsewhere
        assert any(
            tier is not Tier.DEVICE and size for (tier, _), size in planned.elsewhere.items()
        )
        return moved, planned_moves(sharded, accumulation)


def cases() -> Iterator[Any]:
    """Every placement at every stage, on one rank and on two, with another step each."""
    steps = itertools.cycle(STEPS)
    for num_ranks in (1, 2):
        next(steps)
        for name, placement in (PLACEMENTS | WITH_PARAMETERS).items():
            for stage in (0, 1, 2, 3) if name in PLACEMENTS else (3,):
                step = next(steps)
                kind = "-".join(map(str, (num_ranks, stage, name, *step[:2])))
                yield pytest.param(num_ranks, stage, placement, *step, id=kind)


@pytest.mark.parametrize(
    ("num_ranks", "stage", "placement", "accumulation", "schedule", "settings"), list(cases())
)
@pytest.mark.at_most(8)
def test_a_step_moves_and_holds_what_is_planned(
    ranks: Ranks,
    num_ranks: int,
    stage: int,
    placement: Placement,
    accumulation: int,
    schedule: str,
    settings: dict[str, Any],
) -> None:
    arguments = stage, placement, accumulation, schedule, settings
    for moved, planned in ranks(num_ranks).run(moved_and_planned, *arguments):
        assert planned
        assert moved == planned


def settled_io(sharded: ShardedModel) -> dict[str, int]:
    """Return the bytes that this process has moved from and to disks, by the kernel."""
    sharded.settle_updates()
    assert sharded.tiers is not None
    file = sharded.tiers._file
    assert file is not None
    while file._num_open:  # what updates have begun to write
        time.sleep(0.001)
    lines = Path("/proc/self/io").read_text().splitlines()
    numbers = dict(line.split(": ") for line in lines)
    return {name: int(numbers[f"{name}_bytes"]) for name in ("read", "write")}


def moved_by_kernel(num_steps: int) -> tuple[bool, dict[str, int], dict[str, int]]:
    """Train on a disk; return whether it has direct I/O, what moved by the kernel, and by plan."""
    placement = WITH_PARAMETERS["disk, all"]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        torch.manual_seed(1)
        sharded = make_sharded(Net(dim=256), 3, placement=placement, disk_folder=folder)
        batches = data(1 + num_steps, 16, 256)
        train_sharded(sharded, batches[:1])  # makes the moments
        before = settled_io(sharded)
        train_sharded(sharded, batches[1:])
        after = settled_io(sharded)
        planned = dict.fromkeys(before, 0)
        for move, num_bytes in planned_moves(sharded, 1).items():
            planned["read" if move.direction is Direction.READ else "write"] += num_bytes
        moved = {name: after[name] - before[name] for name in before}
        assert sharded.tiers is not None
        is_direct = not sharded.tiers.notes
        return is_direct, moved, {name: num_steps * size for name, size in planned.items()}


def test_the_kernel_counts_the_bytes_of_the_plan(ranks: Ranks) -> None:
    is_direct, moved, planned = ranks(1).run(moved_by_kernel, 2)[0]
    if not is_direct:
        pytest.skip("/var/tmp has no direct I/O: the page cache answers")
    assert moved == pytest.approx(planned, rel=0.01)


NEW_FIELDS = {"start": {"planned_tiers"}, "step": {"tiers", "updates"}, "memory": {"tiers"}}


@pytest.mark.thorough
def test_events_tell_of_states_elsewhere_where_there_are_any(ranks: Ranks, tmp_path: Path) -> None:
    """With evaluations and saves between the steps, which are no traffic of theirs."""
    keys = job(zero=3, steps=6, checkpoint={"every": 2}, log={"every": 1})
    here = ranks(2).run(run, keys, str(tmp_path / "here"))[0]["events"]
    keys["offload"] = {"optimizer": "disk", "grad": "disk", "param": "disk", "dir": "/var/tmp"}
    away = ranks(2).run(run, keys, str(tmp_path / "away"))[0]["events"]
    for kind in ("start", "step", "memory"):
        fields = [set(next(e for e in events if e["type"] == kind)) for events in (here, away)]
        assert fields[1] - fields[0] == NEW_FIELDS[kind]
        assert not fields[0] - fields[1]
    for step in [event for event in away if event["type"] == "step"][2:]:
        disk = step["tiers"]["disk"]
        assert disk["moved"] == disk["planned"], step["step"]
        assert set(disk["moved"]["read"]) == {"params", "grads", "optim"}
    assert away[-1]["type"] == "end"
    held = away[-1]["memory"]["tiers"]
    assert held["disk"]["planned"] == held["disk"]["allocated"]
    assert "tiers" not in here[-1]["memory"]
    start = next(event for event in away if event["type"] == "start")
    assert start["planned_tiers"]["disk"] == held["disk"]["planned"]
