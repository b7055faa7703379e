"""Communication in flight, as a chain of parts that follow each other.

[Note: chains]
What was issued may have to be followed by more: sums, once the parts have arrived, or a reduction
over another group. A gradient of hybrid sharding is such a chain of three messages:

    part            works in flight         what follows it
    1               reduce-scatter          add up the parts that arrived
    2               exchange of slices      add up the parts that arrived      `then`, over the
    3               exchange of sums                                           replicate group

Among ranks that exchange pairwise each message finds its own receiver, so `Handle.poll` starts what
follows as soon as it sees that it can, which is so through memory. There others may wait for that
while this rank waits for another message, of which they know nothing yet: so each wait also starts
what follows in other chains (`Chains`). With A in its first part, and B that comes after it:

    rank 0    waits for B      must meanwhile start the second part of A
    rank 1    waits for the second part of A, before it turns to B

Backends instead pair up what
all ranks issue one after the other, and a part is over earlier on one rank than on another; and
messages through sockets do not say that they are over. There only `advance` and `wait` start what
follows, and all ranks call them at the same points of what they issue.

                    waits for works     starts a part of any order     starts a part in order
    poll()          no                  once it sees the end           no: returns False
    catch_up()      yes, as needed      all in front of one in order   no
    advance()       yes, as needed      on the way                     one
    wait()          yes                 all                            all
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from zrun_core.distributed.transport import Group, Work
from zrun_core.hardware.spans import Issued


class Waiter(Protocol):
    """The part of `Comm` that a handle needs."""

    @property
    def in_words(self) -> Issued | None: ...

    def wait_for(self, works: Sequence[Work], issued: Issued | None = None) -> None: ...

    def observes_completion(self, group: Group) -> bool: ...

    def follow(self, handle: Handle) -> None: ...


class _Step(NamedTuple):
    """The part that follows, which may be communication itself.

    Attributes:
        in_order: all ranks must start it at the same point of what they issue.
        communicates: other ranks may wait until this one has started it.
    """

    start: Callable[[], Handle | None]
    in_order: bool
    communicates: bool


class Handle:
    """Communication in flight. See [Note: chains].

    Attributes:
        num_moves: how often a part was finished, or the next one started.
    """

    def __init__(
        self,
        comm: Waiter,
        works: Sequence[Work],
        then: Callable[[], Handle | None] | None = None,
    ) -> None:
        """Follow `works`.

        Args:
            then: called once they are over, at any time on each rank.
        """
        self._comm = comm
        self._issued = comm.in_words  # for a profile
        self.num_moves = 0
        self._works = list(works)
        self._steps: deque[_Step] = deque()
        self._is_moving = False
        if then is not None:
            self._steps.append(_Step(then, in_order=False, communicates=False))

    def then(self, start: Callable[[], Handle | None], over: Group) -> Handle:
        """Let `start` follow, which communicates over group `over`; return this handle.

        It starts at once where there is nothing to wait for.
        """
        in_order = not self._comm.observes_completion(over)
        self._steps.append(_Step(start, in_order, communicates=True))
        while self._steps and not self._works:
            self._move_on()
        if self._steps:
            self._comm.follow(self)
        return self

    @property
    def is_over(self) -> bool:
        """True if all parts were waited for, or seen to be over."""
        return not self._works and not self._steps and not self._is_moving

    @property
    def is_behind(self) -> bool:
        """True if others may wait for a part that this rank can start without any order."""
        if self._is_moving:
            return False  # a wait for its own works asks
        for step in self._steps:
            if step.in_order:
                return False
            if step.communicates:
                return True
        return False

    def catch_up(self) -> None:
        """Wait for what precedes the parts that this rank can start in any order; start them."""
        while self.is_behind:
            self._move_on()

    def poll(self) -> bool:
        """Move on where that takes no waiting and no order among ranks; return whether it is over.

        That is as far as can be told without waiting: see `Comm.observes_completion`.
        """
        if self._is_moving:
            return False
        while all(work.is_completed() for work in self._works):
            if self.is_over:
                return True
            if self._steps and self._steps[0].in_order:
                return False
            self._move_on()
        return False

    def advance(self) -> None:
        """Wait for what precedes the next part that ranks start in one order, and start that."""
        while any(step.in_order for step in self._steps):
            is_started = self._steps[0].in_order
            self._move_on()
            if is_started:
                return

    def wait(self) -> None:
        """Wait for all parts."""
        while self._works or self._steps:
            self._move_on()

    def _move_on(self) -> None:
        """Finish this part, and start the next one: its own steps come before those left here."""
        self.num_moves += 1
        self._is_moving = True
        try:
            works = self._works
            self._works = []
            if works:
                self._comm.wait_for(works, self._issued)
            if not self._steps:
                return
            following = self._steps.popleft().start()
            if following is not None:
                self._works = following._works
                self._issued = following._issued or self._issued
                self._steps.extendleft(reversed(following._steps))
        finally:
            self._is_moving = False


class Chains:
    """The handles of a rank that may have parts to start in any order. See [Note: chains]."""

    def __init__(self) -> None:
        self._handles: list[weakref.ref[Handle]] = []

    def add(self, handle: Handle) -> None:
        """Look after a handle until it is over, or nobody has it."""
        self._handles.append(weakref.ref(handle))

    def poll(self) -> None:
        """Start what can be started without waiting."""
        for handle in self._under_way():
            if handle.is_behind:
                handle.poll()

    def catch_up(self) -> None:
        """Start all that can be started without an order among ranks; wait as needed."""
        for handle in self._under_way():
            handle.catch_up()

    def _under_way(self) -> list[Handle]:
        """Return what is not over, the oldest first, and forget the others."""
        if not self._handles:
            return []
        alive = [handle for reference in self._handles if (handle := reference()) is not None]
        under_way = [handle for handle in alive if not handle.is_over]
        self._handles = [weakref.ref(handle) for handle in under_way]
        return under_way
