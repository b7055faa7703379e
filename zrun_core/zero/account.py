"""Bytes that a model should send, move and allocate by its layouts, and that it has allocated.

    planned_memory(sharded) == allocated_memory(sharded)      of every kind, on every tier

Pure formulas give what is planned; tests hold both equal.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zrun_core.memory.buffers import Buffer, Kind, Tier
from zrun_core.memory.state_policy import module_buffers
from zrun_core.memory.tier_traffic import Move, step_traffic
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit import exchange
from zrun_core.zero.wrap.sharding_config import MemoryAccount, planned_buffers


def expected_traffic(
    sharded: ShardedModel, num_steps: int, num_micro_batches: int
) -> dict[str, int]:
    """Return the bytes that this rank should have sent in training, by kind of collective.

    It holds for models whose modules each run once per forward, in any order of forwards and
    backwards, unless a parameter is accessed outside of its module: micro-batches under way share
    what one of them has pinned. Which units the passes need was recorded while they ran: frozen
    ones without a gradient are gathered once.
    """
    gatherer = sharded.gatherer
    return exchange.expected_traffic(
        sharded.layouts,
        sharded.settings.states,
        sharded.settings.exchange,
        exchange.StepCounts(
            num_steps, num_micro_batches, gatherer.stale.num_refreshes, sharded.num_pushes
        ),
        sharded.places,
        gathers=[gatherer.counts.num_gathers(unit) for unit in sharded.units],
    )


def planned_moves(sharded: ShardedModel, micro_batches: int) -> dict[Move, int]:
    """Return the bytes that a step should move between tiers. It holds as `expected_traffic`."""
    if sharded.tiers is None:
        return {}
    states = sharded.settings.states
    passes = 1 if states.layer_major else micro_batches
    gatherer = sharded.gatherer
    return step_traffic(
        sharded.layouts,
        sharded.placements,
        states,
        sharded.places,
        micro_batches=micro_batches,
        gathers={unit.name: passes * gatherer.counts.num_gathers(unit) for unit in sharded.units},
        host_is_device=sharded.tiers.host_is_device,
    )


def planned_memory(sharded: ShardedModel) -> MemoryAccount:
    """Return what this rank allocates according to the layouts."""
    account = MemoryAccount()
    account.add(
        planned_buffers(
            sharded.layouts,
            sharded.settings,
            sharded.places,
            sharded.comm.device,
            is_apart=sharded.is_apart,
        )
    )
    account.add(module_buffers(sharded.module))
    return account


def allocated_memory(sharded: ShardedModel) -> MemoryAccount:
    """Return what this rank has allocated."""
    account = MemoryAccount()
    for unit in sharded.units:
        account.add(unit.allocated())
    account.add(module_buffers(sharded.module))
    account.add([Buffer("rings", Kind.RING, sum(sharded.ring_bytes))])
    if sharded.tiers is not None:
        slots = sharded.tiers.slot_bytes
        account.add([Buffer("slots", Kind.RING, slots, Tier.HOST)])
    return account


def own_tensors(sharded: ShardedModel) -> Iterator[torch.Tensor]:
    """Yield the tensors in which this rank's states and scratch lie."""
    for unit in sharded.units:
        yield from unit.tensors()
    yield from sharded.reducer.ring.tensors
    yield from sharded.module.buffers()
    if sharded.settings.optimizer is not None:
        yield from sharded.optimizer.tensors()


def grown_rings(sharded: ShardedModel) -> list[tuple[str, int, int]]:
    """Return purpose, planned bytes and held bytes of rings that grew beyond the plan."""
    purposes = ("gathering", "reducing")
    rings = zip(purposes, sharded.planned_rings, sharded.ring_bytes, strict=True)
    return [(purpose, planned, held) for purpose, planned, held in rings if held > planned]
