"""Whether a run that failed is started again, and when. Pure."""

from __future__ import annotations

from zrun.launch.failures import Failure, Hang, LostHost

_PAUSES_S = (5.0, 10.0, 20.0)  # the last one is that of every later restart


class Restarts:
    """The budget of a run, over all hosts.

    What would only happen again is not tried again: a mistake in the job, an exception, numbers that went wrong. A
    restart after which nothing new was committed counts twice.

    Attributes:
        made: restarts so far.
    """

    def __init__(self, budget: int) -> None:
        self.made = 0
        self._left = self.budget = budget
        self._committed: int | None = None

    def after(self, failure: Failure | Hang | LostHost | None, committed: int) -> float | None:
        """Seconds to wait before the run goes on; None: it does not.

        Args:
            committed: the newest step that was saved; 0: none.
        """
        if failure is None or not _is_accident(failure):
            return None
        cost = 2 if self.made and committed == self._committed else 1
        if self._left < cost:
            return None
        self._left -= cost
        self._committed = committed
        self.made += 1
        return _PAUSES_S[min(self.made, len(_PAUSES_S)) - 1]


def _is_accident(failure: Failure | Hang | LostHost) -> bool:
    """Whether it came from outside of the training itself."""
    if isinstance(failure, Failure):
        return failure.note.is_echo if failure.note is not None else failure.end.signal is not None
    return True
