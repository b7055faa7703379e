"""End the ranks of a host before they take more memory than it has, or than their job may have.

A kernel without memory kills whom it likes, after a while in which nothing on the host moves. A job
holds all that it needs by the end of its second step, since the first one ends with making the
optimizer's states: the host is watched until then. `limits.memory` is a promise for all of the run,
and is watched until its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from zrun_core.sizes import format_size
from zrun_core.spine import memory_limits

_MOST_KEPT = 256 << 20  # bytes that are left when it is over; less where there is little
_FILLED_PER_CORE = 4e9  # bytes per second that a core takes at most: pages are cleared for it
# Heaps have holes that no plan knows, and the second step is measured, which takes some.
_TOLERATED = 1.1  # of limits.memory
_TOLERATED_PER_RANK = 128 << 20  # bytes beyond that
_SHORTEST_S = 0.02  # between two looks
_LONGEST_S = 0.5


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

    def shortage(self, now: float, pids: Iterable[int]) -> str:
        """Say why the ranks must end; "" if there is enough, or it is not yet time to look.

        Args:
            now: seconds of the clock that `patience` is asked with.
            pids: of the ranks.
        """
        if now < self._look_at:
            return ""
        left = memory_limits.host_available(swap=True)
        if left < self._kept and not self._has_settled:
            return f"{format_size(left)} were left on this host"
        left -= self._kept
        if self._most is not None:
            ranks = [*pids]
            held = memory_limits.resident_bytes(ranks)
            bound = round(_TOLERATED * self._most) + _TOLERATED_PER_RANK * len(ranks)
            if held > bound:
                return (
                    f"ranks of this host held {format_size(held)}, and limits.memory is "
                    f"{format_size(self._most)}"
                )
            left = min(left, bound - held)
        wait_s = _LONGEST_S
        if not self._has_settled:
            # No sooner can what is left be filled.
            wait_s = min(wait_s, max(_SHORTEST_S, left / self._filled_per_s))
        self._look_at = now + wait_s
        return ""
