"""The bytes that a step moves between tiers, and holds there, are those of the plan, exactly."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_offload import PLACEMENTS, SETTINGS, WITH_PARAMETERS, sharded_at
from toys import data, train_sharded

from zrun_core.memory.buffers import Placement, Tier
from zrun_core.memory.tier_traffic import Move

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
        moved = {move: size for move, size in sharded.step_counts.moved.items() if size}
        planned, allocated = sharded.planned_memory(), sharded.allocated_memory()
        assert planned.by_kind == allocated.by_kind
        assert +planned.elsewhere == +allocated.elsewhere
        assert any(
            tier is not Tier.DEVICE and size for (tier, _), size in planned.elsewhere.items()
        )
        return moved, sharded.planned_moves(accumulation)


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
