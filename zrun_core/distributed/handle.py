"""Communication in flight, as a chain of parts that follow each other.

[Note: chains]
What was issued may have to be followed by more: sums, once the parts have arrived, or a reduction
over another group. A gradient of hybrid sharding is such a chain of three messages:

    part            works in flight         what follows it
    1               reduce-scatter          add up the parts that arrived
    2               exchange of slices      add up the parts that arrived      `then`, over the
    3               exchange of sums                                           replicate group

Among ranks that exchange pairwise each message finds its own receiver, so `Handle.poll` starts what
follows as soon as it sees that it can, which is so through memory. Backends instead pair up what
all ranks issue one after the other, and a part is over earlier on one rank than on another; and
messages through sockets do not say that they are over. There only `advance` and `wait` start what
follows, and all ranks call them at the same points of what they issue.

                    waits for works     starts a part of any order     starts a part in order
    poll()          no                  once it sees the end           no: returns False
    advance()       yes, as needed      on the way                     one
    wait()          yes                 all                            all
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from zrun_core.distributed.transport import Group, Work


class Waiter(Protocol):
    """The part of `Comm` that a handle needs."""

    def wait_for(self, works: Sequence[Work]) -> None: ...

    def observes_completion(self, group: Group) -> bool: ...


class _Step(NamedTuple):
    """The part that follows, which may be communication itself.

    Attributes:
        in_order: all ranks must start it at the same point of what they issue.
    """

    start: Callable[[], Handle | None]
    in_order: bool


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
        self.num_moves = 0
        self._works = list(works)
        self._steps: deque[_Step] = deque()
        if then is not None:
            self._steps.append(_Step(then, in_order=False))

    def then(self, start: Callable[[], Handle | None], over: Group) -> Handle:
        """Let `start` follow, which communicates over group `over`; return this handle.

        It starts at once where there is nothing to wait for.
        """
        self._steps.append(_Step(start, in_order=not self._comm.observes_completion(over)))
        while self._steps and not self._works:
            self._move_on()
        return self

    @property
    def is_over(self) -> bool:
        """True if all parts were waited for, or seen to be over."""
        return not self._works and not self._steps

    def poll(self) -> bool:
        """Move on where that takes no waiting and no order among ranks; return whether it is over.

        That is as far as can be told without waiting: see `Comm.observes_completion`.
        """
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
        works = self._works
        self._works = []
        if works:
            self._comm.wait_for(works)
        if not self._steps:
            return
        following = self._steps.popleft().start()
        if following is not None:
            self._works = following._works
            self._steps.extendleft(reversed(following._steps))
