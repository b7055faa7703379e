"""Who computes what next: the shares of a window of steps, dealt out to ranks that do not wait.

A step's samples are divided as everywhere: one share for each rank. Here whoever is free takes the
next one, of the oldest step that has any left, its own if that is still there. So a slow rank takes
fewer, and each sample is computed once.

    4 shares of 2 ranks, of which rank 1 is slow            step 0   step 1
    rank 0    takes 0.0 pushes  takes 1.0 pushes  takes 1.1     0 1      0 0
    rank 1    takes 0.1 ................................ pushes

A rank's clock is the number of its pushes in this window (Ho et al. 2013, "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server"). It goes on while it is no more
than `staleness` ahead of the slowest. With 0 all ranks take their own share of each step, and none
begins the next one before all have pushed. Pure.
"""

from __future__ import annotations

from typing import NamedTuple


class Share(NamedTuple):
    """What a rank computes before it pushes.

    Attributes:
        step: of the window, from 0.
        part: of the step's samples, that of the rank of this number where each takes its own.
    """

    step: int
    part: int


class Shares:
    """The shares of one window.

    Attributes:
        clocks: by rank, its pushes.
        num_steps: of the window; fewer once it is to end early.
        at_work: ranks that have a share and have not pushed it.
    """

    def __init__(self, num_steps: int, num_ranks: int, staleness: int | None) -> None:
        """
        Args:
            staleness: pushes that a rank may be ahead of the slowest; None: any number.
        """
        self.clocks = [0] * num_ranks
        self.num_steps = num_steps
        self.at_work: set[int] = set()
        self._left = [set(range(num_ranks)) for _ in range(num_steps)]
        self._num_ranks = num_ranks
        self._staleness = staleness

    def take(self, rank: int) -> Share | None:
        """Return the next share for `rank`, once it `may_go_on`; None: there is none left."""
        for step, left in enumerate(self._left[: self.num_steps]):
            if left:
                part = rank if rank in left else min(left)
                left.remove(part)
                self.at_work.add(rank)
                return Share(step, part)
        return None

    def push(self, rank: int) -> None:
        """Count a push."""
        self.clocks[rank] += 1
        self.at_work.discard(rank)

    def lead(self, rank: int) -> int:
        """Return how many pushes `rank` is ahead of the slowest."""
        return self.clocks[rank] - min(self.clocks)

    @property
    def slowest(self) -> int:
        """The rank that others wait for, if any do: of those at work, that with the least clock."""
        return min(self.at_work, key=lambda rank: (self.clocks[rank], rank), default=0)

    def may_go_on(self, rank: int) -> bool:
        """Return whether `rank` may begin another share, or need not wait for one.

        Where none is left, the slowest may have none either, and its clock stands still.
        """
        is_within = self._staleness is None or self.lead(rank) <= self._staleness
        return is_within or not any(self._left[: self.num_steps])

    @property
    def is_pushed(self) -> bool:
        """True once every share of the window was pushed."""
        return sum(self.clocks) == self.num_steps * self._num_ranks

    def end_soon(self) -> None:
        """End the window with the last step of which a share was taken."""
        begun = [step for step, left in enumerate(self._left) if len(left) < self._num_ranks]
        self.num_steps = min(self.num_steps, begun[-1] + 1 if begun else 0)
