"""The decision to start a run again that failed, and after which pause."""

from __future__ import annotations

from zrun.launch.failures import Failure, Hang, LostHost

_PAUSES_S = (5.0, 10.0, 20.0)  # the last one is that of every later restart


class Restarts:
    """The restarts that a run has left, over all hosts.

    Only accidents are tried again: a mistake in the job, an exception or numbers that went wrong
    would be the same next time. A restart after which nothing new was committed counts twice.

    Of a script nobody knows what it saves, and an exception may be an accident: each failure is
    tried again, as torchrun does.

    Attributes:
        made: restarts so far.
    """

    def __init__(self, budget: int, *, is_script: bool = False) -> None:
        self._is_script = is_script
        self.made = 0
        self.budget = budget
        self._left = budget
        self._committed: int | None = None

    def after(self, failure: Failure | Hang | LostHost | None, committed: int) -> float | None:
        """Return the seconds to wait before the run is started again; None: it is not.

        Args:
            failure: of the last attempt; None: it ended well, or was asked to.
            committed: the newest step that was saved; 0: none.
        """
        if failure is None or not (self._is_script or _is_accident(failure)):
            return None
        has_saved_nothing = self.made > 0 and committed == self._committed and not self._is_script
        cost = 2 if has_saved_nothing else 1
        if self._left < cost:
            return None
        self._left -= cost
        self._committed = committed
        self.made += 1
        return _PAUSES_S[min(self.made, len(_PAUSES_S)) - 1]


def _is_accident(failure: Failure | Hang | LostHost) -> bool:
    """Return whether the cause lies outside of the training itself."""
    if not isinstance(failure, Failure):
        return True  # a hang or a lost host
    if failure.fault is not None and failure.fault.fault.is_fatal:
        return True
    if failure.note is None:
        return failure.end.signal is not None
    return failure.note.is_echo  # the rank only felt the end of another
