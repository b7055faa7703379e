"""One flat unit: its memory, and the verbs of its life.

unshard   the foreign shards arrive, the module's parameters are views of the whole
reshard   only the own shard stays
take_grad a parameter's gradient moves into the unit's flat one
mark_stale the shard was updated: the foreign shards are those of the last step
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
from zrun_core.memory.layout import MeshInfo, ParamSlot, StatePolicy, UnitLayout
from zrun_core.zero.exchange import Exchange
from zrun_core.zero.home import Home, InPlace, fetch_now
from zrun_core.zero.record_layout import RecordLayout


class UnitState(Enum):
    """What of a unit's parameters is valid, and so what occupies memory."""

    SHARDED = "own shard"  # the rest is given up (parameters sharded), or is that of the last step
    UNSHARDING = "own shard, the rest arriving"  # memory of the whole unit
    UNSHARDED = "everything"  # memory of the whole unit


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

    Its memory is touched in `zero/` and `optim/` only; everybody else asks for `values`, `masters`
    or `resident_params`, and says `values_changed` after writing to what `values` returned.

    Attributes:
        shard: the ranks that divide the unit between them, `layout.num_shards` of them.
        replicate: the ranks that hold the same shard.
        peers: this rank's place in both.
        param: home of what is kept of the parameters between uses, in compute dtype: the own shard,
            or all of them.
        param_shard: [shard_numel], this rank's part of the parameters. Its address is constant.
        owned: the first and last + 1 of the elements that this rank updates.
        record: home of what their update reads and writes beside the gradient, `record_layout`.
        moments: by name, the states that the optimizer keeps of each of these elements.
        grad: home of its gradient, in reduce dtype: of the owned elements, or of all.
        got: which parameters have received a gradient on this rank in this step.
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
        self.index, self.layout, self.params, self.leaf = index, layout, params, leaf
        self.policy, self.exchange = policy, exchange
        self.shard, self.replicate, self.mesh_info = shard, replicate, mesh_info
        self.reshard_after_use = (
            policy.reshard_after_use(layout) and shard.size > 1 and layout.numel > 0
        )
        self.state = UnitState.UNSHARDED
        self.num_active = 0  # module calls under way
        self.pins = 0  # holders that want it whole until they say otherwise
        self.is_reduced = False  # `grad` holds this step's reduced sum so far
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
        """Whether the whole parameters are here, and up to date, from use to use."""
        return not self.reshard_after_use and self.state is UnitState.UNSHARDED

    def _allocate(self, device: torch.device, pool: PagePool | StorageMeter) -> None:
        layout, policy = self.layout, self.policy
        own = layout.shard_range(self.shard.index)
        self.window: Window
        if not self.reshard_after_use:
            self.window = ResidentWindow(
                flat_buffer(layout.padded_numel, layout.dtype, device), own
            )
        elif isinstance(pool, PagePool):
            self.window = PageWindow(layout.padded_numel, own, layout.dtype, pool)
            self.state = UnitState.SHARDED
        else:
            self.window = StorageWindow(layout.padded_numel, own, layout.dtype, device, pool)
            self.state = UnitState.SHARDED
        self.full, self.param_shard = self.window.full, self.window.shard
        self.views = (
            [_view(self.full, slot) for slot in layout.slots] if not _resizes(self.window) else []
        )
        # Shape of the parameter, no memory, NaN wherever it is read, and torch refuses to write to it.
        nowhere = torch.full((), float("nan"), dtype=layout.dtype, device=device)
        self._placeholders = [nowhere.expand(slot.shape) for slot in layout.slots]

        self.updated_range = self.exchange.updated_range(layout, self.mesh_info)
        self.local_param = (
            self.param_shard if self.updated_range == own else self.local_part(self.full)
        )
        self.param: Home = InPlace(self.param_shard if self.reshard_after_use else self.full)
        self.has_master = policy.has_master(layout)
        if self.trainable:
            self._allocate_record(device)
            self._allocate_grad(device)

    def _allocate_record(self, device: torch.device) -> None:
        master_numel = self.updated_range[1] - self.updated_range[0] if self.has_master else 0
        moment_numel = max(
            (piece.stop for piece in self.layout.pieces(*self.updated_range)), default=0
        )
        self.record_layout = RecordLayout(master_numel, moment_numel, {})
        self.record: Home = InPlace(byte_buffer(self.record_layout.num_bytes, device))
        self._seen_record: torch.Tensor | None = None

    def _allocate_grad(self, device: torch.device) -> None:
        layout, dtype = self.layout, self.policy.reduce_dtype
        # Otherwise each micro-batch has scratch, and only what this rank owns of the sum is kept.
        reduces_each = self.policy.zero.reduce_now(boundary=False)
        self._keeps_unsharded_grad = not reduces_each or self.shard.size == 1
        numel = layout.padded_numel if self._keeps_unsharded_grad else layout.shard_numel
        self.grad: Home = InPlace(flat_buffer(numel, dtype, device))
        self._seen_grad: torch.Tensor | None = None
        self.unsharded_grad: torch.Tensor | None = None
        self._grad_views: list[torch.Tensor] = []
        self.begin_step()

    # Parameters

    def load(self, sources: list[torch.Tensor]) -> None:
        """Fill the shard, the master copy and, if it is kept, the whole unit from full parameter values.

        A value on the meta device is none yet: what comes later fills it.
        """
        with torch.no_grad():
            own = self.layout.shard_range(self.shard.index)
            targets = (
                [(self.param_shard, own)]
                if self.reshard_after_use
                else [(self.full, (0, self.layout.padded_numel))]
            )
            if self.has_master:
                targets.append((self.master, self.updated_range))
            for target, (start, stop) in targets:
                for piece in self.layout.pieces(start, stop):
                    source, slot = sources[piece.index], piece.slot
                    if source.is_meta:
                        continue
                    flat = source if source.stride() == slot.stride else _with_stride(source, slot)
                    first = start + piece.start - slot.offset
                    part = flat.as_strided(
                        (piece.stop - piece.start,), (1,), flat.storage_offset() + first
                    )
                    target[piece.start : piece.stop].copy_(part)
        self.param.put()
        if self.has_master:
            self.record.put()

    def set_param_data(self) -> None:
        """Point the module's parameters at the unit's memory, or at placeholders where it holds none."""
        whole = self.state is UnitState.UNSHARDED
        for param, data in zip(
            self.params, self.views if whole else self._placeholders, strict=True
        ):
            param.data = data

    def unshard(self, comm: Comm) -> None:
        """Begin to gather the parameters, unless they are here or on their way.

        After `wait_for_unshard` the module sees them.
        """
        if self.state is not UnitState.SHARDED:
            return
        fetch_now(self.param)
        self.window.acquire()
        if not self.views:
            self.views = [_view(self.full, slot) for slot in self.layout.slots]
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
        """Keep the own shard only."""
        if not self.reshard_after_use or self.state is UnitState.SHARDED:
            return
        if self._handle is not None:  # gathered ahead, and not used after all
            self._handle.wait()
            self._handle = None
        self.state = UnitState.SHARDED
        self.set_param_data()
        self.window.release()
        self.param.drop()

    def mark_stale(self) -> None:
        """The owned elements were updated: what other ranks own must be gathered before the next use."""
        if self.exchange.goes_stale(self.mesh_info):
            assert self._handle is None
            if self.reshard_after_use:
                self.reshard()
            self.state = UnitState.SHARDED
            self.set_param_data()

    def write_back(self) -> None:
        """After user code wrote to the whole parameters: the shard and the master copy follow."""
        if isinstance(self.window, StorageWindow):
            start, stop = self.layout.shard_range(self.shard.index)
            self.param_shard.copy_(self.full[start:stop])
        self.param.put()
        if self.has_master:
            fetch_now(self.record)
            changed = self.local_param != self.master.to(self.layout.dtype)
            self.master[changed] = self.local_param[changed].float()
            self.record.put()
            self.record.drop()

    # Its update

    @property
    def master(self) -> torch.Tensor:
        """[owned] fp32, what an update changes: the parameters where they have no master."""
        return self._look_at_record()[0] if self.has_master else self.local_param

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """The optimizer's states by name, each with a number for every element that is owned."""
        return self._look_at_record()[1]

    def _look_at_record(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        record = self.record.at()
        if record is not self._seen_record:
            self._seen_record = record
            layout = self.record_layout
            self._in_record = layout.master_of(record), layout.moments_of(record)
        return self._in_record

    def add_moments(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Make room in the record for moments that it has not. It may lie elsewhere afterwards."""
        self.record_layout = self.record_layout.extended(dtypes)
        self.record.grow(self.record_layout.num_bytes)
        self._seen_record = None
        self._look_at_record()  # so that nothing keeps the old memory

    def fetch_record(self) -> torch.Tensor:
        """Have the record come here, and the parameters where they are their own masters."""
        if not self.has_master:
            fetch_now(self.param)
        return fetch_now(self.record)

    def fetch_local_param(self) -> torch.Tensor:
        """Have the parameters come here, and return the elements that this rank updates."""
        fetch_now(self.param)
        return self.local_param

    def end_update(self) -> None:
        """The record was updated: the parameters follow their masters, and all of it goes home."""
        self._cast_master()
        self.record.put()
        self.record.drop()
        self.param.put()
        self.param.drop()

    def _cast_master(self) -> None:
        """Write the masters, if there are any, to the parameters in compute dtype."""
        if self.has_master:
            self.local_param.copy_(self.master)

    # For whoever reads or writes values between two steps

    def values(self) -> Values:
        """Return the most exact values that this rank keeps, padding included: masters where it has them."""
        if self.has_master:
            fetch_now(self.record)
            return Values(self.master, self.updated_range[0])
        local = self.fetch_local_param()
        return Values(local, self.updated_range[0]) if self.trainable else self._params_kept()

    def values_changed(self) -> None:
        """Bring the parameters up to date with what was written to `values`; foreign shards are stale."""
        if self.trainable:
            self.end_update()
            self.mark_stale()
        else:
            self.param.put()

    def masters(self) -> Values | None:
        """Return the fp32 masters, padding included; None where parameters are their own masters."""
        return self.values() if self.has_master else None

    def resident_params(self) -> Values:
        """Return the parameters that are up to date here without a gather: the whole unit or the own shard."""
        local = self.fetch_local_param()
        return (
            Values(self.full, 0) if self.is_kept_unsharded else Values(local, self.updated_range[0])
        )

    def _params_kept(self) -> Values:
        if self.reshard_after_use:
            return Values(self.param_shard, self.layout.shard_range(self.shard.index)[0])
        return Values(self.full, 0)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that this unit's permanent memory consists of; some share their memory."""
        yield from (value for value in vars(self).values() if isinstance(value, torch.Tensor))
        yield self.param.at()
        if self.trainable:
            yield self.grad.at()
            yield self.record.at()

    # Gradients

    @property
    def local_grad(self) -> torch.Tensor:
        """[owned] in reduce dtype: the elements that this rank updates, in the memory of `grad`."""
        grad = self.grad.at()
        if grad is not self._seen_grad:
            self._seen_grad = grad
            self._owned_grad = self.local_part(grad) if self._keeps_unsharded_grad else grad
        return self._owned_grad

    def fetch_grad(self) -> torch.Tensor:
        """Have the gradient come here, and return the elements that this rank updates."""
        fetch_now(self.grad)
        return self.local_grad

    def sum_buffer(self) -> torch.Tensor:
        """Return where the sum over ranks goes. An earlier one that it is added to has come."""
        return self.fetch_grad() if self.is_reduced else self.local_grad

    def put_grad(self) -> None:
        """Have the gradient, which was written, go home."""
        self.grad.put()
        self.grad.drop()

    def begin_step(self) -> None:
        """A new optimizer step: no gradient has come yet."""
        self.has_grad = bytearray(len(self.params))
        self.is_reduced = False
        self._written = bytearray(len(self.params))
        self._use_own_grad()

    def _use_own_grad(self) -> None:
        """Let gradients go to the unit's own flat one, if it has one of the whole unit."""
        if self._keeps_unsharded_grad:
            self._use_grad(self.grad.at())
        else:
            self.unsharded_grad = None
            self._grad_views = []

    def _use_grad(self, whole: torch.Tensor) -> None:
        if whole is not self.unsharded_grad:
            self.unsharded_grad = whole
            self._grad_views = [_view(whole, slot) for slot in self.layout.slots]
            whole[self.layout.numel :].zero_()

    def begin_grad(self, whole: torch.Tensor) -> None:
        """Use scratch `whole` [padded_numel] as the flat gradient until `end_grad`."""
        self._written = bytearray(len(self.params))
        self._use_grad(whole)

    def reopen_grad(self, *, counts_here: bool) -> None:
        """More gradients come after the sum over ranks was made: the sum stays on one of the ranks that hold it."""
        total = self.fetch_grad()
        if not counts_here:
            total.zero_()
        if self._keeps_unsharded_grad:
            self._use_own_grad()
            assert self.unsharded_grad is not None
            start, stop = self.updated_range
            self.unsharded_grad[:start].zero_()
            self.unsharded_grad[stop:].zero_()
            self._written = bytearray(b"\1" * len(self.params))  # the next ones are added
            self.is_reduced = False
        else:
            self.put_grad()

    def owns_buffer(self, whole: torch.Tensor) -> bool:
        """Whether the flat gradient `whole` is the unit's own, not scratch."""
        return self._keeps_unsharded_grad and whole is self.grad.at()

    def accumulate_grad(self, number: int) -> None:
        """Move the gradient of parameter `number` into the flat one."""
        param, view = self.params[number], self._grad_views[number]
        grad, param.grad = param.grad, None
        assert grad is not None
        if grad.is_sparse:
            grad = grad.to_dense()
        with torch.no_grad():
            view.add_(grad) if self._written[number] else view.copy_(grad)
        self._written[number] = self.has_grad[number] = 1

    def complete_grad(self) -> torch.Tensor:
        """The flat gradient of this rank, with zeros for what got none."""
        assert self.unsharded_grad is not None, "begin_grad comes first where gradients are sharded"
        for number, view in enumerate(self._grad_views):
            if not self._written[number]:
                view.zero_()
        return self.unsharded_grad

    def end_grad(self) -> None:
        """The flat gradient is on its way: what comes from now on is apart from it."""
        self._use_own_grad()

    def local_part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the elements that this rank updates of `whole` [padded_numel]."""
        return whole[self.updated_range[0] : self.updated_range[1]]

    def counted_once(self) -> tuple[range, Group]:
        """Return parts to count, and the smallest group in which all parts are counted once.

        Copies deal out the parts of a shard if it has more than one; else each counts it for its
        own group.
        """
        if self.layout.num_parts > self.layout.num_shards:
            return self.exchange.counted_parts(self.layout, self.mesh_info), self.replicate
        return self.layout.parts_of_shard(self.shard.index), self.shard

    def norm_part(self, part: int) -> torch.Tensor:
        """Have the gradient come here, and return its elements in a part that this rank counts."""
        start, stop = self.layout.part_range(part)
        return self.fetch_grad()[start - self.updated_range[0] : stop - self.updated_range[0]]

    def allocated(self) -> list[Buffer]:
        """What this unit's permanent buffers really take. Moments come with its first update."""
        found = [Buffer(f"{self.name}/param", Kind.PARAM, self.param.at().nbytes)]
        if self.trainable:
            num_bytes = self.grad.at().untyped_storage().nbytes()
            found.append(Buffer(f"{self.name}/grad", Kind.GRAD, num_bytes))
            found.append(Buffer(f"{self.name}/record", Kind.OPTIM, self.record.at().nbytes))
        return found


def moves_pages(device: str) -> bool:
    """Whether units on devices of this type are assembled from pages of a pool. See [Note: constant addresses]."""
    return device == "cpu" and can_move_pages()


def window_pool(device: torch.device, num_bytes: int) -> PagePool | StorageMeter:
    """Where units on this device take memory from while they are whole; `num_bytes` are foreseen."""
    return PagePool(num_bytes) if moves_pages(device.type) else StorageMeter(num_bytes)


def _resizes(window: Window) -> bool:
    """Whether views of the window can only be made while it has memory."""
    return isinstance(window, StorageWindow)


def _view(flat: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
    return flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + slot.offset)


def _with_stride(source: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
    return torch.empty_strided(
        slot.shape, slot.stride, dtype=source.dtype, device=source.device
    ).copy_(source)
