"""The bytes that a step moves between tiers are those that a plan states, on every rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from test_offload import PLACEMENTS, WITH_PARAMETERS, sharded_at
from toys import data, train_sharded

from zrun_core.memory.buffers import Placement
from zrun_core.memory.placement import place
from zrun_core.memory.tier_traffic import Move, step_traffic
from zrun_core.zero.sharded_model import mesh_info_of

Ranks = Callable[[int], Any]


def moved_and_planned(
    stage: int, placement: Placement, accumulation: int, precision: str
) -> tuple[dict[Move, int], dict[Move, int]]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        sharded = sharded_at(stage, placement, folder, {"precision": precision})
        assert sharded.tiers is not None
        train_sharded(sharded, data(1), accumulation=accumulation)  # makes the moments
        sharded.settle_updates()
        sharded.tiers.take_counts()
        train_sharded(sharded, data(2)[1:], accumulation=accumulation)
        sharded.settle_updates()
        counts = sharded.tiers.take_counts()
        gathers = {
            unit.name: accumulation * sharded._gatherer.num_gathers(unit) for unit in sharded.units
        }
        planned = step_traffic(
            sharded.layouts,
            place(sharded.layouts, placement),
            sharded.settings.states,
            mesh_info_of(sharded.comm, sharded.mesh),
            micro_batches=accumulation,
            gathers=gathers,
            host_is_device=sharded.tiers.host_is_device,
        )
        return {move: size for move, size in counts.moved.items() if size}, planned


def cases() -> list[Any]:
    everywhere = PLACEMENTS | WITH_PARAMETERS
    return [
        pytest.param(stage, placement, id=f"{stage}-{name}")
        for name, placement in everywhere.items()
        for stage in ((0, 1, 2, 3) if name in PLACEMENTS else (3,))
    ]


@pytest.mark.parametrize(("stage", "placement"), cases())
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_moves_what_is_planned(
    ranks: Ranks, num_ranks: int, stage: int, placement: Placement
) -> None:
    for accumulation, precision in ((3, "bf16"), (1, "fp32")):
        results = ranks(num_ranks).run(moved_and_planned, stage, placement, accumulation, precision)
        for moved, planned in results:
            assert moved == planned, (accumulation, precision)
            assert planned
