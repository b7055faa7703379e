"""One flat unit of parameters: its memory, and what is done with it.

Four ranks of a shard group, seen by rank 1:

    param.full      |-- shard 0 --|-- shard 1 --|-- shard 2 --|-- shard 3 --|   compute dtype
    param.shard                   |-------------|          constant address, always valid
    updated_range                 |-------------|          also of `master`, moments, `grad.local`

At stage 0 the shard group is one rank, and its shard is everything.

    param    the parameters: sharded between uses, unsharded in use     `unit_params.py`
    grad     from the parameters' gradients to the sum over ranks       `unit_grad.py`
    record   master and moments, which an update reads and writes       `unit_record.py`

Each of the three has its home on a tier of its own. The update runs where the record is, beside
training if that is elsewhere (`update_side.py`): a unit that is being updated is stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from zrun_core.distributed.mesh import UnitGroups
from zrun_core.distributed.transport import Group
from zrun_core.memory.arena import PagePool, StorageMeter
from zrun_core.memory.buffers import ON_DEVICE, Buffer, Kind, Placement, Tier
from zrun_core.memory.layout import ParamSlot, UnitLayout, whole_pages
from zrun_core.memory.state_policy import MeshInfo, StatePolicy
from zrun_core.tiers.stored import Stored
from zrun_core.tiers.tiers import Tiers
from zrun_core.tiers.transfer import Transfer
from zrun_core.zero.unit.exchange import Exchange
from zrun_core.zero.unit.home_elsewhere import OnDisk, OnHost
from zrun_core.zero.unit.unit_grad import UnitGrad
from zrun_core.zero.unit.unit_params import UnitParams, copy_elements
from zrun_core.zero.unit.unit_record import UnitRecord
from zrun_core.zero.unit.update_side import UpdateSide


class Values(NamedTuple):
    """A range of a unit's elements in this rank's memory.

    Attributes:
        flat: [number of elements], live: a write to it is a write to the unit.
        start: the range's first element, counted from the unit's beginning.
    """

    flat: torch.Tensor
    start: int


class StoredValues(NamedTuple):
    """The same as they are stored, to be read by another thread."""

    flat: torch.Tensor | Stored
    start: int


class FlatUnit:
    """A unit on this rank.

    Its memory is touched in `zero/` and `optim/` only. Other code asks for `values` or
    `resident_params`, and calls `values_changed` after writing to what `values` returned.

    Attributes:
        index: number of the unit in the model; messages between ranks carry it.
        params: the module's parameters, as in `layout.slots`.
        leaf: gathered and reduced as a whole, whatever runs inside of its module.
        shard: the ranks that divide the unit between them, `layout.num_shards` of them.
        replicate: the ranks that hold the same shard.
        mesh_info: this rank's place in both.
        updated_range: first and last + 1 of the elements that this rank updates.
        param: its parameters, whole or sharded.
        grad: its gradient; only trainable units have one, and a record.
        record: its master and moments.
        update_side: what its update reads and writes, and waits for.
        num_active: calls of its modules under way.
        pins: holders that keep it unsharded until they release it.
    """

    def __init__(
        self,
        index: int,
        layout: UnitLayout,
        params: list[nn.Parameter],
        leaf: bool,
        *,
        policy: StatePolicy,
        exchange: Exchange,
        groups: UnitGroups,
        mesh_info: MeshInfo,
        device: torch.device,
        pool: PagePool | StorageMeter,
        placement: Placement = ON_DEVICE,
        tiers: Tiers | None = None,
    ) -> None:
        """Allocate everything that the unit keeps, except the moments.

        Args:
            groups: of ranks that divide it, and hold copies of its shards.
            mesh_info: this rank's place in them.
            pool: memory for parameters in use.
            tiers: of this rank; needed where a state is elsewhere.
        """
        self.index = index
        self.layout = layout
        self.params = params
        self.leaf = leaf
        self.policy = policy
        self.exchange = exchange
        self.shard, self.replicate = groups
        self.mesh_info = mesh_info
        self.placement = placement
        self.tiers = tiers
        self.num_active = 0
        self.pins = 0
        self.updated_range = exchange.updated_range(layout, mesh_info)
        self.update_side = UpdateSide(self)
        self.param = UnitParams(self, device, pool)
        if self.trainable:
            self.record = UnitRecord(self, device)
            self.grad = UnitGrad(self, device)

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def trainable(self) -> bool:
        return self.layout.trainable

    @property
    def has_master(self) -> bool:
        """True if an update changes fp32 masters, and casts them to the parameters."""
        return self.trainable and self.record.has_master

    @property
    def update_device(self) -> torch.device:
        """Device of the memory in which the update runs, and of `values`."""
        return torch.device("cpu") if self.update_side.is_elsewhere else self.param.device

    @property
    def is_kept_unsharded(self) -> bool:
        """True if all parameters are valid here from use to use."""
        return self.param.is_kept_unsharded

    @property
    def has_states_elsewhere(self) -> bool:
        """True if a state is not on the device. Values of few such units are here at a time."""
        return self.placement is not ON_DEVICE

    def make_away(
        self, kind: Kind, numel: int, dtype: torch.dtype, own: tuple[int, int] | None = None
    ) -> OnHost | OnDisk:
        """Make a home elsewhere for `numel` elements of a state, of which `own` are updated."""
        assert self.tiers is not None
        if self.placement.tier_of(kind) is Tier.HOST:
            return OnHost(self.tiers, kind, numel, dtype)
        return OnDisk(self.tiers, kind, f"the {kind.value} of {self.name}", numel, dtype, own)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' views of `flat` [padded_numel], in the shapes of the slots."""
        return [_view(flat, slot) for slot in self.layout.slots]

    def local_part(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements that this rank updates of `flat` [padded_numel]."""
        start, stop = self.updated_range
        return flat[start:stop]

    # Updates

    @property
    def master(self) -> torch.Tensor:
        """[updated range], what an update changes: fp32, or the parameters if there is no master.

        Both once they were fetched.
        """
        return self.record.master if self.has_master else self.param.updated

    def fetch_record(self) -> torch.Tensor:
        """Fetch the record, and the parameters where they are their own masters.

        Returns:
            The record, [num_bytes] uint8.
        """
        if not self.has_master:
            self.param.home.fetch()
        self.record.home.fetch()
        return self.record.home.at()

    def mark_stale(self) -> None:
        """After an update of the local elements: those that other ranks update must be gathered.

        So must those that live elsewhere than where they are used. While an update runs beside
        training, the unit counts as stale too: so `unshard`, which does nothing for a unit that is
        unsharded, comes to wait for it.
        """
        is_copied = self.exchange.goes_stale(self.mesh_info) or self.param.is_elsewhere
        if is_copied or self.update_side.is_running:
            self.param.mark_stale()

    def begin_updating(self, updating: Transfer, *, delayed: bool) -> None:
        """Have `unshard` wait for an update that runs beside training.

        Args:
            updating: is over when the update is.
            delayed: only `settle` waits, which casts the updated masters to the parameters.
        """
        self.update_side.begin(updating, delayed=delayed)
        if not delayed:
            self.mark_stale()

    def settle(self) -> None:
        """Wait for the update, so that whoever looks between two steps finds its result."""
        self.update_side.wait()
        if self.update_side.is_delayed:
            self.update_side.is_delayed = False
            self.fetch_record()
            self.values_changed()
            return
        if not self.exchange.goes_stale(self.mesh_info):
            # Only the update that ran made it stale, and this rank updates all of it.
            self.param.mark_valid()

    # Values between two steps: for checkpoints, guards and the user

    def load(self, sources: list[torch.Tensor]) -> None:
        """Fill everything that is kept of the parameters, and the master.

        Args:
            sources: full value of each parameter, as in `layout.slots`, on any device. A value on
                the meta device is skipped: it is filled later.
        """
        with torch.no_grad():
            self.param.fill(sources)
            if not self.has_master:
                return
            self.record.home.at().zero_()
            copy_elements(self.layout, self.master, self.updated_range, sources)
        self.record.home.put()
        self.record.home.drop()

    def write_back(self) -> None:
        """After user code wrote to the unsharded parameters: update the shard and the master.

        A master changes only where its parameter did: elsewhere it keeps the digits that the
        compute dtype does not have.
        """
        self.param.write_back()
        if not self.has_master:
            return
        master = self.record.fetch_master()
        written = self.local_part(self.param.full).to(master.device)
        changed = written != master.to(self.layout.dtype)
        if changed.any():
            master[changed] = written[changed].float()
            self.record.home.put()
        self.record.home.drop()

    def values(self) -> Values:
        """Return the most exact values that this rank keeps, padding included.

        They are the fp32 masters where there are any.
        """
        if self.has_master:
            return Values(self.record.fetch_master(), self.updated_range[0])
        if self.trainable:
            return Values(self.param.fetch(), self.updated_range[0])
        return Values(*self.param.kept())

    def stored_values(self) -> StoredValues:
        """Return what `values` returns, where it is stored. Nothing is fetched."""
        if self.has_master:
            return StoredValues(self.record.stored_master(), self.updated_range[0])
        start, stop = self.updated_range if self.trainable else self.param.kept_range
        return StoredValues(self.param.stored(start, stop), start)

    def stored_moment(self, name: str) -> torch.Tensor | Stored:
        """Return one of the moments, where it is stored. Nothing is fetched."""
        return self.record.stored_moment(name)

    def values_changed(self) -> None:
        """Update the parameters from what was written to `values`; foreign shards are stale."""
        if not self.trainable:
            self.param.home.put()
            self.param.home.drop()
            return
        if (target := self.update_side.target()) is not None:
            target.copy_(self.master)
        self.update_side.end()
        self.update_side.wait_for_arrival()
        self.mark_stale()

    def copied_grad(self) -> torch.Tensor:
        """Return a copy of the step's gradient, of what this rank updates: fp32 on the CPU."""
        return self.grad.copied()

    def drop_values(self) -> None:
        """Release the memory of what was fetched to be looked at."""
        self.param.home.drop()
        if self.trainable:
            self.record.home.drop()
            self.grad.drop()

    def resident_params(self) -> Values:
        """Return the parameters that are valid here without a gather: all, or the updated range."""
        local = self.param.fetch()
        if self.is_kept_unsharded:
            return Values(self.param.full, 0)
        return Values(local, self.updated_range[0])

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of this unit's permanent memory; some share their memory."""
        yield from self.param.tensors()
        if self.trainable:
            yield from self.grad.tensors()
            yield from self.record.tensors()

    def counted_once(self) -> tuple[range, Group]:
        """Return parts to count, and the smallest group in which all parts are counted once.

        Replicas deal out the parts of a shard if it has more than one; else each of them counts
        its part for its own shard group.
        """
        if self.layout.num_parts > self.layout.num_shards:
            return self.exchange.counted_parts(self.layout, self.mesh_info), self.replicate
        return self.layout.parts_of_shard(self.shard.index), self.shard

    def allocated(self) -> list[Buffer]:
        """Return the permanent buffers as allocated. Moments come with the first update."""
        sizes = {Kind.PARAM: len(self.param.windows) * self.param.home.num_bytes}
        if self.trainable:
            sizes[Kind.GRAD] = whole_pages(self.grad.home.num_bytes)
            sizes[Kind.OPTIM] = self.record.home.num_bytes
        return [
            Buffer(f"{self.name}/{kind.value}", kind, size, self.placement.tier_of(kind))
            for kind, size in sizes.items()
        ]


def _view(flat: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
    return flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + slot.offset)
