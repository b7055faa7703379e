"""Signals that ask a rank to end, after the step and all ranks at the same one, or to save after it and go on.

A handler only takes a note. The trainer sends it along in the step's one small message, so that every rank learns of it
at the same step, whichever of them the signal reached.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from zrun_core.errors import ExitCode

SAVE = (
    signal.SIGRTMIN + 1
)  # save at the end of this step; the one before it ends a launcher (`zrun stop --now`)
_FIRM = (signal.SIGINT, signal.SIGTERM)
_WARNINGS = (
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
)  # of a scheduler, of the launcher, of a terminal


class StopSignals:
    """What this process was asked by signals.

    Attributes:
        first: the signal that came first, of those that ask for the end.
        can_finish: whether there are steps to finish; before that, and from the second SIGINT or SIGTERM on, the
            process ends at once.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.can_finish = False
        self._num_firm = 0
        self._wants_save = False
        self._pid = os.getpid()

    def listen(self) -> None:
        """Take over from the default handlers. Only the main thread may."""
        for number in (*_FIRM, *_WARNINGS):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)
        signal.signal(SAVE, self._note_save)

    def ignore(self) -> None:
        """From now on the process ends by itself, whatever comes."""
        for number in (*_FIRM, *_WARNINGS, SAVE):
            signal.signal(number, signal.SIG_IGN)

    def take_save(self) -> bool:
        """Whether a save was asked for since the last call."""
        if not self._wants_save:
            return False
        self._wants_save = (
            False  # what comes between these two lines is asked for with the same save
        )
        return True

    @property
    def exit_code(self) -> ExitCode:
        """How to end where nothing was saved."""
        return ExitCode.INTERRUPTED if self.first == signal.SIGINT else ExitCode.TERMINATED

    def _note_save(self, number: int, _: FrameType | None) -> None:
        self._wants_save = True

    def _note(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked helper: it is not the one to finish a step
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.first = self.first or signal.Signals(number)
        self._num_firm += number in _FIRM
        if self._num_firm > 1 or not self.can_finish:
            os._exit(self.exit_code)
