"""Bytes that a step moves between the tiers of a rank. Pure: plans, runs and tests agree on them.

A unit of 2048 elements in bf16 with AdamW on one rank, all of it on disk, at stage 3 with two
micro-batches, in bytes:

                  from the disk                         to the disk
    params        4 gathers * 4096                      4096        by the update
    grads         8192 to add to, 8192 by the update    2 * 8192    after each micro-batch
    optim         24576 by the update                   24576       by the update
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from zrun_core.memory.buffers import Kind, Placement, Tier
from zrun_core.memory.layout import UnitLayout, whole_pages
from zrun_core.memory.state_policy import MeshInfo, RankPlaces, StatePolicy


class Direction(StrEnum):
    """The way of bytes, as seen from a tier."""

    READ = "read"  # from it, towards the device
    WRITTEN = "written"  # to it


class Move(NamedTuple):
    """A kind of transfer, by which bytes are counted.

    Attributes:
        tier: "host" is what crosses between the device and its host, also on its way from or to a
            disk; "disk" what crosses between the host and its disks.
        direction: from that tier, or to it.
        kind: of the states that move.
    """

    tier: Tier
    direction: Direction
    kind: Kind


def step_traffic(
    units: Sequence[UnitLayout],
    placements: Mapping[str, Placement],
    states: StatePolicy,
    places: RankPlaces,
    *,
    micro_batches: int,
    gathers: Mapping[str, int],
    host_is_device: bool = False,
) -> dict[Move, int]:
    """Return the bytes that one training step of a rank moves between tiers.

    Whole updated ranges move, padding included, and on a disk whole pages of them.

    Args:
        placements: by unit name, of units whose states are not all on the device.
        gathers: by unit name, how often its parameters come from their home in the step: twice per
            micro-batch at stage 3, twice per step where blocks run layer by layer.
        host_is_device: the device computes in the host's memory: nothing crosses between them.
    """
    traffic = _Traffic(host_is_device)
    for unit in units:
        placement = placements.get(unit.name)
        if placement is None:
            continue
        mesh_info = places.of(unit)
        sizes = Counter[Kind]()
        for buffer in states.buffers(unit, mesh_info, placement):
            sizes[buffer.kind] += buffer.num_bytes
        traffic.to_device(placement.param, Kind.PARAM, gathers[unit.name] * sizes[Kind.PARAM])
        if not unit.trainable:
            continue
        start, stop = states.ownership.updated_range(unit, mesh_info)
        owned = _Owned(
            grad=(stop - start) * states.reduce_dtype.itemsize,
            param=(stop - start) * unit.dtype.itemsize,
            record=sizes[Kind.OPTIM],
        )
        _count_gradients(
            traffic, placement, owned, sizes[Kind.GRAD], states, mesh_info, micro_batches
        )
        if any(unit.pieces(start, stop)):  # what is padding only has no update
            has_master = states.has_master(unit, placement)
            _count_update(traffic, placement, owned, has_master=has_master)
    return {move: num_bytes for move, num_bytes in traffic.moved.items() if num_bytes}


class _Owned(NamedTuple):
    """Bytes of a unit's states that its update on a rank reads and writes."""

    grad: int
    param: int
    record: int


class _Traffic:
    """Bytes by kind of transfer."""

    def __init__(self, host_is_device: bool) -> None:
        self._host_is_device = host_is_device
        self.moved: Counter[Move] = Counter()

    def to_device(self, home: Tier, kind: Kind, num_bytes: int) -> None:
        """Count what comes from its home to the device."""
        self._cross(home, Direction.READ, kind, num_bytes)

    def from_device(self, home: Tier, kind: Kind, num_bytes: int) -> None:
        """Count what goes from the device to its home."""
        self._cross(home, Direction.WRITTEN, kind, num_bytes)

    def on_disk(self, home: Tier, direction: Direction, kind: Kind, num_bytes: int) -> None:
        """Count what moves between a home and the host, where the update runs."""
        if home is Tier.DISK:
            self.moved[Move(Tier.DISK, direction, kind)] += whole_pages(num_bytes)

    def _cross(self, home: Tier, direction: Direction, kind: Kind, num_bytes: int) -> None:
        self.on_disk(home, direction, kind, num_bytes)
        if home is not Tier.DEVICE and not self._host_is_device:
            self.moved[Move(Tier.HOST, direction, kind)] += num_bytes


def _count_gradients(
    traffic: _Traffic,
    placement: Placement,
    owned: _Owned,
    grad_bytes: int,
    states: StatePolicy,
    mesh_info: MeshInfo,
    micro_batches: int,
) -> None:
    """Count the gradients of a step on their way to their home, where micro-batches add up.

    `grad_bytes` are those of the home, `owned` what the rank updates.
    """
    home = placement.grad
    are_summed_late = not states.zero.reduce_now(boundary=False)
    has_peers = mesh_info.shard_size * mesh_info.num_replicas > 1
    if are_summed_late and has_peers:
        # What all but the last micro-batch have added up comes back, to be summed over the ranks.
        earlier = micro_batches - 1
        traffic.from_device(home, Kind.GRAD, earlier * grad_bytes)
        if earlier:
            added = (earlier - 1) * grad_bytes
            traffic.on_disk(home, Direction.READ, Kind.GRAD, added)
            traffic.to_device(home, Kind.GRAD, grad_bytes)
        traffic.from_device(home, Kind.GRAD, owned.grad)
        return
    traffic.from_device(home, Kind.GRAD, micro_batches * grad_bytes)
    traffic.on_disk(home, Direction.READ, Kind.GRAD, (micro_batches - 1) * grad_bytes)


def _count_update(
    traffic: _Traffic, placement: Placement, owned: _Owned, *, has_master: bool
) -> None:
    """Count what an update reads and writes elsewhere than where it runs.

    That is the host, unless the optimizer is on the device. With `has_master`, it reads a master
    and only writes the parameters.
    """
    home = placement.param
    if placement.optimizer is Tier.DEVICE:
        traffic.from_device(home, Kind.PARAM, owned.param)
        return
    if placement.grad is Tier.DEVICE:
        traffic.from_device(Tier.HOST, Kind.GRAD, owned.grad)
    traffic.on_disk(placement.grad, Direction.READ, Kind.GRAD, owned.grad)
    for direction in Direction:
        traffic.on_disk(placement.optimizer, direction, Kind.OPTIM, owned.record)
    if home is Tier.DEVICE:
        traffic.to_device(Tier.HOST, Kind.PARAM, owned.param)
        return
    traffic.on_disk(home, Direction.WRITTEN, Kind.PARAM, owned.param)
    if not has_master:
        traffic.on_disk(home, Direction.READ, Kind.PARAM, owned.param)
