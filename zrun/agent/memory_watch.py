"""Do the ranks of a host take more memory than it has, or than their job may have?

A kernel without memory kills whom it likes, after a while in which nothing on the host moves. What a job needs it has
by the end of its second step, since the first one ends with making the optimizer's states: after that nobody looks at
the host any more. `limits.memory` is a promise for all of the run, and is looked after until its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from zrun_core.spine import memory_limits
from zrun_core.spine.sizes import format_size

_MOST_KEPT = 256 << 20  # bytes that are left when it is over; less where there is little
_FILLED_PER_CORE = 4e9  # bytes per second that a core takes at most: pages are cleared for it
# Of what a job may take, and bytes of each rank beyond that: heaps have holes that no plan knows, and the second step
# is measured, which takes some.
_TOLERATED, _BESIDE = 1.1, 128 << 20
_SHORTEST_S, _LONGEST_S = 0.02, 0.5  # between two looks


class MemoryWatch:
    """Looks the more often, the less there is: hardly anything is missed, and a host with room to spare is left alone.

    Args:
        most: bytes that the ranks may take together; None: what the host has.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._kept = min(_MOST_KEPT, memory_limits.host_total() // 100)
        self._filled_per_s = _FILLED_PER_CORE * min(16, len(os.sched_getaffinity(0)))
        self._look_at = 0.0
        self._has_settled = False

    def settle(self) -> bool:
        """The ranks hold all that they need. Whether there is still something to look after."""
        self._has_settled = True
        return self._most is not None

    def patience(self, now: float) -> float:
        """Seconds until there is something to look at."""
        return max(0.0, self._look_at - now)

    def shortage(self, now: float, pids: Iterable[int]) -> str:
        """Why no more may be taken, in words; "": there is enough, or nobody has looked.

        Args:
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
            held, bound = (
                memory_limits.resident_bytes(ranks),
                round(_TOLERATED * self._most) + _BESIDE * len(ranks),
            )
            if held > bound:
                return f"ranks of this host held {format_size(held)}, and limits.memory is {format_size(self._most)}"
            left = min(left, bound - held)
        wait_s = max(_SHORTEST_S, left / self._filled_per_s)
        self._look_at = now + (_LONGEST_S if self._has_settled else min(_LONGEST_S, wait_s))
        return ""
