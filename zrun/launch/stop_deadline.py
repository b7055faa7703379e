"""How long a run may take to end once it was asked to: the launcher asks, and whoever waits for the launcher."""

from __future__ import annotations

from zrun_core.spine.config import LimitsConfig


class StopDeadline:
    """`limits.stop_s`, which count anew from the end of a save, for which there are `limits.save_s`.

    Attributes:
        was_due: `limits.stop_s` have passed; only a save has kept the run from being over since.
    """

    def __init__(self, now: float, limits: LimitsConfig, more_s: float = 0.0) -> None:
        """
        Args:
            now: seconds, by any clock that `is_over` is told too.
            more_s: beyond each of the limits.
        """
        self._stop_s = limits.stop_s + more_s
        self._due = self._until = now + self._stop_s
        self._save_until = now + limits.save_s + more_s
        self.was_due = False

    def is_over(self, now: float, *, saves: bool) -> bool:
        """Whether the time is over; `saves`: a rank is saving right now."""
        if saves:
            self._until = max(self._until, min(now + self._stop_s, self._save_until))
        self.was_due |= now > self._due
        return now > self._until
