"""Reduce the gradients of a model's units, micro-batch after micro-batch.

    begin_backward    what is left of the last one ends; which units are reduced
    accumulate_grad   the gradient of a parameter moves into that of its unit
    mark_complete     the unit has them all: at its turn its reduction begins
    end_backward      what is left follows, with zeros; behind the step's last, all of it ends

Which turn it is says `ReduceOrder`: see its [Note: one order] and [Note: late units]. Nobody waits
in backward, nor in the forward behind it: see [Note: overlap with backward] in `reductions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.handle import Handle
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import on_device
from zrun_core.distributed.transport import Group, reduce_tag
from zrun_core.memory.arena import Ring
from zrun_core.memory.layout import PAGE_BYTES
from zrun_core.memory.state_policy import StatePolicy
from zrun_core.memory.tensors import TENSOR, TIED
from zrun_core.zero.reduce.reduce_order import ReduceOrder
from zrun_core.zero.reduce.reductions import Reduction, Reductions
from zrun_core.zero.reduce.unit_sums import sum_of
from zrun_core.zero.unit.exchange import Exchange
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.unit.micro_pass import BackwardGrads, MicroPass
from zrun_core.zero.unit.places import places_of

# Begins to sum a part of a unit's gradient: with scratch for what arrives, and the part itself.
_AllReduce = Callable[[Comm, FlatUnit, torch.Tensor, torch.Tensor], Handle]


class Reducer:
    """Reduces the gradients of one model's units, micro-batch after micro-batch.

    Attributes:
        order: of their reductions.
        ring: scratch for flat gradients and for what arrives from other ranks.
        before_sum: is told of each rank's own gradients [padded_numel] before they are summed.
        before_last_backward: called when the last backward of a step begins.
    """

    def __init__(
        self,
        units: Sequence[FlatUnit],
        policy: StatePolicy,
        exchange: Exchange,
        mesh: Mesh,
        comm: Comm,
    ) -> None:
        """
        Args:
            units: all units of the model, in order of registration; frozen ones are left out.
        """
        self._comm = comm
        self._mesh = mesh
        self._policy = policy
        self._exchange = exchange
        self.order = ReduceOrder(units, exchange.ordered_among(mesh), comm)
        trained = self.order.units
        layouts = [unit.layout for unit in trained]
        placements = {unit.name: unit.placement for unit in trained}
        num_bytes = policy.reduce_ring_bytes(layouts, places_of(comm, mesh), placements=placements)
        alignment = 256
        # Elsewhere micro-batches are added up one after the other.
        self._waits_for_each = any(unit.grad.leaves for unit in trained)
        if self._waits_for_each:
            alignment = PAGE_BYTES
        self.ring = Ring(num_bytes, comm.device, alignment)
        self._under_way = Reductions(self.ring, policy.reduce_dtype)
        self._sums = {unit: sum_of(unit, self._under_way) for unit in trained}
        self.before_sum: Callable[[FlatUnit, torch.Tensor], None] | None = None
        self.before_last_backward: Callable[[], None] = lambda: None
        self._summed: set[int] = set()  # chunks whose gradients of this step are over all ranks

    # One optimizer step

    def begin_step(self) -> None:
        """Forget what the last step summed, which may have been given up between micro-batches."""
        self._under_way.drain()
        self._summed.clear()

    def flush(self) -> None:
        """Sum over ranks what is not summed yet: no backward was said to be the step's last."""
        chunks = self.order.chunks
        if self._summed == chunks:
            return
        if all(self._reduces(unit, boundary=False) for unit in self.order.units):
            self._under_way.drain()  # reduce-scatters, of which replicas sum the results
            self._all_reduce_parts(self.order.backward, self._exchange.all_reduce_replicas)
            self._summed |= chunks
            return
        for chunk in sorted(chunks - self._summed):
            micro = MicroPass(chunk)  # in which no module ran
            self.begin_backward(micro, boundary=True)
            self.end_backward(micro)

    def sum_shared(self) -> dict[FlatUnit, torch.Tensor]:
        """Sum the gradients of units that ranks of other axes have too. Collective over them.

        They are summed over data already; so this ends a step's gradients.

        Returns:
            By unit that other stages have too, [its parameters] float64 on the device: on how many
            of these each got a gradient.
        """
        sliced = [unit for unit in self.order.units if TENSOR in unit.layout.summed_over]
        self._sum_over(self._mesh.tensor, sliced)
        tied = [unit for unit in self.order.units if TIED in unit.layout.summed_over]
        if not tied or self._mesh.tied.size == 1:
            return {}
        self._sum_over(self._mesh.tied, tied)
        has_grad = on_device(
            [flag for unit in tied for flag in unit.grad.has_grad], self._comm.device
        )
        summed = self._comm.all_reduce_small(has_grad, self._mesh.tied, name="tied parameters")
        elsewhere = (summed - has_grad).split([len(unit.params) for unit in tied])
        return dict(zip(tied, elsewhere, strict=True))

    def _sum_over(self, group: Group, units: Sequence[FlatUnit]) -> None:
        """Sum with other ranks that have the same units, in one order, what this one updates."""
        numbers = {unit.index: number for number, unit in enumerate(units)}

        def all_reduce(
            comm: Comm, unit: FlatUnit, recv_buffer: torch.Tensor, part: torch.Tensor
        ) -> Handle:
            # Other ranks may number and name their units otherwise.
            tag = reduce_tag(numbers[unit.index])
            name = unit.layout.slots[0].part.tensor
            return comm.all_reduce(part, recv_buffer, group, tag=tag, name=name)

        self._all_reduce_parts(units, all_reduce)

    def _all_reduce_parts(self, units: Sequence[FlatUnit], all_reduce: _AllReduce) -> None:
        """Sum with other ranks the part of each gradient that this rank updates.

        `units` are the same ones on each of them, in one order. `all_reduce` begins the sum, given
        scratch for what arrives.
        """
        for unit in units:
            self._under_way.advance()
            recv_buffer = self._recv_buffer(unit)
            target = self._sums[unit].of_step()
            handle = all_reduce(self._comm, unit, recv_buffer, target.into)
            scratch = [recv_buffer, *target.scratch]
            self._under_way.add(Reduction(unit, handle, target.arrival, scratch))
        self._under_way.drain()

    # One backward pass

    def foresee(self, micro: MicroPass) -> None:
        """Learn from the forward of `micro` in which order gradients will come. Collective.

        To be called when its backward begins, before any unit is unsharded for it: ranks may gather
        and complete units in different turns after that.
        """
        self.order.foresee(list(micro.num_calls), micro.chunk)

    def begin_backward(
        self, micro: MicroPass, *, boundary: bool, awaits_slices: bool = False
    ) -> None:
        """Begin the backward of `micro`.

        Args:
            boundary: it is meant to be the last of the optimizer step: after it the gradients are
                summed over all ranks. If another one follows all the same, the sum is made anew.
            awaits_slices: no unit is complete before its slice: see `begin_slice`.
        """
        self._under_way.drain()  # units that fill up together find the ring empty, as is planned
        order = self.order.of_chunk(micro.chunk)
        if micro.chunk in self._summed:
            # The last backward was not the last after all. The next sum must contain its sum once:
            # the first replica keeps that, and the others begin with zeros.
            for unit in order:
                self._sums[unit].reopen(counts_here=unit.replicate.index == 0)
            self._summed.discard(micro.chunk)
        if boundary:
            self.before_last_backward()
        grads = BackwardGrads(
            order=order,
            boundary=boundary,
            reduced={unit.index for unit in order if self._reduces(unit, boundary=boundary)},
            missing={unit.index: set(range(len(unit.params))) for unit in order},
            awaited={unit.index for unit in order if awaits_slices},
        )
        expected = grads.awaited | self.order.left_for_end
        for unit in order:
            # No module of it ran in forward: its turn does not wait for gradients.
            if not micro.num_calls[unit.index] and unit.index not in expected:
                grads.complete.add(unit.index)
        micro.grads = grads
        self._issue_in_order(grads)

    def adds_at_once(self, unit: FlatUnit) -> bool:
        """Return whether gradients of `unit` may be added up before their backward's turn.

        Nothing is reduced then but the sum of all micro-batches, and it stays on the device.
        """
        return unit.grad.unsharded is not None and not self._reduces(unit, boundary=False)

    def _reduces(self, unit: FlatUnit, *, boundary: bool) -> bool:
        """Return whether ranks sum the gradient of `unit` in a backward, the step's last or not."""
        has_peers = unit.shard.size > 1 or (boundary and unit.replicate.size > 1)
        return has_peers and self._policy.zero.reduce_now(boundary)

    def accumulate_grad(
        self, micro: MicroPass, unit: FlatUnit, number: int, *, is_added: bool = False
    ) -> bool:
        """Move the gradient of a parameter into the flat one of its unit.

        Args:
            number: of the parameter in its unit.
            is_added: it is there already: see `adds_at_once`.

        Returns:
            Whether all parameters of the unit have their gradients.
        """
        grads = micro.grads
        assert grads is not None
        index = unit.index
        is_issued = index in grads.issued
        if unit.grad.unsharded is None or (is_issued and index not in grads.late):
            # The first gradient of the unit, or the first since its reduction was issued, which
            # may still read the buffer of the ones before.
            scratch = self._under_way.take_scratch(unit.layout.padded_numel)
            goes_on = index in grads.reduced and unit.grad.has_partial
            unit.grad.begin(scratch, goes_on=goes_on)
        if is_issued:
            grads.late.add(index)
        if not is_added:
            unit.grad.accumulate(number)
        missing = grads.missing[index]
        if number not in missing:
            grads.again.add((unit, number))
        missing.discard(number)
        return not missing

    def mark_complete(self, micro: MicroPass, unit: FlatUnit) -> None:
        """Expect no more gradients of `unit` in the backward of `micro`."""
        grads = micro.grads
        if grads is None:
            return
        if unit.index in self.order.left_for_end or unit.index in grads.awaited | grads.complete:
            return
        grads.seen.append(unit.index)
        grads.complete.add(unit.index)
        self._issue_in_order(grads)

    def begin_slice(self, micro: MicroPass, units: Container[int]) -> None:
        """Begin the part of a backward in which `units` get their last gradients.

        Until then they are not complete: another slice may have used them too; micro-batches that
        did not use them wait for those that did; and all ranks reduce them for one micro-batch
        after the other, whichever modules they have run.

        Args:
            units: indices of units, each of one slice only.
        """
        grads = micro.grads
        assert grads is not None
        begun = {
            unit.index for unit in grads.order if len(grads.missing[unit.index]) < len(unit.params)
        }
        # What a later slice has read, as for a penalty, has gradients already: which one is the
        # last does not show before the end of this slice.
        grads.awaited = {index for index in grads.awaited if index not in units or index in begun}

    def end_slice(self, micro: MicroPass, units: Container[int]) -> None:
        """Expect no more gradients of the units that `begin_slice` named."""
        assert micro.grads is not None
        micro.grads.awaited = {index for index in micro.grads.awaited if index not in units}
        for unit in micro.grads.order:
            if unit.index in units:
                self.mark_complete(micro, unit)

    def end_backward(self, micro: MicroPass) -> None:
        """End the backward of `micro`: reduce what is left.

        Behind the last one of the step nothing is in flight any more. What another one leaves in
        flight goes on beside the next forward, until the next backward needs the ring.
        """
        grads = micro.grads
        assert grads is not None
        grads.complete.update(unit.index for unit in grads.order)
        self._issue_in_order(grads)
        for unit in grads.order:
            if unit.index in grads.late:
                self.order.left_for_end.add(unit.index)
                self._issue(unit, grads)
        if grads.boundary or self._waits_for_each:
            self._under_way.drain()
        micro.grads = None
        if grads.boundary:
            self._finish_alone(unit for unit in grads.order if unit.index not in grads.reduced)
            self._summed.add(micro.chunk)
        self.order.record(grads.seen, micro.chunk)

    def _finish_alone(self, units: Iterable[FlatUnit]) -> None:
        """Complete the gradients that this rank has no other to sum with."""
        for unit in units:
            if self._sums[unit].goes_home_each_time:
                continue  # they left one by one
            unsharded_grad = unit.grad.complete()
            if self.before_sum is not None:
                self.before_sum(unit, unsharded_grad)
            self._sums[unit].keep(unsharded_grad, is_last=True)

    # Reductions in flight

    def _issue_in_order(self, grads: BackwardGrads) -> None:
        """Issue the units whose turn it is, up to the first that is not complete."""
        while grads.turn < len(grads.order):
            unit = grads.order[grads.turn]
            if unit.index not in grads.complete:
                return
            grads.turn += 1
            if unit.index in grads.reduced or self._sums[unit].goes_home_each_time:
                self._issue(unit, grads)
                grads.issued.add(unit.index)

    def _issue(self, unit: FlatUnit, grads: BackwardGrads) -> None:
        """Begin to reduce the gradient of `unit`. See [Note: late units]."""
        self._under_way.advance()
        is_late = unit.index in grads.late
        is_reduced = unit.index in grads.reduced
        # A second sum has the same tag, and is added to the first.
        self._under_way.end_those_of(unit)
        if unit.grad.unsharded is None:  # no parameter of it got a gradient
            if not is_reduced and (unit.grad.has_partial or not grads.boundary):
                return  # nothing to add
            begun = self._under_way.take_scratch(unit.layout.padded_numel)
            unit.grad.begin(begun, goes_on=is_reduced and unit.grad.has_partial)
        unsharded_grad = unit.grad.complete()
        if self.before_sum is not None:
            self.before_sum(unit, unsharded_grad)
        if not is_reduced:
            self._sums[unit].keep(unsharded_grad, is_last=grads.boundary)
            return
        self._reduce(unit, unsharded_grad, is_late=is_late, boundary=grads.boundary)

    def _reduce(
        self, unit: FlatUnit, unsharded_grad: torch.Tensor, *, is_late: bool, boundary: bool
    ) -> None:
        """Begin to sum a gradient over ranks, and say where the sum goes from there.

        `unsharded_grad`, [padded_numel], is complete. With `is_late` the unit was reduced before in
        this backward; at a `boundary` the step's gradient is complete with this one.
        """
        recv_buffer = self._recv_buffer(unit)
        sums = self._sums[unit]
        target_of = sums.again if is_late else sums.first
        target = target_of(unsharded_grad, boundary=boundary)
        handle = self._exchange.reduce_grad(
            self._comm,
            unit,
            unsharded_grad,
            recv_buffer,
            target.into,
            accumulate=target.accumulate,
            boundary=boundary,
        )
        scratch = [recv_buffer, *target.scratch]
        if not unit.grad.owns(unsharded_grad):
            scratch.append(unsharded_grad)
        unit.grad.is_reduced = True
        unit.grad.end()
        self._under_way.add(Reduction(unit, handle, target.arrival, scratch))

    def _recv_buffer(self, unit: FlatUnit) -> torch.Tensor:
        return self._under_way.take_scratch(self._exchange.recv_numel(unit.layout, unit.mesh_info))
