"""Clocks and deadlines of the launcher: without what it slept through, and with room for a save."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an agent is there sooner without pydantic
    from zrun_core.spine.sections.guards import LimitsConfig

_NAP_S = 2.0  # between two readings; longer ones mean that the process stood still


class AwakeClock:
    """Seconds that this process was running, read at least once every `_NAP_S` seconds.

    A process that is stopped (ctrl-Z, SIGSTOP), swapped out, or on a host that is suspended finds
    on waking that every deadline has passed, before it has read what others said meanwhile. By
    this clock a pause lasts `_NAP_S` at most.

        true time   0.0  0.1  [stopped: 60 s]  60.1  60.2
        this clock  0.0  0.1                    2.1   2.2
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


class StopDeadline:
    """The time that a run has to end: `limits.stop_s`, longer while it saves.

    A save may take `limits.save_s`; the run then has `limits.stop_s` again from its end on.

    Attributes:
        was_due: `limits.stop_s` have passed; only a save has put off the end since.
    """

    def __init__(self, now: float, limits: LimitsConfig, more_s: float = 0.0) -> None:
        """Begin to count.

        Args:
            now: seconds, by any clock that `is_over` is told too.
            more_s: seconds beyond each of the limits.
        """
        self._stop_s = limits.stop_s + more_s
        self._due = now + self._stop_s
        self._until = self._due
        self._save_until = now + limits.save_s + more_s
        self.was_due = False

    def is_over(self, now: float, *, saves: bool) -> bool:
        """Return whether the time is over at `now`; `saves`: a rank is saving right now."""
        if saves:
            self._until = max(self._until, min(now + self._stop_s, self._save_until))
        self.was_due |= now > self._due
        return now > self._until
