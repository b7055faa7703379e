"""One flat unit of parameters: its memory, and what is done with it.

Four ranks of a shard group, seen by rank 1:

    full            |-- shard 0 --|-- shard 1 --|-- shard 2 --|-- shard 3 --|   compute dtype
    param_shard                   |-------------|          constant address, always valid
    updated_range                 |-------------|          also of `master`, `moments`, `local_grad`

At stage 0 the shard group is one rank, and its shard is everything.

    unshard           begin to gather the foreign shards
    wait_for_unshard  the module's parameters are views of `full` from now on
    reshard           keep the own shard only
    accumulate_grad   move a parameter's gradient into the flat one
    mark_stale        the shard was updated: the foreign shards are those of the last step

Three states live in a `Home` each: what is kept of the parameters between uses, the gradient, and
the record (master and moments, see `record_layout.py`).
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
from zrun_core.memory.buffers import Buffer, Kind
from zrun_core.memory.layout import ParamSlot, UnitLayout
from zrun_core.memory.state_policy import MeshInfo, StatePolicy
from zrun_core.zero.exchange import Exchange
from zrun_core.zero.home import Home, InPlace, fetch_now
from zrun_core.zero.record_layout import RecordLayout


class UnitState(Enum):
    """The valid parameters of a unit, and so what occupies memory.

    SHARDED: the own shard is valid. A unit that is resharded after use has memory for this shard
        only; another one has memory for all of it, with the foreign shards of the last step.
    UNSHARDING: memory of the whole unit; the own shard is valid, the foreign ones are arriving.
    UNSHARDED: memory of the whole unit, all of it valid.
    """

    SHARDED = "sharded"
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


class FlatUnit:
    """A unit on this rank.

    Its memory is touched in `zero/` and `optim/` only. Other code asks for `values`, `masters` or
    `resident_params`, and calls `values_changed` after writing to what `values` returned.

    Attributes:
        index: number of the unit in the model; messages between ranks carry it.
        shard: the ranks that divide the unit between them, `layout.num_shards` of them.
        replicate: the ranks that hold the same shard.
        mesh_info: this rank's place in both.
        reshard_after_use: only a shard of the parameters stays in memory between uses.
        param: home of what is kept of the parameters between uses, in compute dtype: the own shard
            if `reshard_after_use`, else all of them.
        full: [padded_numel] all parameters in compute dtype. Its address is constant; without
            memory while the unit is resharded.
        param_shard: [shard_numel], this rank's part of the parameters. Its address is constant.
        updated_range: first and last + 1 of the elements that this rank updates.
        local_param: [updated range], the parameters of these elements in compute dtype.
        record: home of what their update reads and writes beside the gradient, `record_layout`.
        moments: by name, the states that the optimizer keeps of each of these elements.
        grad: home of the gradient, in reduce dtype: of all elements, or of the updated range.
        has_grad: by parameter, 1 if it received a gradient on this rank in this step.
        num_active: calls of its modules under way.
        pins: holders that keep it unsharded until they release it.
        is_reduced: `grad` holds this step's sum over ranks so far.
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
    ) -> None:
        """Allocate everything that the unit keeps, except the moments.

        Args:
            index: number of the unit in the model.
            layout: where its parameters lie.
            params: the module's parameters, as in `layout.slots`.
            leaf: gathered and reduced as a whole, whatever runs inside of its module.
            policy: what the ZeRO stage keeps.
            exchange: the collectives of the unit.
            shard: the ranks that divide the unit.
            replicate: the ranks with equal shards.
            mesh_info: this rank's place in both groups.
            device: where all of it lies.
            pool: memory for units while they are unsharded.
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
        is_divided = shard.size > 1 and layout.numel > 0
        self.reshard_after_use = is_divided and policy.reshard_after_use(layout)
        self.state = UnitState.SHARDED if self.reshard_after_use else UnitState.UNSHARDED
        self.num_active = 0
        self.pins = 0
        self.is_reduced = False
        self._handle: Handle | None = None
        self._allocate(device, pool)

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def trainable(self) -> bool:
        return self.layout.trainable

    @property
    def is_kept_unsharded(self) -> bool:
        """True if all parameters are valid here from use to use."""
        return not self.reshard_after_use and self.state is UnitState.UNSHARDED

    def _allocate(self, device: torch.device, pool: PagePool | StorageMeter) -> None:
        layout = self.layout
        own = layout.shard_range(self.shard.index)
        self.window = self._make_window(own, device, pool)
        self.full = self.window.full
        self.param_shard = self.window.shard
        # Views of a storage that is resized can only be made while it has memory.
        self.views: list[torch.Tensor] = []
        if not isinstance(self.window, StorageWindow):
            self.views = self._views_of(self.full)
        # Shape of the parameter, no memory, NaN wherever it is read; torch refuses to write to it.
        nowhere = torch.full((), float("nan"), dtype=layout.dtype, device=device)
        self._placeholders = [nowhere.expand(slot.shape) for slot in layout.slots]

        self.updated_range = self.exchange.updated_range(layout, self.mesh_info)
        if self.updated_range == own:
            self.local_param = self.param_shard
        else:
            self.local_param = self.local_part(self.full)
        kept = self.param_shard if self.reshard_after_use else self.full
        self.param: Home = InPlace(kept)
        self.has_master = self.policy.has_master(layout)
        if self.trainable:
            self._allocate_record(device)
            self._allocate_grad(device)

    def _make_window(
        self, own: tuple[int, int], device: torch.device, pool: PagePool | StorageMeter
    ) -> Window:
        layout = self.layout
        if not self.reshard_after_use:
            return ResidentWindow(flat_buffer(layout.padded_numel, layout.dtype, device), own)
        if isinstance(pool, PagePool):
            return PageWindow(layout.padded_numel, own, layout.dtype, pool)
        return StorageWindow(layout.padded_numel, own, layout.dtype, device, pool)

    def _allocate_record(self, device: torch.device) -> None:
        start, stop = self.updated_range
        master_numel = 0
        if self.has_master:
            master_numel = stop - start
        # The padding at the end has no moments.
        moment_numel = max((piece.stop for piece in self.layout.pieces(start, stop)), default=0)
        self.record_layout = RecordLayout(master_numel, moment_numel, {})
        self.record: Home = InPlace(byte_buffer(self.record_layout.num_bytes, device))
        self._seen_record: torch.Tensor | None = None

    def _allocate_grad(self, device: torch.device) -> None:
        layout = self.layout
        dtype = self.policy.reduce_dtype
        # Stages 2 and 3 reduce after each micro-batch: each fills scratch of the reducer, and only
        # the updated range of the sum is kept here.
        reduces_each = self.policy.zero.reduce_now(boundary=False)
        self._keeps_unsharded_grad = not reduces_each or self.shard.size == 1
        numel = layout.padded_numel if self._keeps_unsharded_grad else layout.shard_numel
        self.grad: Home = InPlace(flat_buffer(numel, dtype, device))
        self._seen_grad: torch.Tensor | None = None
        self.unsharded_grad: torch.Tensor | None = None
        self._grad_views: list[torch.Tensor] = []
        self.begin_step()

    def _views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
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
            if self.reshard_after_use:
                self._fill(self.param_shard, own, sources)
            else:
                self._fill(self.full, (0, self.layout.padded_numel), sources)
            if self.has_master:
                self._fill(self.master, self.updated_range, sources)
        self.param.put()
        if self.has_master:
            self.record.put()

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

    def unshard(self, comm: Comm) -> None:
        """Begin to gather the parameters, unless they are here or on their way.

        The module sees them after `wait_for_unshard`.
        """
        if self.state is not UnitState.SHARDED:
            return
        fetch_now(self.param)
        self.window.acquire()
        if not self.views:
            self.views = self._views_of(self.full)
        self.state = UnitState.UNSHARDING
        self._handle = self.exchange.all_gather(comm, self)

    def wait_for_unshard(self) -> None:
        """Wait for the gather that `unshard` began, and give the module its parameters."""
        if self.state is UnitState.UNSHARDED:
            return
        assert self._handle is not None, "unshard comes first"
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
        if self._handle is not None:  # prefetched, and not used after all
            self._handle.wait()
            self._handle = None
        self.state = UnitState.SHARDED
        self.set_param_data()
        self.window.release()
        self.param.drop()

    def mark_stale(self) -> None:
        """After an update of the local elements: those that other ranks update must be gathered."""
        if not self.exchange.goes_stale(self.mesh_info):
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
        if isinstance(self.window, StorageWindow):  # elsewhere the shard is a slice of `full`
            start, stop = self.layout.shard_range(self.shard.index)
            self.param_shard.copy_(self.full[start:stop])
        self.param.put()
        if not self.has_master:
            return
        fetch_now(self.record)
        changed = self.local_param != self.master.to(self.layout.dtype)
        self.master[changed] = self.local_param[changed].float()
        self.record.put()
        self.record.drop()

    # Update

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
            fetch_now(self.param)
        return fetch_now(self.record)

    def fetch_local_param(self) -> torch.Tensor:
        """Fetch the parameters, and return the elements that this rank updates."""
        fetch_now(self.param)
        return self.local_param

    @property
    def cast_target(self) -> torch.Tensor | None:
        """[updated range] parameters that an update casts its masters to; None: they are these."""
        return self.local_param if self.has_master else None

    def end_update(self) -> None:
        """Store the record and the parameters, which were updated, in their homes."""
        self.record.put()
        self.record.drop()
        self.param.put()
        self.param.drop()

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
            return Values(self.param_shard, self.layout.shard_range(self.shard.index)[0])
        return Values(self.full, 0)

    def values_changed(self) -> None:
        """Update the parameters from what was written to `values`; foreign shards are stale."""
        if self.trainable:
            if self.has_master:
                self.local_param.copy_(self.master)
            self.end_update()
            self.mark_stale()
        else:
            self.param.put()

    def masters(self) -> Values | None:
        """Return the fp32 masters, padding included; None where there are none."""
        return self.values() if self.has_master else None

    def resident_params(self) -> Values:
        """Return the parameters that are valid here without a gather: all, or the updated range."""
        local = self.fetch_local_param()
        if self.is_kept_unsharded:
            return Values(self.full, 0)
        return Values(local, self.updated_range[0])

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of this unit's permanent memory; some share their memory."""
        for value in vars(self).values():
            if isinstance(value, torch.Tensor):
                yield value
        yield self.param.at()
        if self.trainable:
            yield self.grad.at()
            yield self.record.at()

    # Gradients
    #
    #   param.grad --accumulate_grad--> unsharded_grad --Exchange.reduce_grad--> sum_buffer()
    #
    # `unsharded_grad` is the unit's own memory where micro-batches are added up before they are
    # reduced (stages 0 and 1), and scratch of the reducer elsewhere.

    @property
    def local_grad(self) -> torch.Tensor:
        """[updated range] in reduce dtype: the elements of `grad` that this rank updates."""
        grad = self.grad.at()
        if grad is not self._seen_grad:
            self._seen_grad = grad
            self._local_grad = self.local_part(grad) if self._keeps_unsharded_grad else grad
        return self._local_grad

    def fetch_grad(self) -> torch.Tensor:
        """Fetch the gradient, and return the elements that this rank updates."""
        fetch_now(self.grad)
        return self.local_grad

    def sum_buffer(self) -> torch.Tensor:
        """Return where the sum over ranks goes; it holds an earlier sum if there is one."""
        return self.fetch_grad() if self.is_reduced else self.local_grad

    def put_grad(self) -> None:
        """Store the gradient, which was written, in its home."""
        self.grad.put()
        self.grad.drop()

    def begin_step(self) -> None:
        """Forget the gradients of the last optimizer step."""
        self.has_grad = bytearray(len(self.params))
        self.is_reduced = False
        self._written = bytearray(len(self.params))  # by parameter: its view of the flat gradient
        self._use_own_grad()

    def begin_grad(self, scratch: torch.Tensor) -> None:
        """Use `scratch` [padded_numel] as the flat gradient until `end_grad`."""
        self._written = bytearray(len(self.params))
        self._use_grad(scratch)

    def end_grad(self) -> None:
        """Leave the flat gradient to the reduction: what comes from now on is apart from it."""
        self._use_own_grad()

    def _use_own_grad(self) -> None:
        """Use the unit's own flat gradient, if it has one of all elements."""
        if self._keeps_unsharded_grad:
            self._use_grad(self.grad.at())
        else:
            self.unsharded_grad = None
            self._grad_views = []

    def _use_grad(self, flat: torch.Tensor) -> None:
        if flat is self.unsharded_grad:
            return
        self.unsharded_grad = flat
        self._grad_views = self._views_of(flat)
        flat[self.layout.numel :].zero_()  # the padding is summed too

    def reopen_grad(self, *, counts_here: bool) -> None:
        """Prepare for more gradients after the step's sum over ranks was made.

        The next sum must contain this one once: one of the ranks that hold it keeps it, and the
        others start from zero.

        Args:
            counts_here: this rank keeps it.
        """
        total = self.fetch_grad()
        if not counts_here:
            total.zero_()
        if not self._keeps_unsharded_grad:
            self.put_grad()
            return
        # The sum lies in the flat gradient itself, which is reduced again: outside of the updated
        # range there are this rank's addends, which the sum contains already.
        self._use_own_grad()
        assert self.unsharded_grad is not None
        start, stop = self.updated_range
        self.unsharded_grad[:start].zero_()
        self.unsharded_grad[stop:].zero_()
        self._written = bytearray(b"\1" * len(self.params))  # what comes next is added
        self.is_reduced = False

    def owns_buffer(self, flat: torch.Tensor) -> bool:
        """Return whether the flat gradient `flat` is the unit's own, not scratch."""
        return self._keeps_unsharded_grad and flat is self.grad.at()

    def accumulate_grad(self, number: int) -> None:
        """Move the gradient of parameter `number` into the flat one."""
        param = self.params[number]
        view = self._grad_views[number]
        grad = param.grad
        param.grad = None
        assert grad is not None
        if grad.is_sparse:
            grad = grad.to_dense()
        with torch.no_grad():
            if self._written[number]:
                view.add_(grad)
            else:
                view.copy_(grad)
        self._written[number] = 1
        self.has_grad[number] = 1

    def complete_grad(self) -> torch.Tensor:
        """Return this rank's flat gradient [padded_numel], with zeros where there was none."""
        assert self.unsharded_grad is not None, "begin_grad comes first where gradients are sharded"
        for number, view in enumerate(self._grad_views):
            if not self._written[number]:
                view.zero_()
        return self.unsharded_grad

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

    def norm_part(self, part: int) -> torch.Tensor:
        """Fetch the gradient, and return its elements in `part`, for a norm."""
        start, stop = self.layout.part_range(part)
        first = self.updated_range[0]
        return self.fetch_grad()[start - first : stop - first]

    def allocated(self) -> list[Buffer]:
        """Return the permanent buffers as allocated. Moments come with the first update."""
        found = [Buffer(f"{self.name}/param", Kind.PARAM, self.param.at().nbytes)]
        if self.trainable:
            num_bytes = self.grad.at().untyped_storage().nbytes()
            found.append(Buffer(f"{self.name}/grad", Kind.GRAD, num_bytes))
            found.append(Buffer(f"{self.name}/record", Kind.OPTIM, self.record.at().nbytes))
        return found


def moves_pages(device: str) -> bool:
    """Return whether units are assembled from pages of a pool. See [Note: constant addresses]."""
    return device == "cpu" and can_move_pages()


def window_pool(device: torch.device, num_bytes: int) -> PagePool | StorageMeter:
    """Return the memory for unsharded units on this device; `num_bytes` are foreseen."""
    return PagePool(num_bytes) if moves_pages(device.type) else StorageMeter(num_bytes)


def _view(flat: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
    return flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + slot.offset)


def _with_stride(source: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
    """Return a copy of `source` in the memory order of `slot`."""
    target = torch.empty_strided(slot.shape, slot.stride, dtype=source.dtype, device=source.device)
    return target.copy_(source)
