"""States elsewhere change nothing: every placement, stage, format and optimizer, to the bit.

`apart` is a host tier apart from the CPU that trains: other memory, with copies by a thread that
come late.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from toys import build, data, make_sharded, train_sharded

from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.memory.buffers import ON_DEVICE, Placement, Tier
from zrun_core.tiers.copies import ThreadCopier
from zrun_core.zero.sharded_model import ShardedModel

Ranks = Callable[[int], Any]
HOST, DISK = Tier.HOST, Tier.DISK
PLACEMENTS = {
    "apart optimizer": Placement(optimizer=HOST),
    "apart": Placement(grad=HOST, optimizer=HOST),
    "apart, half": Placement(grad=HOST, optimizer=HOST, fraction=0.5),
    "disk optimizer": Placement(optimizer=DISK),
    "disk": Placement(grad=DISK, optimizer=DISK),
    "apart and disk": Placement(grad=HOST, optimizer=DISK),
}
WITH_PARAMETERS = {
    "apart, all": Placement(param=HOST, grad=HOST, optimizer=HOST),
    "disk, all": Placement(param=DISK, grad=DISK, optimizer=DISK),
    "disk parameters": Placement(param=DISK),
    "mixed": Placement(param=DISK, grad=HOST, optimizer=HOST),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, clipped": {"precision": "bf16", "optim": {"clip": 0.05}},
    "fp16": {"precision": {"compute": "fp16", "loss_scale": {"init": 2.0**40}}},
    "sgd": {"optim": {"name": "sgd", "args": {"momentum": 0.9}, "betas": None, "eps": None}},
    "adagrad": {"optim": {"name": "adagrad", "args": {"initial_accumulator_value": 0.3}}},
    "lion, bf16": {"precision": "bf16", "optim": {"name": "lion", "moments": "bf16"}},
}


def late_copies() -> ThreadCopier:
    """Each copy sleeps for a while of its own."""
    chance = random.Random(7)
    return ThreadCopier(lambda: chance.choice([0.0, 0.0, 0.002]))


def sharded_at(
    stage: int, placement: Placement, folder: str, settings: dict[str, Any], **more: Any
) -> ShardedModel:
    needs_apart = HOST in (placement.param, placement.grad, placement.optimizer)
    return make_sharded(
        build(),
        stage,
        placement=placement,
        disk_folder=folder,
        apart=late_copies() if needs_apart else None,
        **settings,
        **more,
    )


def parts_of(sharded: ShardedModel) -> dict[Any, torch.Tensor]:
    """Masters, moments and parameters."""
    sharded.settle_updates()
    found: dict[Any, torch.Tensor] = {}
    for unit in sharded.units:
        if not any(unit.layout.pieces(*unit.updated_range)):
            continue  # padding only
        unit.fetch_record()
        found[unit.name, "master"] = unit.master.clone()
        found |= {(unit.name, name): each.clone() for name, each in unit.moments.items()}
        unit.drop_values()
    with sharded.gathered() as module:
        found |= {name: value.clone() for name, value in module.state_dict().items()}
    return found


def run(
    stage: int, placement: Placement, settings: dict[str, Any], accumulation: int, schedule: str
) -> tuple[list[float], dict[Any, torch.Tensor]]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        sharded = sharded_at(stage, placement, folder, settings, schedule=schedule)
        losses = train_sharded(sharded, data(2), accumulation=accumulation)
        ReplicaGuard(sharded).check(2, {"step": 2.0})
        assert sharded.find_nonfinite_parameter() is None
        losses += train_sharded(sharded, data(4)[2:], accumulation=accumulation)
        return losses, parts_of(sharded)


def cases() -> Iterator[Any]:
    for stage in range(4):
        placements = PLACEMENTS | (WITH_PARAMETERS if stage == 3 else {})
        for place, (name, settings) in itertools.product(placements, SETTINGS.items()):
            yield pytest.param(stage, placements[place], settings, id=f"{stage}-{place}-{name}")


@pytest.mark.parametrize(("stage", "placement", "settings"), list(cases()))
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_where_states_live_changes_no_bit(
    ranks: Ranks, num_ranks: int, stage: int, placement: Placement, settings: dict[str, Any]
) -> None:
    accumulation = 3
    here = ranks(num_ranks).run(run, stage, ON_DEVICE, settings, accumulation, "overlap")
    away = ranks(num_ranks).run(run, stage, placement, settings, accumulation, "overlap")
    for (losses, parts), (own_losses, own_parts) in zip(here, away, strict=True):
        assert own_losses == losses
        assert own_parts.keys() == parts.keys()
        assert [k for k in parts if not torch.equal(parts[k], own_parts[k])] == []


def scratch_of_threads(placement: Placement) -> tuple[set[int], set[int]]:
    """Return the scratch of updates that training makes, and of those that the worker makes."""
    sharded = sharded_at(3, placement, "", {"precision": "bf16"})
    here, beside = set(), set()
    for unit, _, update in sharded.optimizer.updated_pieces():
        if unit.is_updated_elsewhere:
            beside.add(id(update.scratch))
        else:
            here.add(id(update.scratch))
    return here, beside


def test_two_threads_that_update_share_no_scratch(ranks: Ranks) -> None:
    here, beside = ranks(1).run(scratch_of_threads, PLACEMENTS["apart, half"])[0]
    assert len(here) == len(beside) == 1
    assert not here & beside
