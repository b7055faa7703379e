"""Gradients on their way: which unit is reduced when, and from which memory.

[Note: one order]
Every rank issues its reductions in one fixed order, because the backend pairs them up and because a rank that waits for
scratch must wait for something that the others have issued too. A unit that is complete early waits for its turn; units
that ran on no module of this rank are complete from the start; what is incomplete at the end of backward (a parameter
that got no gradient) follows then, with zeros. The first order is that of registration backwards, parameters of
units that stay whole last; after the first backward it is the one that the first rank saw.

A unit that gets another gradient after its turn (a parameter used outside its module, several backward calls) is
reduced once more at the end, and the second sum is added to the first; from then on it is left
for the end.

[Note: beside backward]
A reduction may have two parts, over the shard group and over the copies, and each may have several
messages. What is under way goes on whenever the next unit's is issued: by as much as has arrived,
or, where ranks must start parts in one order or cannot see what has arrived, by one part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zrun_core.distributed.comm import Comm, direct_up_to
from zrun_core.distributed.handle import Handle
from zrun_core.distributed.mesh import Mesh
from zrun_core.errors import CheckpointError
from zrun_core.memory.arena import Ring
from zrun_core.memory.layout import MeshInfo, StatePolicy
from zrun_core.zero.exchange import Exchange
from zrun_core.zero.micro_pass import ExpectedGradients, MicroPass
from zrun_core.zero.nonfinite import Inspector
from zrun_core.zero.unit import FlatUnit


class _InFlight(NamedTuple):
    """A reduction under way, and the scratch that it holds until it is over."""

    unit: FlatUnit
    handle: Handle
    late: torch.Tensor | None  # where the sum will be, if it is to be added to an earlier one
    held: list[torch.Tensor]


def mesh_info_of(comm: Comm, mesh: Mesh) -> MeshInfo:
    """This rank's place in the groups that reduce, for `StatePolicy`."""
    shard, replicate = mesh.shard, mesh.replicate
    direct = direct_up_to(comm.device.type)
    return MeshInfo(shard.size, shard.index, replicate.size, replicate.index, direct)


class Reducer:
    """Reduces the trainable units of one model, micro-batch after micro-batch."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        policy: StatePolicy,
        exchange: Exchange,
        mesh: Mesh,
        comm: Comm,
    ) -> None:
        self._comm, self._mesh, self._policy, self._exchange = comm, mesh, policy, exchange
        # What stays whole belongs to modules of the whole model, so it is complete last.
        self._order = sorted(
            (u for u in reversed(units) if u.trainable), key=lambda unit: unit.layout.keep_unsharded
        )
        self._first_order = self._order
        self._is_order_recorded = False
        self._peers = mesh_info_of(comm, mesh)
        num_bytes = policy.reduce_ring_bytes([unit.layout for unit in self._order], self._peers)
        self.ring = Ring(num_bytes, comm.device)
        self.inspector: Inspector | None = None  # looks at gradients before they are summed
        self._in_flight: deque[_InFlight] = deque()
        self._left_for_end: set[int] = set()  # indices of units that were late once
        self._is_summed = False  # this step's gradients so far were summed over all ranks

    # One optimizer step

    def begin_step(self) -> None:
        """Forget what the last step summed."""
        self._is_summed = False

    def flush(self) -> None:
        """The step is to be made, and no pass was said to be its last: sum over ranks what is not summed yet."""
        if self._is_summed:
            return
        if self._policy.zero.reduce_now(boundary=False) and self._mesh.shard.size > 1:
            self._all_reduce_replicas()
        else:
            micro = MicroPass()  # of which nothing came
            self.begin_backward(micro, boundary=True)
            self.end_backward(micro)

    def _all_reduce_replicas(self) -> None:
        """Add up the shards of all copies, which no pass has done that was not said to be the last."""
        for unit in self._order:
            self._advance_in_flight()
            recv_buffer = self._recv_buffer(unit)
            handle = self._exchange.all_reduce_replicas(
                self._comm, unit, recv_buffer, unit.fetch_grad()
            )
            self._in_flight.append(_InFlight(unit, handle, None, [recv_buffer]))
        self._drain()
        self._is_summed = True

    # One backward pass

    def begin_backward(self, micro: MicroPass, *, boundary: bool) -> None:
        """Begin the backward of `micro`. After one with `boundary` the gradients are summed over all ranks.

        It is meant to be the last one of the optimizer step; where others follow, their sum is made anew.
        """
        if self._is_summed:
            for unit in self._order:
                unit.reopen_grad(counts_here=self._mesh.replicate.index == 0)
            self._is_summed = False
        missing = {unit.index: set(range(len(unit.params))) for unit in self._order}
        has_peers = self._mesh.shard.size > 1 or (boundary and self._mesh.replicate.size > 1)
        reduces = has_peers and self._policy.zero.reduce_now(boundary)
        expected = ExpectedGradients(boundary, reduces, missing)
        for unit in self._order:
            if not micro.num_calls[unit.index] and unit.index not in self._left_for_end:
                expected.complete.add(unit.index)
        micro.gradients = expected
        self._issue_in_order(expected)

    def accumulate_grad(self, micro: MicroPass, unit: FlatUnit, number: int) -> bool:
        """Parameter `number` of `unit` has its gradient. Returns whether the unit has them all."""
        expected = micro.gradients
        assert expected is not None
        is_issued = unit.index in expected.issued
        if unit.unsharded_grad is None or (is_issued and unit.index not in expected.late):
            unit.begin_grad(self._scratch(unit.layout.padded_numel))
        if is_issued:
            expected.late.add(unit.index)
        unit.accumulate_grad(number)
        missing = expected.missing[unit.index]
        missing.discard(number)
        return not missing

    def mark_complete(self, micro: MicroPass, unit: FlatUnit) -> None:
        """No more gradients are expected for `unit` in the backward of `micro`."""
        expected = micro.gradients
        if expected is None or unit.index in self._left_for_end or unit.index in expected.complete:
            return
        expected.seen.append(unit.index)
        expected.complete.add(unit.index)
        self._issue_in_order(expected)

    def end_backward(self, micro: MicroPass) -> None:
        """The backward of `micro` is over: reduce what is left, and wait for everything."""
        expected = micro.gradients
        assert expected is not None
        expected.complete.update(unit.index for unit in self._order)
        self._issue_in_order(expected)
        for unit in self._order:
            if unit.index in expected.late:
                self._left_for_end.add(unit.index)
                self._issue(unit, expected)
        self._drain()
        micro.gradients = None
        if expected.boundary and not expected.reduces:  # a rank alone
            for unit in self._order:
                whole = unit.complete_grad()
                if self.inspector is not None:
                    self.inspector.inspect(unit, whole)
                unit.put_grad()
        self._is_summed = expected.boundary
        if not self._is_order_recorded:
            self._record_order(expected.seen)

    # Mechanism

    def _issue_in_order(self, expected: ExpectedGradients) -> None:
        while expected.turn < len(self._order):
            unit = self._order[expected.turn]
            if unit.index not in expected.complete:
                return
            expected.turn += 1
            if expected.reduces:
                self._issue(unit, expected)
                expected.issued.add(unit.index)

    def _scratch(self, numel: int) -> torch.Tensor:
        dtype = self._policy.reduce_dtype
        while (found := self.ring.take(numel, dtype, grow=not self._in_flight)) is None:
            self._retire()
        return found

    def _recv_buffer(self, unit: FlatUnit) -> torch.Tensor:
        return self._scratch(self._exchange.recv_numel(unit.layout, self._peers))

    def _advance_in_flight(self) -> None:
        """Let what is under way go on. See [Note: beside backward]."""
        for under_way in self._in_flight:
            under_way.handle.advance()
            under_way.handle.poll()

    def _issue(self, unit: FlatUnit, expected: ExpectedGradients) -> None:
        self._advance_in_flight()
        is_late = unit.index in expected.late
        while is_late and any(under_way.unit is unit for under_way in self._in_flight):
            self._retire()  # the first sum has the same tag
        if unit.unsharded_grad is None:
            unit.begin_grad(self._scratch(unit.layout.padded_numel))
        whole = unit.complete_grad()
        if self.inspector is not None:
            self.inspector.inspect(unit, whole)
        recv_buffer = self._recv_buffer(unit)
        total = unit.local_part(whole) if is_late else unit.sum_buffer()
        handle = self._exchange.reduce_grad(
            self._comm,
            unit,
            whole,
            recv_buffer,
            total,
            accumulate=unit.is_reduced and not is_late,
            boundary=expected.boundary,
        )
        held = [recv_buffer] if unit.owns_buffer(whole) else [recv_buffer, whole]
        unit.is_reduced = True
        unit.end_grad()
        self._in_flight.append(_InFlight(unit, handle, total if is_late else None, held))

    def _retire(self) -> None:
        oldest = self._in_flight.popleft()
        oldest.handle.wait()
        if oldest.late is not None:
            oldest.unit.fetch_grad().add_(oldest.late)
        oldest.unit.put_grad()
        for scratch in oldest.held:
            self.ring.give(scratch)

    def _drain(self) -> None:
        while self._in_flight:
            self._retire()

    @property
    def has_recorded_order(self) -> bool:
        """Whether this rank knows in which order the others reduce, without computing anything itself."""
        return self._is_order_recorded

    def _record_order(self, seen_here: Sequence[int]) -> None:
        """From now on, reduce in the order that rank 0 completed the units in; those that it did not see come last."""
        self._is_order_recorded = True
        by_index = {unit.index: unit for unit in self._order}
        seen = [*seen_here, *(index for index in by_index if index not in seen_here)]
        order = torch.tensor(seen, device=self._comm.device)
        self._comm.broadcast(order, self._mesh.data, name="order of reductions")
        self._order = [by_index[index] for index in order.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """What backward passes have taught, as small JSON: sums of late gradients depend on it, to the last bit."""
        return {
            "order": [unit.name for unit in self._order] if self._is_order_recorded else None,
            "late": sorted(unit.name for unit in self._order if unit.index in self._left_for_end),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on with what the same model on the same layout had state; None: with nothing.

        Raises:
            CheckpointError: it is of other units.
        """
        self._order, self._is_order_recorded, self._left_for_end = self._first_order, False, set()
        if state is None:
            return
        by_name = {unit.name: unit for unit in self._order}
        order, late = state["order"], state["late"]
        if not by_name.keys() >= set(late) or (
            order is not None and sorted(order) != sorted(by_name)
        ):
            raise CheckpointError("the order of reductions that it holds is of other units")
        if order is not None:
            self._order, self._is_order_recorded = [by_name[name] for name in order], True
        self._left_for_end = {by_name[name].index for name in late}
