"""Trainings whose states live elsewhere than on the device, and what they come to.

`apart` is a host tier apart from the CPU that trains: other memory, with copies by a thread that
come late.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from toys import build, data, make_sharded, train_sharded

from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.memory.buffers import Placement, Tier
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
    "apart parameters": Placement(param=HOST),
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
    """Return a model whose states live as `placement` says, on disk in `folder`."""
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
        found |= {(unit.name, name): each.clone() for name, each in unit.record.moments.items()}
        unit.drop_values()
    with sharded.gathered() as module:
        found |= {name: value.clone() for name, value in module.state_dict().items()}
    return found


def check_slots(sharded: ShardedModel) -> None:
    """Nobody has kept a piece of host memory: whoever needs the next one would wait for ever."""
    sharded.settle_updates()
    if sharded.tiers is not None:
        sharded.tiers.worker.submit(lambda: None).wait()  # what it does gives some back
        assert sharded.tiers.slots_taken == {}, sharded.tiers.slots_taken


def run(
    stage: int, placement: Placement, settings: dict[str, Any], accumulation: int, schedule: str
) -> tuple[list[float], dict[Any, torch.Tensor]]:
    """Train four steps; return the losses, and `parts_of` the model."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        sharded = sharded_at(stage, placement, folder, settings, schedule=schedule)
        losses = train_sharded(sharded, data(2), accumulation=accumulation)
        ReplicaGuard(sharded).check(2, {"step": 2.0})
        assert sharded.find_nonfinite_parameter() is None
        losses += train_sharded(sharded, data(4)[2:], accumulation=accumulation)
        found = parts_of(sharded)
        check_slots(sharded)
        return losses, found


def assert_equal(here: Any, away: Any) -> None:
    """Compare what two trainings came to on each rank, bit for bit."""
    for (losses, parts), (own_losses, own_parts) in zip(here, away, strict=True):
        assert own_losses == losses
        assert own_parts.keys() == parts.keys()
        assert [k for k in parts if not torch.equal(parts[k], own_parts[k])] == []
