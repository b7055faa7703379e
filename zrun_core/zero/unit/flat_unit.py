"""One flat unit of parameters: its memory, and what is done with it.

Four ranks of a shard group, seen by rank 1:

    full            |-- shard 0 --|-- shard 1 --|-- shard 2 --|-- shard 3 --|   compute dtype
    param_shard                   |-------------|          constant address, always valid
    updated_range                 |-------------|          also of `master`, `moments`, `local_grad`

At stage 0 the shard group is one rank, and its shard is everything.

    unshard           begin to gather the foreign shards
    wait_for_unshard  the module's parameters are views of `full` from now on
    reshard           keep the own shard only
    grad              its gradient, from the parameters' to the sum over ranks: see `unit_grad.py`
    mark_stale        the shard was updated: the foreign shards are those of the last step

Three states live in a `Home` each: what is kept of the parameters between uses, the gradient, and
the record (master and moments, see `record_layout.py`).

A home may be on another tier than the device. Parameters that live elsewhere come in two steps: the
own shard from its home, then the others' by a gather. The update runs where the record is, beside
training: a unit that is being updated is stale, and `unshard` waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.handle import Handle
from zrun_core.distributed.transport import Group
from zrun_core.memory.arena import (
    PagePool,
    PageWindow,
    ResidentWindow,
    StorageMeter,
    StorageWindow,
    Window,
    byte_buffer,
    can_move_pages,
    flat_buffer,
)
from zrun_core.memory.buffers import ON_DEVICE, Buffer, Kind, Placement, Tier
from zrun_core.memory.layout import PAGE_BYTES, ParamSlot, UnitLayout, whole_pages
from zrun_core.memory.state_policy import MeshInfo, StatePolicy
from zrun_core.tiers.stored import Stored
from zrun_core.tiers.tiers import Tiers
from zrun_core.tiers.transfer import DONE, Transfer
from zrun_core.zero.unit.exchange import Exchange
from zrun_core.zero.unit.home import Home, InPlace, fetch_now
from zrun_core.zero.unit.home_elsewhere import AwayHome, OnDisk, OnHost
from zrun_core.zero.unit.record_layout import RecordLayout
from zrun_core.zero.unit.unit_grad import UnitGrad
from zrun_core.zero.unit.update_side import UpdateSide


class UnitState(Enum):
    """The valid parameters of a unit, and so what occupies memory.

    SHARDED: the own shard is valid. A unit that is resharded after use has memory for this shard
        only; another one has memory for all of it, with the foreign shards of the last step.
    FETCHING: memory of the whole unit; the own shard is coming from its home on another tier.
    UNSHARDING: memory of the whole unit; the own shard is valid, the foreign ones are arriving.
    UNSHARDED: memory of the whole unit, all of it valid.
    """

    SHARDED = "sharded"
    FETCHING = "fetching"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


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
        shard: the ranks that divide the unit between them, `layout.num_shards` of them.
        replicate: the ranks that hold the same shard.
        mesh_info: this rank's place in both.
        reshard_after_use: only a shard of the parameters stays in memory between uses.
        windows: memory for all parameters; several where there are older versions of them, which
            micro-batches under way use: see `versions.py`.
        param: home of what is kept of the parameters between uses, in compute dtype: the own shard
            if `reshard_after_use`, else all of them.
        full: [padded_numel] all parameters in compute dtype, the newest. The address is constant
            where there is one window; without memory while the unit is resharded.
        param_shard: [shard_numel] of `full`, this rank's part of the parameters.
        updated_range: first and last + 1 of the elements that this rank updates.
        local_param: [updated range], the parameters of these elements in compute dtype.
        record: home of what their update reads and writes beside the gradient, `record_layout`.
        moments: by name, the states that the optimizer keeps of each of these elements.
        grad: its gradient, and the home of that.
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
        shard: Group,
        replicate: Group,
        mesh_info: MeshInfo,
        device: torch.device,
        pool: PagePool | StorageMeter,
        placement: Placement = ON_DEVICE,
        tiers: Tiers | None = None,
    ) -> None:
        """Allocate everything that the unit keeps, except the moments.

        Args:
            index: number of the unit in the model.
            params: the module's parameters, as in `layout.slots`.
            leaf: gathered and reduced as a whole, whatever runs inside of its module.
            shard: the ranks that divide the unit.
            mesh_info: this rank's place in both groups.
            tiers: of this rank; needed where a state is elsewhere.
        """
        self.index = index
        self.layout = layout
        self.params = params
        self.leaf = leaf
        self.policy = policy
        self.exchange = exchange
        self.shard = shard
        self.replicate = replicate
        self.mesh_info = mesh_info
        self.placement = placement
        self.tiers = tiers
        self._param_away: AwayHome | None = None
        # A rank that has all of it, on the device, would have nothing to gather it from.
        leaves = shard.size > 1 or placement.param is not Tier.DEVICE
        self.reshard_after_use = leaves and layout.numel > 0 and policy.reshard_after_use(layout)
        self.state = UnitState.SHARDED if self.reshard_after_use else UnitState.UNSHARDED
        self.num_active = 0
        self.pins = 0
        self._handle: Handle | None = None
        self._comm: Comm | None = None  # that gathered it
        self._fetching: Transfer = DONE
        self.update_side = UpdateSide(self)
        self._allocate(device, pool)

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def trainable(self) -> bool:
        return self.layout.trainable

    @property
    def update_device(self) -> torch.device:
        """Device of the memory in which the update runs, and of `values`."""
        return torch.device("cpu") if self.update_side.is_elsewhere else self.full.device

    @property
    def is_kept_unsharded(self) -> bool:
        """True if all parameters are valid here from use to use."""
        return not self.reshard_after_use and self.state is UnitState.UNSHARDED

    def _allocate(self, device: torch.device, pool: PagePool | StorageMeter) -> None:
        layout = self.layout
        own = layout.shard_range(self.shard.index)
        num_windows = self.policy.num_versions(self.mesh_info) if self.trainable else 1
        self.windows = [self._make_window(own, device, pool) for _ in range(num_windows)]
        self.updated_range = self.exchange.updated_range(layout, self.mesh_info)
        self.param: Home
        self.use_window(self.windows[0])
        # Shape of the parameter, no memory, NaN wherever it is read; torch refuses to write to it.
        nowhere = torch.full((), float("nan"), dtype=layout.dtype, device=device)
        self._placeholders = [nowhere.expand(slot.shape) for slot in layout.slots]

        if self.placement.param is not Tier.DEVICE:
            self._param_away = self.make_away(Kind.PARAM, layout.shard_numel, layout.dtype)
            self.param = self._param_away
        self.has_master = self.policy.has_master(layout, self.placement)
        if self.trainable:
            self._allocate_record(device)
            self.grad = UnitGrad(self, device)

    def use_window(self, window: Window) -> None:
        """Have the newest parameters in `window` from now on, whatever it holds."""
        own = self.layout.shard_range(self.shard.index)
        self.window = window
        self.full = window.full
        self.param_shard = window.shard
        self.views: list[torch.Tensor] = []
        if not isinstance(window, StorageWindow):
            self._make_views()
        self._device_param = self.param_shard
        if self.updated_range != own:
            self._device_param = self.local_part(self.full)
        if self.placement.param is Tier.DEVICE:
            kept = self.param_shard if self.reshard_after_use else self.full
            self.param = InPlace(kept)

    def _make_views(self) -> None:
        """Make the views of `full`, which takes memory: a storage that is resized has it at times.

        See `StorageWindow`. Once made they are good for life: the storage stays the same.
        """
        self.views = self.views_of(self.full)
        if self.placement.param is not Tier.DEVICE and self.reshard_after_use:
            self.param_shard = self._own_slice()

    def make_away(
        self, kind: Kind, numel: int, dtype: torch.dtype, own: tuple[int, int] | None = None
    ) -> OnHost | OnDisk:
        """Make a home elsewhere for `numel` elements of a state, of which `own` are updated."""
        assert self.tiers is not None
        if self.placement.tier_of(kind) is Tier.HOST:
            return OnHost(self.tiers, kind, numel, dtype)
        return OnDisk(self.tiers, kind, f"the {kind.value} of {self.name}", numel, dtype, own)

    def _make_window(
        self, own: tuple[int, int], device: torch.device, pool: PagePool | StorageMeter
    ) -> Window:
        layout = self.layout
        if not self.reshard_after_use:
            return ResidentWindow(flat_buffer(layout.padded_numel, layout.dtype, device), own)
        if self.placement.param is not Tier.DEVICE:
            own = (0, 0)
        if isinstance(pool, PagePool):
            return PageWindow(layout.padded_numel, own, layout.dtype, pool)
        return StorageWindow(layout.padded_numel, own, layout.dtype, device, pool)

    def _allocate_record(self, device: torch.device) -> None:
        start, stop = self.updated_range
        master_numel = stop - start if self.has_master else 0
        # The padding at the end has no moments.
        moment_numel = max((piece.stop for piece in self.layout.pieces(start, stop)), default=0)
        self._seen_record: torch.Tensor | None = None
        self.record: Home
        if self.placement.optimizer is Tier.DEVICE:
            self.record_layout = RecordLayout(master_numel, moment_numel, {})
            self.record = InPlace(byte_buffer(self.record_layout.num_bytes, device))
            return
        alignment = 1
        capacity = self._planned_bytes(Kind.OPTIM)
        if self.placement.optimizer is Tier.DISK:
            alignment = PAGE_BYTES
            capacity = 0
        self.record_layout = RecordLayout(master_numel, moment_numel, {}, alignment)
        self.record = self.make_away(Kind.OPTIM, capacity, torch.uint8)
        self.record.grow(self.record_layout.num_bytes)

    def _planned_bytes(self, kind: Kind) -> int:
        planned = self.policy.buffers(self.layout, self.mesh_info, self.placement)
        return sum(buffer.num_bytes for buffer in planned if buffer.kind is kind)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' views of `flat` [padded_numel], in the shapes of the slots."""
        return [_view(flat, slot) for slot in self.layout.slots]

    # Parameters

    def load(self, sources: list[torch.Tensor]) -> None:
        """Fill everything that is kept of the parameters, and the master.

        Args:
            sources: full value of each parameter, as in `layout.slots`, on any device. A value on
                the meta device is skipped: it is filled later.
        """
        own = self.layout.shard_range(self.shard.index)
        with torch.no_grad():
            if self._param_away is not None:
                self._fill(self.param.at().zero_(), own, sources)
            elif self.reshard_after_use:
                self._fill(self.param_shard, own, sources)
            else:
                self._fill(self.full, (0, self.layout.padded_numel), sources)
            if self.has_master:
                self.record.at().zero_()
                self._fill(self.master, self.updated_range, sources)
        self.param.put()
        self.param.drop()
        if self.has_master:
            self.record.put()
            self.record.drop()

    def _fill(
        self, target: torch.Tensor, elements: tuple[int, int], sources: list[torch.Tensor]
    ) -> None:
        """Copy the parameters that lie in `elements` of the unit to `target` [stop - start]."""
        start, stop = elements
        for piece in self.layout.pieces(start, stop):
            source = sources[piece.index]
            slot = piece.slot
            if source.is_meta:
                continue
            if source.stride() != slot.stride:
                source = _with_stride(source, slot)
            # The piece in the source's memory order: what precedes it in its slot is not in range.
            first = start + piece.start - slot.offset
            size = (piece.stop - piece.start,)
            part = source.as_strided(size, (1,), source.storage_offset() + first)
            target[piece.start : piece.stop].copy_(part)

    def set_param_data(self) -> None:
        """Point the module's parameters at the unit's memory, or at placeholders while sharded."""
        views = self._placeholders
        if self.state is UnitState.UNSHARDED:
            views = self.views
        for param, view in zip(self.params, views, strict=True):
            param.data = view

    def begin_fetch(self) -> None:
        """Begin to bring the own shard from its home, if that is elsewhere and it is not here."""
        if self._param_away is None or self.state is not UnitState.SHARDED:
            return
        self.update_side.wait_to_unshard()
        self.window.acquire()
        self.state = UnitState.FETCHING
        assert self.tiers is not None
        with self.tiers.spans.named("fetch", self.name):
            self._fetching = self._param_away.load(self._own_slice())

    def _own_slice(self) -> torch.Tensor:
        start, stop = self.layout.shard_range(self.shard.index)
        return self.full[start:stop]

    def _end_fetch(self) -> None:
        """Wait for the own shard."""
        if self._fetching is not DONE:
            assert self.tiers is not None
            self.tiers.wait(self._fetching, self.placement.param)
            self._fetching = DONE

    def unshard(self, comm: Comm) -> None:
        """Begin to gather the parameters, unless they are here or on their way.

        The module sees them after `wait_for_unshard`.
        """
        if self.state not in (UnitState.SHARDED, UnitState.FETCHING):
            return
        self.update_side.wait_to_unshard()
        if self._param_away is None:
            self.window.acquire()
        else:
            self.begin_fetch()
            if self.shard.size > 1:  # the others are sent what has come
                self._end_fetch()
        if not self.views:
            self._make_views()
        self.state = UnitState.UNSHARDING
        self._comm = comm
        self._handle = self.exchange.all_gather(comm, self)

    def wait_for_unshard(self) -> None:
        """Wait for the gather that `unshard` began, and give the module its parameters."""
        if self.state is UnitState.UNSHARDED:
            return
        assert self._handle is not None, "unshard comes first"
        self._end_fetch()
        self._handle.wait()
        self._handle = None
        self.state = UnitState.UNSHARDED
        self.set_param_data()

    def reshard(self) -> None:
        """Keep the own shard only, and release the memory of the foreign ones."""
        if not self.reshard_after_use:
            return
        if self.state is UnitState.SHARDED:
            return
        self._end_fetch()
        if self._handle is not None:  # prefetched, and not used after all
            self._handle.wait()
            self._handle = None
        self.state = UnitState.SHARDED
        self.set_param_data()
        if self._param_away is not None and self._comm is not None:
            self._comm.settle()  # other ranks may still read the own shard, which goes
        self.window.release()

    def take_window(self) -> torch.Tensor:
        """Return room on the device for parameters that are about to be stored in their home.

        Returns:
            [updated range] in compute dtype, until `give_window`.
        """
        self.reshard()
        self.window.acquire()
        return self._own_slice()

    def store_window(self) -> Transfer:
        """Begin to store what was written there. Returns what `give_window` has to wait for."""
        assert self._param_away is not None
        return self._param_away.store(self._own_slice(), accumulate=False)

    def give_window(self) -> None:
        """Give back the room that `take_window` took."""
        self.window.release()

    def mark_stale(self) -> None:
        """After an update of the local elements: those that other ranks update must be gathered.

        While an update runs beside training, the unit counts as stale too: so `unshard`, which does
        nothing for a unit that is unsharded, comes to wait for it.
        """
        if not self.exchange.goes_stale(self.mesh_info) and not self.update_side.is_running:
            return
        assert self._handle is None
        if self.reshard_after_use:
            self.reshard()
        self.state = UnitState.SHARDED
        self.set_param_data()

    def write_back(self) -> None:
        """After user code wrote to the unsharded parameters: update the shard and the master.

        A master changes only where its parameter did: elsewhere it keeps the digits that the
        compute dtype does not have.
        """
        if self._param_away is not None:
            self._param_away.store(self._own_slice(), accumulate=False).wait_on_host()
        elif isinstance(self.window, StorageWindow):  # elsewhere the shard is a slice of `full`
            self.param_shard.copy_(self._own_slice())
        self.param.put()
        if not self.has_master:
            return
        fetch_now(self.record)
        master = self.master
        written = self.local_part(self.full).to(master.device)
        changed = written != master.to(self.layout.dtype)
        if changed.any():
            master[changed] = written[changed].float()
            self.record.put()
        self.record.drop()

    # Update

    @property
    def local_param(self) -> torch.Tensor:
        """[updated range] in compute dtype: the parameters that this rank updates.

        Of parameters that live elsewhere it is the memory of their home, once they were fetched.
        """
        return self._device_param if self._param_away is None else self.param.at()

    @property
    def master(self) -> torch.Tensor:
        """[updated range] fp32, what an update changes: `local_param` where there is no master."""
        if not self.has_master:
            return self.local_param
        return self._views_of_record()[0]

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """The optimizer's states by name, each with a number for every updated element."""
        return self._views_of_record()[1]

    def _views_of_record(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return master and moments. The views are made anew only where the record has moved."""
        record = self.record.at()
        if record is not self._seen_record:
            self._seen_record = record
            layout = self.record_layout
            self._in_record = (layout.master_of(record), layout.moments_of(record))
        return self._in_record

    def add_moments(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Make room in the record for more moments. The record may lie elsewhere afterwards."""
        self.record_layout = self.record_layout.extended(dtypes)
        self.record.grow(self.record_layout.num_bytes)
        self._seen_record = None
        self._views_of_record()  # the old views would keep the old memory

    def fetch_record(self) -> torch.Tensor:
        """Fetch the record, and the parameters where they are their own masters.

        Returns:
            The record, [num_bytes] uint8.
        """
        if not self.has_master:
            self.param.fetch()
        self.record.fetch()
        return self.record.at()

    def fetch_local_param(self) -> torch.Tensor:
        """Fetch the parameters, and return the elements that this rank updates."""
        fetch_now(self.param)
        return self.local_param

    @property
    def has_states_elsewhere(self) -> bool:
        """True if a state is not on the device. Values of few such units are here at a time."""
        return self.placement is not ON_DEVICE

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
        is_stale = self.reshard_after_use or self.exchange.goes_stale(self.mesh_info)
        if self.state is UnitState.SHARDED and not is_stale:
            # Only the update that ran made it stale, and this rank updates all of it.
            self.state = UnitState.UNSHARDED
            self.set_param_data()

    # Values between two steps: for checkpoints, guards and the user

    def values(self) -> Values:
        """Return the most exact values that this rank keeps, padding included.

        They are the fp32 masters where there are any.
        """
        if self.has_master:
            fetch_now(self.record)
            return Values(self.master, self.updated_range[0])
        local = self.fetch_local_param()
        if self.trainable:
            return Values(local, self.updated_range[0])
        if self.reshard_after_use:
            shard = self.param_shard if self._param_away is None else local
            return Values(shard, self.layout.shard_range(self.shard.index)[0])
        return Values(self.full, 0)

    def stored_values(self) -> StoredValues:
        """Return what `values` returns, where it is stored. Nothing is fetched."""
        start = self.updated_range[0]
        if self.has_master:
            num_bytes = self.record_layout.master_bytes
            return StoredValues(self.record.stored(torch.float32, 0, num_bytes), start)
        if self._param_away is None:
            return StoredValues(*self.values())
        if not self.trainable:
            start, _ = self.layout.shard_range(self.shard.index)
        num_bytes = self.layout.shard_numel * self.layout.dtype.itemsize
        return StoredValues(self.param.stored(self.layout.dtype, 0, num_bytes), start)

    def stored_moment(self, name: str) -> torch.Tensor | Stored:
        """Return one of `moments`, where it is stored. Nothing is fetched."""
        moment = self.record_layout.moments[name]
        return self.record.stored(moment.dtype, moment.start, moment.stop)

    def values_changed(self) -> None:
        """Update the parameters from what was written to `values`; foreign shards are stale."""
        if not self.trainable:
            self.param.put()
            self.param.drop()
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
        self.param.drop()
        if self.trainable:
            self.record.drop()
            self.grad.drop()

    def resident_params(self) -> Values:
        """Return the parameters that are valid here without a gather: all, or the updated range."""
        local = self.fetch_local_param()
        if self.is_kept_unsharded:
            return Values(self.full, 0)
        return Values(local, self.updated_range[0])

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of this unit's permanent memory; some share their memory."""
        for value in list(vars(self).values()):  # an update may run meanwhile
            if isinstance(value, torch.Tensor):
                yield value
        yield from (window.full for window in self.windows)
        homes = [self.param]
        if self.trainable:
            homes += [self.grad.home, self.record]
        for home in homes:
            if isinstance(home, InPlace):
                yield home.at()

    def local_part(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements that this rank updates of `flat` [padded_numel]."""
        start, stop = self.updated_range
        return flat[start:stop]

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
        sizes = {Kind.PARAM: len(self.windows) * self.param.num_bytes}
        if self.trainable:
            sizes[Kind.GRAD] = whole_pages(self.grad.home.num_bytes)
            sizes[Kind.OPTIM] = self.record.num_bytes
        return [
            Buffer(f"{self.name}/{kind.value}", kind, size, self.placement.tier_of(kind))
            for kind, size in sizes.items()
        ]


def moves_pages(device: str) -> bool:
    """Return whether units are assembled from pages of a pool. See [Note: constant addresses]."""
    return device == "cpu" and can_move_pages()


def is_read_in_place(device: str, placement: Placement) -> bool:
    """Return whether states on the host and on disk are read straight to where they are used.

    A disk is read into whole pages. Where pages do not move, parameters are assembled in storages
    of the allocator, which begin anywhere: a CPU copies there what was read, as for a GPU.
    """
    return device == "cpu" and (placement.param is not Tier.DISK or can_move_pages())


def window_pool(device: torch.device, num_bytes: int) -> PagePool | StorageMeter:
    """Return the memory for unsharded units on this device; `num_bytes` are foreseen."""
    return PagePool(num_bytes) if moves_pages(device.type) else StorageMeter(num_bytes)


def _view(flat: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
    return flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + slot.offset)


def _with_stride(source: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
    """Return a copy of `source` in the memory order of `slot`."""
    target = torch.empty_strided(slot.shape, slot.stride, dtype=source.dtype, device=source.device)
    return target.copy_(source)
