"""The bytes that a step moves between tiers, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from zrun_core.memory.buffers import Kind, Placement, Tier
from zrun_core.memory.layout import UnitLayout, lay_out
from zrun_core.memory.state_policy import MeshInfo, RankPlaces, StatePolicy, ZeroPolicy
from zrun_core.memory.tier_traffic import Direction, Move, step_traffic

DEVICE, HOST, DISK = Tier
READ, WRITTEN = Direction
N = 1 << 16  # elements of the unit, a multiple of all pages


def unit(dtype: torch.dtype = torch.bfloat16, ranks: int = 1) -> UnitLayout:
    weight = torch.empty(N, device="meta")
    return lay_out("u", [("w", weight, 0)], dtype=dtype, trainable=True, num_shards=ranks)


def moved(
    placement: Placement,
    *,
    stage: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    ranks: int = 1,
    micro_batches: int = 1,
    host_is_device: bool = False,
) -> dict[Move, float]:
    """Return bytes per element that one rank updates."""
    states = StatePolicy(ZeroPolicy(stage), torch.float32, moments=2)
    found = step_traffic(
        [unit(dtype, ranks)],
        {"u": placement},
        states,
        RankPlaces(MeshInfo(ranks)),
        micro_batches=micro_batches,
        gathers={"u": 2 * micro_batches},
        host_is_device=host_is_device,
    )
    return {move: num_bytes * ranks / N for move, num_bytes in found.items()}


def test_the_optimizer_on_a_disk_is_read_and_written_once() -> None:
    found = moved(Placement(optimizer=DISK), stage=0, micro_batches=3)
    assert found == {
        Move(DISK, READ, Kind.OPTIM): 12,
        Move(DISK, WRITTEN, Kind.OPTIM): 12,
        Move(HOST, WRITTEN, Kind.GRAD): 4,
        Move(HOST, READ, Kind.PARAM): 2,
    }
    alone = moved(Placement(optimizer=DISK), stage=0, host_is_device=True)
    assert alone == {Move(DISK, READ, Kind.OPTIM): 12, Move(DISK, WRITTEN, Kind.OPTIM): 12}


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_everything_on_a_disk(ranks: int, micro_batches: int) -> None:
    found = moved(
        Placement(DISK, DISK, DISK), ranks=ranks, micro_batches=micro_batches, host_is_device=True
    )
    assert found == {
        Move(DISK, READ, Kind.PARAM): 2 * 2 * micro_batches,
        Move(DISK, WRITTEN, Kind.PARAM): 2,
        Move(DISK, READ, Kind.GRAD): 4 * (micro_batches - 1) + 4,
        Move(DISK, WRITTEN, Kind.GRAD): 4 * micro_batches,
        Move(DISK, READ, Kind.OPTIM): 12,
        Move(DISK, WRITTEN, Kind.OPTIM): 12,
    }


def test_what_is_in_fp32_is_its_own_master() -> None:
    found = moved(Placement(DISK, DISK, DISK), dtype=torch.float32, host_is_device=True)
    assert found[Move(DISK, READ, Kind.OPTIM)] == 8
    assert found[Move(DISK, READ, Kind.PARAM)] == 4 * 2 + 4
    assert found[Move(DISK, WRITTEN, Kind.PARAM)] == 4


def test_gradients_add_up_where_they_live() -> None:
    away = Placement(grad=HOST, optimizer=HOST)
    at_stage_2 = moved(away, stage=2, ranks=2, micro_batches=3)
    assert at_stage_2 == {Move(HOST, WRITTEN, Kind.GRAD): 3 * 4, Move(HOST, READ, Kind.PARAM): 2}
    # All of them are on the device once more, where the ranks sum them.
    at_stage_1 = moved(away, stage=1, ranks=2, micro_batches=3)
    assert at_stage_1[Move(HOST, WRITTEN, Kind.GRAD)] == 2 * 2 * 4 + 4
    assert at_stage_1[Move(HOST, READ, Kind.GRAD)] == 2 * 4


def test_parameters_that_are_updated_on_the_device_go_home() -> None:
    found = moved(Placement(param=HOST))
    assert found == {Move(HOST, READ, Kind.PARAM): 4, Move(HOST, WRITTEN, Kind.PARAM): 2}
    assert not moved(Placement(activation=HOST))
