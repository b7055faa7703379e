"""The silence of a launcher on another host, which an agent takes for its end after a while."""

from __future__ import annotations

from zrun.system.deadlines import AwakeClock
from zrun.transport.frames import ORPHAN_S, SILENCE_S, StopMode


class LauncherSilence:
    """The time since the launcher's last word, and since the ranks last made progress.

    Both by the clock of a process that may have stood still itself.
    """

    def __init__(self) -> None:
        self._clock = AwakeClock()
        self._heard = self._clock()
        self._moved = self._heard
        self._progress: object = None
        self._is_on_hold = False
        self._is_finishing = False

    @property
    def seconds(self) -> float:
        """Return the seconds since the launcher's last word."""
        return self._clock() - self._heard

    def hear(self) -> None:
        """Note a word of the launcher."""
        self._heard = self._clock()
        self._is_on_hold = False

    def hold(self) -> None:
        """Note that it said that it will be silent."""
        self._is_on_hold = True

    def restart(self) -> None:
        """Count from now on: the ranks have just been started."""
        self._heard = self._clock()
        self._moved = self._heard

    def note_progress(self, progress: object) -> None:
        """Note where the ranks are; they move as long as that changes."""
        if progress != self._progress:
            self._progress = progress
            self._moved = self._clock()

    def demands(self) -> StopMode | None:
        """Return how the ranks must end now for want of a launcher; None: they may go on.

        Ranks that make progress reach those of all other hosts. So it is the launcher that stands
        still or is gone, and not the network: they have more time (`ORPHAN_S`), and may save.
        """
        silent_s = self.seconds
        still_s = self._clock() - self._moved
        if self._is_on_hold or silent_s <= SILENCE_S:
            return None
        if still_s > SILENCE_S or silent_s > 2 * ORPHAN_S:
            return StopMode.NOW
        if silent_s > ORPHAN_S and not self._is_finishing:
            self._is_finishing = True
            return StopMode.FINISH
        return None
