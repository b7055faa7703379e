"""Reductions under way, and the scratch memory that they take turns in.

[Note: overlap with backward]
A reduction is one `Handle` with up to two parts, a reduce-scatter over the shard group and an
all-reduce over the replicas, and each part may have several messages. Nobody waits for them in
backward, nor in the forward behind it; whenever the next unit is issued, everything in flight moves
on. With hybrid sharding:

    issued        C              B                    A                      end of the last one
    in flight     C: scatter     C: all-reduce        C: over, or as before  wait for all
                                 B: scatter           B: all-reduce
                                                      A: scatter

A reduction moves on by as much as has arrived (`Handle.poll`); where ranks must start parts in one
order, or cannot see what has arrived, it moves on by one part (`Handle.advance`).

[Note: beside backward]
On an accelerator it is a stream that waits for what a part has to follow. So reductions move on in
a stream of their own, the side stream, and the stream that computes goes on meanwhile; it waits for
a reduction when that is retired, for all that the side stream was given of it.

    compute    backward of C | backward of B       | backward of A  | waits for all
    side                     | waits for C's, adds | waits for B's
    messages   C: scatter ---+--> B: scatter, C: all-reduce ...

What a part reads and writes was given to its first message by the stream that computes, and is left
alone until the reduction is retired: the two streams need no other order.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zrun_core.distributed.handle import Handle
from zrun_core.hardware import accelerator
from zrun_core.memory.arena import Ring
from zrun_core.tiers.transfer import DONE, Transfer
from zrun_core.zero.unit.flat_unit import FlatUnit


class Arrival:
    """What becomes of a sum once it is there: it lies where it is kept.

    Attributes:
        leaves: it has a home elsewhere, and leaves for there as soon as it can.
    """

    leaves = False

    def end(self, unit: FlatUnit) -> Transfer | None:
        """Keep the sum of a gradient of `unit`.

        Returns:
            What to wait for before its scratch is used again; None: nothing.
        """
        unit.grad.put()
        return None


KEPT = Arrival()


class Added(Arrival):
    """A sum that lies beside an earlier one, and is added to that."""

    def __init__(self, beside: torch.Tensor) -> None:
        self._beside = beside

    def end(self, unit: FlatUnit) -> Transfer | None:
        unit.grad.fetch().add_(self._beside)
        return super().end(unit)


class Leaving(Arrival):
    """A sum whose home is elsewhere."""

    leaves = True

    def __init__(self, values: torch.Tensor, *, accumulate: bool, is_last: bool) -> None:
        """
        Args:
            accumulate: it is added to what is there.
            is_last: the step's gradient is complete then.
        """
        self._values = values
        self._accumulate = accumulate
        self._is_last = is_last

    def end(self, unit: FlatUnit) -> Transfer | None:
        return unit.grad.store(self._values, accumulate=self._accumulate, is_last=self._is_last)


@dataclass
class Reduction:
    """A reduction under way.

    Attributes:
        arrival: what becomes of its sum.
        scratch: returned to the ring when the reduction is over, or its sum has left.
        moved_on: what the side stream was given of it so far. See [Note: beside backward].
    """

    unit: FlatUnit
    handle: Handle
    arrival: Arrival
    scratch: list[torch.Tensor]
    moved_on: Transfer = DONE

    @property
    def can_leave(self) -> bool:
        """True if the sum is there, as far as can be told, and has a home elsewhere."""
        return self.arrival.leaves and self.handle.is_over

    def wait(self) -> None:
        """Wait until the sum is there."""
        self.moved_on.wait()
        self.handle.wait()


class _Sent(NamedTuple):
    """A gradient on its way to its home elsewhere, and the scratch that it lies in."""

    sent: Transfer
    scratch: list[torch.Tensor]


class Reductions:
    """The reductions of one model that are under way, and gradients that leave for their homes."""

    def __init__(self, ring: Ring, dtype: torch.dtype) -> None:
        """
        Args:
            ring: scratch for flat gradients and for what arrives from other ranks.
        """
        self._ring = ring
        self._dtype = dtype
        self._in_flight: deque[Reduction] = deque()
        self._leaving: deque[_Sent] = deque()
        self._side: accelerator.Stream | None = None
        if accelerator.is_accelerator(ring.device):
            self._side = accelerator.new_stream(ring.device)

    def take_scratch(self, numel: int) -> torch.Tensor:
        """Return [numel] scratch in reduce dtype, when enough reductions are over to have it.

        The ring grows only where nothing is in flight that would give memory back.
        """
        scratch = self._ring.take(numel, self._dtype, grow=not self._is_busy)
        while scratch is None:
            if self._in_flight:
                self._retire()
            else:
                self._see_off()
            scratch = self._ring.take(numel, self._dtype, grow=not self._is_busy)
        return scratch

    @property
    def _is_busy(self) -> bool:
        """True if something is under way that will give scratch back."""
        return bool(self._in_flight or self._leaving)

    def add(self, reduction: Reduction) -> None:
        """Look after a reduction that has begun."""
        self._in_flight.append(reduction)

    def add_leaving(self, sent: Transfer, scratch: list[torch.Tensor]) -> None:
        """Look after a gradient that is on its way to its home elsewhere."""
        self._leaving.append(_Sent(sent, scratch))

    def advance(self) -> None:
        """Let the reductions in flight go on. See [Note: overlap with backward]."""
        with self._beside_backward():
            for reduction in self._in_flight:
                self._move_on(reduction)
        while self._in_flight and self._in_flight[0].can_leave:
            self._retire()

    def _beside_backward(self) -> AbstractContextManager[None]:
        """Return the context of the side stream, where there is one."""
        return nullcontext() if self._side is None else accelerator.on_stream(self._side)

    def _move_on(self, reduction: Reduction) -> None:
        """Let a reduction go on, and mark how far it has come in the side stream."""
        before = reduction.handle.num_moves
        reduction.handle.advance()
        reduction.handle.poll()
        if self._side is not None and reduction.handle.num_moves != before:
            reduction.moved_on = accelerator.Event(self._ring.device)

    def end_those_of(self, unit: FlatUnit) -> None:
        """Wait until no reduction of `unit` is under way."""
        while any(reduction.unit is unit for reduction in self._in_flight):
            self._retire()

    def drain(self) -> None:
        """Wait for everything under way."""
        while self._in_flight:
            self._retire()
        while self._leaving:
            self._see_off()

    def _retire(self) -> None:
        """Wait for the oldest reduction, and give its scratch back."""
        oldest = self._in_flight.popleft()
        oldest.wait()
        sent = oldest.arrival.end(oldest.unit)
        if sent is not None:
            self._leaving.append(_Sent(sent, oldest.scratch))
            return
        for scratch in oldest.scratch:
            self._ring.give(scratch)

    def _see_off(self) -> None:
        """Wait until the oldest gradient has left, and give its scratch back."""
        oldest = self._leaving.popleft()
        oldest.sent.wait()
        for scratch in oldest.scratch:
            self._ring.give(scratch)
