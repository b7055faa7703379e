"""End the ranks of a host before they take more memory than it has, or than their job may have.

A kernel without memory kills whom it likes, after a while in which nothing on the host moves. A job
holds all that it needs by the end of its second step, since the first one ends with making the
optimizer's states: the host is watched until then. `limits.memory` is a promise for all of the run,
and is watched until its end: who grows beyond it later, by an evaluation, a hook or a leak, may
finish the step and save, unless it grows on. What lies beside steps, as a hook does, may grow more
before that: nobody could plan it, and it is over soon.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zrun_core.sizes import format_size
from zrun_core.spine import memory_limits

_MOST_KEPT = 256 << 20  # bytes that are left when it is over; less where there is little
_FILLED_PER_CORE = 4e9  # bytes per second that a core takes at most: pages are cleared for it
# Heaps have holes that no plan knows, and the second step is measured, which takes some.
_TOLERATED = 1.1  # of limits.memory
_TOLERATED_PER_RANK = 128 << 20  # bytes beyond that
_WHILE_SAVING = 1.25  # of what is tolerated, for ranks that were asked to finish
_BESIDE_STEPS = 2.0  # in a hook, an evaluation, a profile or a save, if the host has it
_SHORTEST_S = 0.02  # between two looks
_LONGEST_S = 0.5


@dataclass(frozen=True)
class Shortage:
    """Ranks take more memory than there is for them.

    Attributes:
        text: what was seen.
        may_finish: they may end after their step, and save; else they must be killed.
    """

    text: str
    may_finish: bool = False


class MemoryWatch:
    """Looks at a host's memory, the more often the less is left."""

    def __init__(self, most: int | None) -> None:
        """Begin to watch.

        Args:
            most: bytes that the ranks may take together (limits.memory); None: what the host has.
        """
        self._most = most
        self._kept = min(_MOST_KEPT, memory_limits.host_total() // 100)
        self._filled_per_s = _FILLED_PER_CORE * min(16, len(os.sched_getaffinity(0)))
        self._look_at = 0.0
        self._has_settled = False
        self._was_asked = False  # the ranks, to finish

    def settle(self) -> bool:
        """Stop watching the host: the ranks hold all that they need.

        Returns:
            whether limits.memory is still to be watched.
        """
        self._has_settled = True
        return self._most is not None

    def patience(self, now: float) -> float:
        """Return the seconds until the next look."""
        return max(0.0, self._look_at - now)

    def look(
        self, now: float, pids: Iterable[int], is_beside_steps: Callable[[], bool] = lambda: False
    ) -> Shortage | None:
        """Return why the ranks must end; None if there is enough, or it is not yet time to look.

        A shortage after which they may finish is returned once.

        Args:
            now: seconds of the clock that `patience` is asked with.
            is_beside_steps: returns whether ranks do something beside steps now, such as a hook.
        """
        if now < self._look_at:
            return None
        left = memory_limits.host_available(swap=True)
        if left < self._kept and not self._has_settled:
            return Shortage(f"{format_size(left)} were left on this host")
        left -= self._kept
        if self._most is not None:
            ranks = [*pids]
            bound = round(_TOLERATED * self._most) + _TOLERATED_PER_RANK * len(ranks)
            held = memory_limits.resident_bytes(ranks)
            if held > bound:  # what they share was counted for each: look closer
                held = memory_limits.held_together(ranks)
            excess = self._excess(held, bound, lambda: left > 0 and is_beside_steps())
            if excess is not None:
                return excess
            left = min(left, bound - held)
        wait_s = _LONGEST_S
        if not self._has_settled:
            # No sooner can what is left be filled.
            wait_s = min(wait_s, max(_SHORTEST_S, left / self._filled_per_s))
        self._look_at = now + wait_s
        return None

    def can_wait(self) -> bool:
        """Return whether the host has memory left for ranks that say what they hold."""
        return memory_limits.host_available(swap=True) > self._kept // 2

    def _excess(self, held: int, bound: int, may_take_more: Callable[[], bool]) -> Shortage | None:
        """Judge what the ranks hold by what limits.memory tolerates.

        `may_take_more` tells whether they do what may take more than steps for a while.
        """
        assert self._most is not None
        may_finish = self._has_settled and held <= _WHILE_SAVING * bound
        if self._has_settled and bound < held <= _BESIDE_STEPS * bound and not may_finish:
            may_finish = may_take_more()
        if held <= bound or (may_finish and self._was_asked):
            return None
        self._was_asked = True
        limit = format_size(self._most)
        text = f"ranks of this host held {format_size(held)}, and limits.memory is {limit}"
        return Shortage(text, may_finish)
