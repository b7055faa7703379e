"""The schedule of gradient reductions, and the scratch memory that they take turns in.

[Note: one order]
Every rank issues its reductions in one fixed order, for two reasons: the backend pairs them up, and
a rank that waits for scratch must wait for something that the others have issued too. With the
order D C B A, and a backward in which C is complete before D:

    complete        C      D      B      A
    issued                 D C    B      A          C waits for its turn

- Units of which no module ran on this rank are complete from the start, with zeros.
- Units that are incomplete at the end of backward, because a parameter got no gradient, follow
  then, with zeros for that parameter.
- The first order is that of registration, backwards; tiles come before the rest of their block, and
  units that are kept unsharded last. After the first backward it is the order in which rank 0
  completed them.

[Note: late units]
A unit can get another gradient after it was issued: a parameter is used outside of its module, or
a loop calls backward several times. The second gradient is collected apart and reduced at the end
of backward, and its sum is added to the first. From the next backward on that unit is left for the
end, so that it is reduced once. Both are part of `state_dict`: the order of additions changes the
last bits of a gradient, and a resumed run must add in the same order.

[Note: overlap with backward]
A reduction is one `Handle` with up to two parts, a reduce-scatter over the shard group and an
all-reduce over the replicas, and each part may have several messages. Nobody waits for them in
backward; whenever the next unit is issued, everything in flight moves on. With hybrid sharding:

    issued        C              B                    A                      end of backward
    in flight     C: scatter     C: all-reduce        C: over, or as before  wait for all
                                 B: scatter           B: all-reduce
                                                      A: scatter

A reduction moves on by as much as has arrived (`Handle.poll`); where ranks must start parts in one
order, or cannot see what has arrived, it moves on by one part (`Handle.advance`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zrun_core.distributed.comm import Comm, direct_up_to
from zrun_core.distributed.handle import Handle
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.transport import reduce_tag
from zrun_core.errors import CheckpointError
from zrun_core.memory.arena import Ring
from zrun_core.memory.layout import PAGE_BYTES
from zrun_core.memory.state_policy import MeshInfo, StatePolicy
from zrun_core.memory.tensors import TIED
from zrun_core.tiers.transfer import Transfer
from zrun_core.zero.exchange import Exchange
from zrun_core.zero.micro_pass import BackwardGrads, MicroPass
from zrun_core.zero.nonfinite import Inspector
from zrun_core.zero.unit import FlatUnit


class _Sum(NamedTuple):
    """A sum that is to leave for its home elsewhere.

    Attributes:
        accumulate: it is added there.
        is_last: the step's gradient is complete then.
    """

    values: torch.Tensor
    accumulate: bool
    is_last: bool


class _InFlight(NamedTuple):
    """A reduction under way.

    Attributes:
        late_sum: where the sum will be, if it is to be added to an earlier one; else None.
        leaves: the sum, if its home is elsewhere; else None.
        scratch: returned to the ring when the reduction is over, or its sum has left.
    """

    unit: FlatUnit
    handle: Handle
    late_sum: torch.Tensor | None
    leaves: _Sum | None
    scratch: list[torch.Tensor]

    def can_leave(self) -> bool:
        """Return whether it leaves, and nobody has to wait for that any more."""
        return self.leaves is not None and self.handle.poll()


class _Leaving(NamedTuple):
    """A gradient on its way to its home elsewhere, and the scratch that it lies in."""

    sent: Transfer
    scratch: list[torch.Tensor]


# Begins to sum a part of a unit's gradient: with scratch for what arrives, and the part itself.
_AllReduce = Callable[[Comm, FlatUnit, torch.Tensor, torch.Tensor], Handle]


def mesh_info_of(comm: Comm, mesh: Mesh) -> MeshInfo:
    """Return this rank's place in the groups that reduce, for `StatePolicy`."""
    return MeshInfo(
        shard_size=mesh.shard.size,
        shard_index=mesh.shard.index,
        num_replicas=mesh.replicate.size,
        replica_index=mesh.replicate.index,
        direct_up_to=direct_up_to(comm.device.type),
        tied_size=mesh.tied.size,
    )


def _first_guess(units: Sequence[FlatUnit]) -> list[FlatUnit]:
    """Return the order in which to reduce `units`, before a backward has shown a better one."""
    guess: list[FlatUnit] = []
    for _, together in itertools.groupby(reversed(units), key=lambda unit: unit.layout.block):
        # Tiles would fill the ring, if they had to wait for a norm that is registered after them.
        guess += sorted(together, key=lambda unit: not unit.layout.tile)
    # Units that are kept unsharded have parameters of many modules: they are complete last.
    return sorted(guess, key=lambda unit: unit.layout.keep_unsharded)


class Reducer:
    """Reduces the gradients of one model's units, micro-batch after micro-batch.

    Attributes:
        ring: scratch for flat gradients and for what arrives from other ranks.
        inspector: looks at each rank's own gradients before they are summed; None: nothing does.
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
            policy: what the ZeRO stage reduces when.
            exchange: the collectives of a unit.
            mesh: the groups of this rank.
            comm: its collectives.
        """
        self._comm = comm
        self._mesh = mesh
        self._policy = policy
        self._exchange = exchange
        self._order = _first_guess([unit for unit in units if unit.trainable])
        self._first_order = self._order
        self._chunks = {unit.layout.chunk for unit in self._order}
        self._recorded: set[int] = set()  # chunks whose order a backward has shown
        self._mesh_info = mesh_info_of(comm, mesh)
        layouts = [unit.layout for unit in self._order]
        placements = {unit.name: unit.placement for unit in self._order}
        num_bytes = policy.reduce_ring_bytes(layouts, self._mesh_info, placements=placements)
        alignment = 256
        if any(unit.grad.leaves for unit in self._order):
            alignment = PAGE_BYTES
        self.ring = Ring(num_bytes, comm.device, alignment)
        self.inspector: Inspector | None = None
        self.before_last_backward: Callable[[], None] = lambda: None
        self._in_flight: deque[_InFlight] = deque()
        self._leaving: deque[_Leaving] = deque()  # for homes elsewhere
        self._left_for_end: set[int] = set()  # indices of units that were late once
        self._summed: set[int] = set()  # chunks whose gradients of this step are over all ranks

    # One optimizer step

    def begin_step(self) -> None:
        """Forget what the last step summed."""
        self._summed.clear()

    def flush(self) -> None:
        """Sum over ranks what is not summed yet: no backward was said to be the step's last."""
        if self._summed == self._chunks:
            return
        if self._policy.zero.reduce_now(boundary=False) and self._mesh.shard.size > 1:
            # The reduce-scatter of each micro-batch is done.
            self._all_reduce_parts(self._order, self._exchange.all_reduce_replicas)
            self._summed |= self._chunks
            return
        for chunk in sorted(self._chunks - self._summed):
            micro = MicroPass(chunk)  # in which no module ran
            self.begin_backward(micro, boundary=True)
            self.end_backward(micro)

    def sum_tied(self) -> None:
        """Sum the gradients of units that several stages of a pipeline have. Collective over them.

        They are summed over the ranks of each stage already; so this ends a step's gradients.
        """
        tied = [unit for unit in self._first_order if TIED in unit.layout.replicated_over]
        if not tied or self._mesh.tied.size == 1:
            return
        numbers = {unit.index: number for number, unit in enumerate(tied)}

        def all_reduce(
            comm: Comm, unit: FlatUnit, recv_buffer: torch.Tensor, part: torch.Tensor
        ) -> Handle:
            tag = reduce_tag(numbers[unit.index])  # the stages number their units otherwise
            return comm.all_reduce(part, recv_buffer, self._mesh.tied, tag=tag, name=unit.name)

        self._all_reduce_parts(tied, all_reduce)
        has_grad = torch.tensor(
            [flag for unit in tied for flag in unit.grad.has_grad],
            dtype=torch.float64,
            device=self._comm.device,
        )
        summed = self._comm.all_reduce_small(has_grad, self._mesh.tied, name="tied parameters")
        flags = iter(summed.tolist())
        for unit in tied:
            for number in range(len(unit.params)):
                unit.grad.has_grad[number] = next(flags) > 0

    def _all_reduce_parts(self, units: Sequence[FlatUnit], all_reduce: _AllReduce) -> None:
        """Sum with other ranks the part of each gradient that this rank updates.

        Args:
            units: the same ones on each of them, in one order.
            all_reduce: begins to, given scratch for what arrives.
        """
        for unit in units:
            self._advance_in_flight()
            recv_buffer = self._recv_buffer(unit)
            scratch = [recv_buffer]
            total = None
            if unit.grad.leaves:
                total = self._take_scratch(unit.layout.shard_numel)
                unit.grad.load(total)
                scratch.append(total)
            handle = all_reduce(
                self._comm, unit, recv_buffer, unit.grad.fetch() if total is None else total
            )
            leaves = None if total is None else _Sum(total, accumulate=False, is_last=True)
            self._in_flight.append(_InFlight(unit, handle, None, leaves, scratch))
        self._drain()

    # One backward pass

    def begin_backward(
        self, micro: MicroPass, *, boundary: bool, awaits_slices: bool = False
    ) -> None:
        """Begin the backward of `micro`.

        Args:
            micro: whose forward has run.
            boundary: it is meant to be the last of the optimizer step: after it the gradients are
                summed over all ranks. If another one follows all the same, the sum is made anew.
            awaits_slices: no unit is complete before its slice: see `begin_slice`.
        """
        order = self._order_of(micro.chunk)
        if micro.chunk in self._summed:
            counts_here = self._mesh.replicate.index == 0
            for unit in order:
                if unit.grad.keeps_partial_sums:
                    self._reopen_partial(unit, counts_here=counts_here)
                else:
                    unit.grad.reopen(counts_here=counts_here)
            self._summed.discard(micro.chunk)
        if boundary:
            self.before_last_backward()
        has_peers = self._mesh.shard.size > 1 or (boundary and self._mesh.replicate.size > 1)
        grads = BackwardGrads(
            order=order,
            boundary=boundary,
            reduces=has_peers and self._policy.zero.reduce_now(boundary),
            missing={unit.index: set(range(len(unit.params))) for unit in order},
            awaited={unit.index for unit in order if awaits_slices},
        )
        expected = grads.awaited | self._left_for_end
        for unit in order:
            if not micro.num_calls[unit.index] and unit.index not in expected:
                grads.complete.add(unit.index)
        micro.grads = grads
        self._issue_in_order(grads)

    def _reopen_partial(self, unit: FlatUnit, *, counts_here: bool) -> None:
        """Make this rank's part of the sum, and nothing else, what its micro-batches add up to."""
        whole = self._take_scratch(unit.layout.padded_numel).zero_()
        if counts_here:
            unit.grad.load(unit.local_part(whole))
        sent = unit.grad.store(whole, accumulate=False)
        unit.grad.has_partial = True
        unit.grad.is_reduced = False
        self._leaving.append(_Leaving(sent, [whole]))

    def accumulate_grad(self, micro: MicroPass, unit: FlatUnit, number: int) -> bool:
        """Move the gradient of a parameter into the flat one of its unit.

        Args:
            micro: whose backward runs.
            unit: of the parameter.
            number: of the parameter in its unit.

        Returns:
            Whether all parameters of the unit have their gradients.
        """
        grads = micro.grads
        assert grads is not None
        is_issued = unit.index in grads.issued
        is_first_after_issue = is_issued and unit.index not in grads.late
        if unit.grad.unsharded is None or is_first_after_issue:
            scratch = self._take_scratch(unit.layout.padded_numel)
            unit.grad.begin(scratch, goes_on=grads.reduces and unit.grad.has_partial)
        if is_issued:
            grads.late.add(unit.index)
        unit.grad.accumulate(number)
        missing = grads.missing[unit.index]
        missing.discard(number)
        return not missing

    def mark_complete(self, micro: MicroPass, unit: FlatUnit) -> None:
        """Expect no more gradients of `unit` in the backward of `micro`."""
        grads = micro.grads
        if grads is None:
            return
        if unit.index in self._left_for_end or unit.index in grads.awaited | grads.complete:
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
            micro: whose backward runs.
            units: indices of units, each of one slice only.
        """
        assert micro.grads is not None
        micro.grads.awaited = {index for index in micro.grads.awaited if index not in units}

    def end_slice(self, micro: MicroPass, units: Container[int]) -> None:
        """Expect no more gradients of the units that `begin_slice` named."""
        assert micro.grads is not None
        for unit in micro.grads.order:
            if unit.index in units:
                self.mark_complete(micro, unit)

    def end_backward(self, micro: MicroPass) -> None:
        """End the backward of `micro`: reduce what is left, and wait for everything in flight."""
        grads = micro.grads
        assert grads is not None
        grads.complete.update(unit.index for unit in grads.order)
        self._issue_in_order(grads)
        for unit in grads.order:
            if unit.index in grads.late:
                self._left_for_end.add(unit.index)
                self._issue(unit, grads)
        self._drain()
        micro.grads = None
        if grads.boundary and not grads.reduces:
            self._finish_alone(grads.order)
        if grads.boundary:
            self._summed.add(micro.chunk)
        if micro.chunk not in self._recorded:
            self.use_order(grads.seen, micro.chunk)
            self._recorded.add(micro.chunk)

    def _finish_alone(self, units: Sequence[FlatUnit]) -> None:
        """Complete the gradients of a rank that has no other to sum with."""
        for unit in units:
            if unit.grad.leaves:
                continue  # they left one by one
            unsharded_grad = unit.grad.complete()
            if self.inspector is not None:
                self.inspector.inspect(unit, unsharded_grad)
            unit.grad.put()

    # Reductions in flight

    def _issue_in_order(self, grads: BackwardGrads) -> None:
        """Issue the units whose turn it is, up to the first that is not complete."""
        while grads.turn < len(grads.order):
            unit = grads.order[grads.turn]
            if unit.index not in grads.complete:
                return
            grads.turn += 1
            if grads.reduces or unit.grad.leaves:
                self._issue(unit, grads)
                grads.issued.add(unit.index)

    def _issue(self, unit: FlatUnit, grads: BackwardGrads) -> None:
        """Begin to reduce the gradient of `unit`. See [Note: late units]."""
        self._advance_in_flight()
        is_late = unit.index in grads.late
        self._retire_sum_of(unit)  # a second sum has the same tag, and is added to the first
        if unit.grad.unsharded is None:  # no parameter of it got a gradient
            if not grads.reduces and (unit.grad.has_partial or not grads.boundary):
                return  # nothing to add
            begun = self._take_scratch(unit.layout.padded_numel)
            unit.grad.begin(begun, goes_on=grads.reduces and unit.grad.has_partial)
        unsharded_grad = unit.grad.complete()
        if self.inspector is not None:
            self.inspector.inspect(unit, unsharded_grad)
        if not grads.reduces:
            self._send_partial(unit, unsharded_grad, is_last=grads.boundary)
            return
        self._reduce(unit, unsharded_grad, is_late=is_late, boundary=grads.boundary)

    def _reduce(
        self, unit: FlatUnit, unsharded_grad: torch.Tensor, *, is_late: bool, boundary: bool
    ) -> None:
        """Begin to sum a gradient over ranks, and say where the sum goes from there.

        Args:
            unit: whose gradient it is.
            unsharded_grad: [padded_numel], complete.
            is_late: the unit was reduced before in this backward.
            boundary: the step's gradient is complete with this one.
        """
        recv_buffer = self._recv_buffer(unit)
        late_sum = None
        leaves = None
        into = unit.local_part(unsharded_grad)  # where the sum stays until it is added, or leaves
        accumulate = unit.grad.is_reduced
        scratch = [recv_buffer]
        if unit.grad.leaves and is_late:
            leaves = _Sum(into, accumulate=True, is_last=boundary)
            accumulate = False
        elif unit.grad.leaves:
            sums_replicas = boundary and unit.replicate.size > 1
            accumulate = unit.grad.is_reduced and sums_replicas
            if accumulate:  # replicas sum what the micro-batches have added up to
                into = self._take_scratch(unit.layout.shard_numel)
                unit.grad.load(into)
                scratch.append(into)
            leaves = _Sum(
                into, accumulate=unit.grad.is_reduced and not accumulate, is_last=boundary
            )
        elif is_late:
            accumulate = False
            late_sum = into
        else:
            into = unit.grad.sum_buffer()
        handle = self._exchange.reduce_grad(
            self._comm,
            unit,
            unsharded_grad,
            recv_buffer,
            into,
            accumulate=accumulate,
            boundary=boundary,
        )
        if not unit.grad.owns(unsharded_grad):
            scratch.append(unsharded_grad)
        unit.grad.is_reduced = True
        unit.grad.end()
        self._in_flight.append(_InFlight(unit, handle, late_sum, leaves, scratch))

    def _send_partial(self, unit: FlatUnit, unsharded_grad: torch.Tensor, *, is_last: bool) -> None:
        """Send this rank's own gradient to its home elsewhere, and add it there."""
        accumulate = unit.grad.has_partial
        sent = unit.grad.store(unsharded_grad, accumulate=accumulate, is_last=is_last)
        unit.grad.has_partial = True
        unit.grad.end()
        self._leaving.append(_Leaving(sent, [unsharded_grad]))

    def _take_scratch(self, numel: int) -> torch.Tensor:
        """Return [numel] scratch in reduce dtype, when enough reductions are over to have it.

        The ring grows only where nothing is in flight that would give memory back.
        """
        dtype = self._policy.reduce_dtype
        scratch = self.ring.take(numel, dtype, grow=not self._is_busy)
        while scratch is None:
            if self._in_flight:
                self._retire()
            else:
                self._see_off()
            scratch = self.ring.take(numel, dtype, grow=not self._is_busy)
        return scratch

    @property
    def _is_busy(self) -> bool:
        """True if something is under way that will give scratch back."""
        return bool(self._in_flight or self._leaving)

    def _recv_buffer(self, unit: FlatUnit) -> torch.Tensor:
        return self._take_scratch(self._exchange.recv_numel(unit.layout, self._mesh_info))

    def _advance_in_flight(self) -> None:
        """Let the reductions in flight go on. See [Note: overlap with backward]."""
        for reduction in self._in_flight:
            reduction.handle.advance()
            reduction.handle.poll()
        while self._in_flight and self._in_flight[0].can_leave():
            self._retire()

    def _retire(self) -> None:
        """Wait for the oldest reduction, and give its scratch back."""
        oldest = self._in_flight.popleft()
        oldest.handle.wait()
        if oldest.leaves is not None:
            values, accumulate, is_last = oldest.leaves
            sent = oldest.unit.grad.store(values, accumulate=accumulate, is_last=is_last)
            self._leaving.append(_Leaving(sent, oldest.scratch))
            return
        if oldest.late_sum is not None:
            oldest.unit.grad.fetch().add_(oldest.late_sum)
        oldest.unit.grad.put()
        for scratch in oldest.scratch:
            self.ring.give(scratch)

    def _retire_sum_of(self, unit: FlatUnit) -> None:
        while any(reduction.unit is unit for reduction in self._in_flight):
            self._retire()

    def _drain(self) -> None:
        while self._in_flight:
            self._retire()
        while self._leaving:
            self._see_off()

    def _see_off(self) -> None:
        """Wait until the oldest gradient has left, and give its scratch back."""
        oldest = self._leaving.popleft()
        oldest.sent.wait()
        for scratch in oldest.scratch:
            self.ring.give(scratch)

    # What backward passes teach

    @property
    def forward_order(self) -> list[FlatUnit]:
        """The trainable units in the order in which a forward should need them; alike on all ranks.

        Their gradients come in the opposite one.
        """
        return self._order[::-1]

    @property
    def has_recorded_order(self) -> bool:
        """True once the order of reductions is known, which the first backward records."""
        return self._recorded == self._chunks

    def _order_of(self, chunk: int) -> list[FlatUnit]:
        return [unit for unit in self._order if unit.layout.chunk == chunk]

    def use_order(self, seen_here: Iterable[int], chunk: int = 0) -> None:
        """Adopt the order in which rank 0 completed the units; those that it did not see come last.

        Collective over the ranks that train the same parameters.

        Args:
            seen_here: indices of units, in the order in which this rank completed them, or will.
            chunk: whose units they are.
        """
        by_index = {unit.index: unit for unit in self._order_of(chunk)}
        seen = list(seen_here)
        seen += [index for index in by_index if index not in seen]
        agreed = [by_index[index] for index in self.agree_on(seen)]
        orders = {each: self._order_of(each) for each in self._chunks} | {chunk: agreed}
        self._order = [unit for each in sorted(orders, reverse=True) for unit in orders[each]]

    def agree_on(self, numbers: Sequence[int]) -> list[int]:
        """Return what rank 0 has of the ranks that train the same parameters. Collective."""
        agreed = torch.tensor(numbers, device=self._comm.device)
        self._comm.broadcast(agreed, self._mesh.data, name="order of reductions")
        found: list[int] = agreed.tolist()
        return found

    @property
    def units(self) -> Sequence[FlatUnit]:
        """Trainable units, in one order."""
        return self._first_order

    def state_dict(self) -> dict[str, Any]:
        """Return what backward passes have taught, as small JSON. See [Note: late units]."""
        order = None
        if self.has_recorded_order:
            order = [unit.name for unit in self._order]
        late = sorted(unit.name for unit in self._order if unit.index in self._left_for_end)
        return {"order": order, "late": late}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on as the same model on the same layout had gone on.

        Args:
            state: of its `state_dict`; None: begin anew.

        Raises:
            CheckpointError: it is of other units.
        """
        self._order = self._first_order
        self._recorded = set()
        self._left_for_end = set()
        if state is None:
            return
        by_name = {unit.name: unit for unit in self._order}
        order = state["order"]
        late = state["late"]
        fits = by_name.keys() >= set(late)
        if order is not None:
            fits = fits and sorted(order) == sorted(by_name)
        if not fits:
            raise CheckpointError("the order of reductions that it holds is of other units")
        if order is not None:
            self._order = [by_name[name] for name in order]
            self._recorded = set(self._chunks)
        self._left_for_end = {by_name[name].index for name in late}
