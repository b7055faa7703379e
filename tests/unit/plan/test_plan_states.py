"""Planned buffers of a rank: pipelines and tiers that nothing trains with yet, by contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zrun_core.memory.buffers import ON_DEVICE, Buffer, Kind, Placement, Tier
from zrun_core.memory.layout import PAGE_BYTES
from zrun_core.memory.placement import place
from zrun_core.models.gpt import gpt
from zrun_core.pipeline.split import Split
from zrun_core.plan.memory.states import (
    PlannedModel,
    plan_model,
    rank_buffers,
    settings_of,
)
from zrun_core.plan.question.size import gpt_of_size
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import Coordinates, ParallelDims
from zrun_core.zero.wrap.sharding_config import ShardingConfig

HOST, DISK = Tier.HOST, Tier.DISK
OWN = {Kind.PARAM, Kind.GRAD, Kind.OPTIM}
PAPER = {"compute": "bf16", "reduce": "compute"}  # gradients of 2 bytes


def settings(device: str = "cuda", **keys: Any) -> ShardingConfig:
    job = {
        "name": "plan",
        "model": "m:m",
        "data": "d:d",
        "steps": 1,
        "batch": 8,
        "precision": PAPER,
        **keys,
    }
    return settings_of(JobConfig.model_validate(job), lambda name: None, device)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)
        self.register_buffer("scale", torch.zeros(8))


class Net(nn.Module):
    """Elements: 256K of a tied embedding, 256K per block, 4K of a norm and a table: whole pages."""

    def __init__(self, depth: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(1024, 256), nn.Embedding(16, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.Linear(256, 16, bias=False)
        self.head = nn.Linear(256, 1024, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.zeros(4))


P = 1024 * 256 + 4 * 2 * 256 * 512 + 2 * 16 * 256


def cut(chosen: ShardingConfig, **options: Any) -> PlannedModel:
    with torch.device("meta"):
        return plan_model(Net(**options), chosen)


def sums(buffers: list[Buffer], tier: Tier = Tier.DEVICE, kinds: set[Kind] = OWN) -> int:
    return sum(b.num_bytes for b in buffers if b.tier is tier and b.kind in kinds)


# Tiers


@pytest.mark.parametrize(
    ("placement", "device", "host", "pinned"),
    [
        (ON_DEVICE, 16, 0, 0),
        (Placement(grad=HOST), 14, 2, 2),
        (Placement(optimizer=HOST), 4, 12, 0),
        (Placement(grad=HOST, optimizer=HOST), 2, 14, 2),
        (Placement(HOST, HOST, HOST), 0, 16, 4),
        (Placement(grad=HOST, optimizer=DISK), 2, 2, 2),
    ],
)
@pytest.mark.parametrize("stage", [0, 2])
def test_states_that_leave_the_device_are_the_papers(stage, placement, device, host, pinned):
    """Ren et al. 2021, table 1: 16P, 14P, 4P, 2P on one GPU."""
    chosen = settings(zero=stage)
    found = rank_buffers(cut(chosen), chosen, ParallelDims(1), placement=placement)
    assert sums(found) == device * P
    assert sums(found, HOST) == host * P
    assert sum(b.num_bytes for b in found if b.pinned and b.kind in OWN) == pinned * P
    assert sums(found, DISK) == (16 - device - host) * P


def test_what_crosses_the_bus_has_pinned_slots():
    chosen = settings(zero=2)
    block, largest = 1024 * 256, 1040 * 256  # elements; the largest unit has both tables

    def scratch(placement: Placement, dp: int = 1) -> dict[str, int]:
        found = rank_buffers(cut(chosen), chosen, ParallelDims(dp), placement=placement)
        assert all(b.pinned for b in found if b.tier is HOST and b.kind is Kind.RING)
        return {b.name: b.num_bytes for b in found if b.kind is Kind.RING and b.num_bytes}

    assert scratch(ON_DEVICE) == {}
    assert scratch(Placement(optimizer=HOST)) == {
        "gradient staging": 2 * 2 * largest,
        "parameter staging": 2 * 2 * largest,
    }
    assert scratch(Placement(grad=HOST, optimizer=HOST)) == {
        "reduce ring": 3
        * 2
        * largest,  # one unit is filled, one is on its way down, and the tied one fills slowly
        "gradient staging": 2 * 2 * largest,  # micro-batches are added on the host
        "parameter staging": 2 * 2 * largest,
    }
    everything = scratch(Placement(HOST, HOST, HOST))
    assert everything["gather ring"] == 2 * (largest + 3 * block), (
        "the lasting unit, one in use, one ahead, one on its way"
    )
    assert "parameter staging" not in everything, "it is updated where it is"
    on_disk = scratch(Placement(optimizer=DISK), dp=2)
    assert on_disk["disk slots of optim"] == 3 * 12 * largest // 2
    assert on_disk["gradient staging"] == 2 * 2 * largest // 2


def test_fp32_parameters_need_a_copy_where_the_update_is_elsewhere():
    chosen = settings(zero=0, precision="fp32")
    found = rank_buffers(cut(chosen), chosen, ParallelDims(1), placement=Placement(optimizer=HOST))
    assert (sums(found), sums(found, HOST)) == (8 * P, 12 * P)
    together = rank_buffers(
        cut(chosen), chosen, ParallelDims(1), placement=Placement(HOST, HOST, HOST)
    )
    assert sums(together, HOST) == 16 * P


def test_a_fraction_takes_the_units_whose_gradients_come_first():
    layouts = cut(settings()).layouts()
    assert [unit.name for unit in layouts][1:-1] == [f"blocks.{n}" for n in range(4)]
    away = Placement(optimizer=HOST, fraction=0.5)
    assert list(place(layouts, away)) == [layouts[-1].name, "blocks.3", "blocks.2", "blocks.1"]
    assert set(place(layouts, away).values()) == {Placement(optimizer=HOST)}
    assert place(layouts, replace(away, fraction=0.0)) == {}
    assert place(layouts, Placement(activation=HOST)) == {}, "they are no unit's"


@hypothesis.settings(deadline=None, max_examples=10)
@given(fraction=st.floats(0, 1), stage=st.integers(0, 3), dp=st.sampled_from([1, 2, 3, 8]))
def test_every_byte_has_a_home_whatever_the_fraction(fraction, stage, dp):
    chosen = settings(zero=stage)
    on_paper = cut(chosen)
    here = rank_buffers(on_paper, chosen, ParallelDims(dp))
    moved = rank_buffers(
        on_paper,
        chosen,
        ParallelDims(dp),
        placement=Placement(grad=HOST, optimizer=HOST, fraction=fraction),
    )
    assert sums(moved) + sums(moved, HOST) == sums(here)
    assert (
        sums(moved, HOST)
        >= fraction * sum(sums(here, kinds={kind}) for kind in (Kind.OPTIM, Kind.GRAD)) * 0.99
    )


def test_states_on_disk_begin_on_pages():
    chosen = settings(zero=1, precision="fp32")
    with torch.device("meta"):
        odd = plan_model(nn.Sequential(nn.Linear(37, 41)), chosen)
    found = rank_buffers(odd, chosen, ParallelDims(3), placement=Placement(optimizer=DISK))
    assert {b.num_bytes % PAGE_BYTES for b in found if b.tier is DISK} == {0}


@pytest.mark.parametrize(
    "optim",
    [
        {},
        {"name": "lion"},
        {"name": "lamb"},
        {"name": "lamb", "moments": "bf16"},
        {"moments": "bf16"},
        {"name": "lars"},
    ],
    ids=str,
)
def test_scratch_of_updates_is_on_each_tier_that_updates(optim):
    chosen = settings(optim=optim)
    assert chosen.optimizer is not None
    kept = chosen.optimizer.scratch_bytes("cpu", chosen.precision.reduce)
    on_paper = cut(chosen)
    for placement, tier, device in (
        (ON_DEVICE, Tier.DEVICE, "cpu"),
        (Placement(optimizer=HOST), HOST, "cuda"),
    ):
        found = rank_buffers(on_paper, chosen, ParallelDims(1), placement=placement, device=device)
        listed = [(b.tier, b.num_bytes) for b in found if b.kind is Kind.TEMP]
        assert listed == [(tier, kept)] * bool(kept)
    half = rank_buffers(
        on_paper,
        chosen,
        ParallelDims(1),
        placement=Placement(optimizer=HOST, fraction=0.5),
        device="cpu",
    )
    assert len([b for b in half if b.kind is Kind.TEMP]) == 2 * bool(kept)


# Pipelines


def uses(depth: int = 4, tied: bool = True) -> dict[str, tuple[int, ...]]:
    found = {"embed.weight": (0, depth) if tied else (0,), "places.weight": (0,)}
    for number in range(depth):
        found |= {f"blocks.{number}.{name}.weight": (number,) for name in ("up", "down")}
    return found | {"norm.weight": (depth,)} | ({} if tied else {"head.weight": (depth,)})


@pytest.mark.parametrize("tied", [True, False])
def test_stages_have_what_they_use(tied):
    chosen = settings(zero=1)
    with torch.device("meta"):
        on_paper = plan_model(Net(tied=tied), chosen, uses=uses(tied=tied))
    names = [slot.name for unit in on_paper.units() for slot in unit.slots]
    split = Split((0, 3), num_blocks=4, pp=2)
    stages = [
        [unit.name for unit in on_paper.layouts(2, split=split, stage=stage)] for stage in range(2)
    ]
    alike = "{embed,places}(alike over tied)" if tied else "{embed,places}"
    assert stages[0] == [*["{embed,places}"] * tied, alike, "blocks.0", "blocks.1", "blocks.2"]
    assert stages[1] == [*["embed(alike over tied)"] * tied, "blocks.3", "{norm,head}"]
    buffers = [
        rank_buffers(on_paper, chosen, ParallelDims(2, pp=2), rank=Coordinates(pp=stage))
        for stage in range(2)
    ]
    for found in buffers:
        kept = {b.name for b in found if b.kind is Kind.BUFFER}
        assert kept == {"mask", *(f"blocks.{number}.scale" for number in range(4))}, (
            "what is computed from the batch alone may need any of them"
        )
    again = [slot.name for unit in on_paper.units() for slot in unit.slots]
    assert again == names, "the whole model is as it was"


def test_a_stage_with_one_block_has_it_as_a_block() -> None:
    chosen = settings()
    with torch.device("meta"):
        on_paper = plan_model(Net(), chosen, uses=uses())
    found = on_paper.units(Split((0, 1, 2, 3), num_blocks=4, pp=4), 1)
    assert [(unit.name, unit.block) for unit in found] == [("blocks.1", "blocks.1")]


def test_chunks_of_a_stage_have_units_of_their_own() -> None:
    chosen = settings(zero={"stage": 3, "persist_below": "9kB"})
    with torch.device("meta"):
        on_paper = plan_model(Net(), chosen, uses=uses())
    split = Split((0, 1, 2, 3), num_blocks=4, pp=2)
    found = [
        [(unit.chunk, slot.name) for unit in on_paper.units(split, stage) for slot in unit.slots]
        for stage in range(2)
    ]
    assert found[0] == [
        (0, "embed.weight"),
        *((0, f"blocks.0.{name}.weight") for name in ("up", "down")),
        *((1, f"blocks.2.{name}.weight") for name in ("up", "down")),
        (0, "places.weight"),
    ]
    assert {chunk for chunk, name in found[1] if name in ("embed.weight", "norm.weight")} == {1}
    everything = sum(unit.numel for stage in (0, 1) for unit in on_paper.units(split, stage))
    assert everything == P + 1024 * 256, "the tied embedding is on both"


def test_dims_must_divide():
    assert ParallelDims(8, tp=2, pp=4).world_size == 64
    assert ParallelDims(8).shard_size == 8
    for wrong in ({"dp": 0}, {"dp": 8, "shard": 3}, {"dp": 1, "virtual": 2}, {"dp": 2, "tp": -1}):
        with pytest.raises(ValueError, match=r"must be at least 1|do not divide|need a pipeline"):
            ParallelDims(**wrong)


def test_a_size_has_as_many_states_as_it_says():
    chosen = settings(zero=3)
    with torch.device("meta"):
        model = plan_model(gpt(**gpt_of_size("1.3B").args()), chosen)
    assert model.num_params == pytest.approx(1.3e9, rel=0.003)
    assert sums(rank_buffers(model, chosen, ParallelDims(64))) == pytest.approx(
        16 * 1.3e9 / 64, rel=0.01
    ), "and padding"
