"""Time as a process lived it: silence that it slept through says nothing of others."""

from __future__ import annotations

import time
from collections.abc import Callable

_NAP_S = 2.0  # between two readings; longer ones mean that the process stood still


class AwakeClock:
    """Seconds that this process was running, read at least once every `_NAP_S` seconds.

    A process that is stopped (ctrl-Z, SIGSTOP), swapped out, or on a host that is suspended finds on waking that every
    deadline has passed, before it has read what others said meanwhile. By this clock a pause lasts `_NAP_S` at most.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_at = clock()
        self._slept = 0.0

    def __call__(self) -> float:
        """Return the seconds, from an arbitrary start."""
        now = self._clock()
        self._slept += max(0.0, now - self._read_at - _NAP_S)
        self._read_at = now
        return now - self._slept
