"""Signals that ask a rank to stop, or to go on and save or profile: all after the same step.

A handler only takes a note. The trainer sends it along in the step's one small message, so that
every rank learns of it at the same step, whichever of them the signal reached.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from zrun_core.errors import ExitCode

# Save at the end of this step. The signal before it ends a launcher (`zrun stop --now`).
SAVE = signal.SIGRTMIN + 1
PROFILE = signal.SIGRTMIN + 2  # trace the next steps, as `spine/profile_request.py` has it
TESTIFY = signal.SIGRTMIN + 3  # write down what holds memory: see `guards/memory_witness.py`
_FIRM = (signal.SIGINT, signal.SIGTERM)
# Of a scheduler, of the launcher, of a terminal.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class StopSignals:
    """The requests that this process got by signals.

    Attributes:
        first: the signal that came first, of those that ask for the end.
        can_finish: whether there are steps to finish; before that, and from the second SIGINT or
            SIGTERM on, the process ends at once.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.can_finish = False
        self._num_firm = 0
        self._wants_save = False
        self._wants_profile = False
        self._pid = os.getpid()

    def listen(self) -> None:
        """Take over from the default handlers. Only the main thread may."""
        for number in (*_FIRM, *_WARNINGS):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)
        signal.signal(SAVE, self._note_save)
        signal.signal(PROFILE, self._note_profile)

    def ignore(self) -> None:
        """Ignore all signals from now on: the process is about to end by itself."""
        for number in (*_FIRM, *_WARNINGS, SAVE, PROFILE):
            signal.signal(number, signal.SIG_IGN)

    def take_save(self) -> bool:
        """Return whether a save was asked for since the last call."""
        if not self._wants_save:
            return False
        # A signal between these two lines asks for the same save.
        self._wants_save = False
        return True

    def take_profile(self) -> bool:
        """Return whether a profile was asked for since the last call."""
        asked, self._wants_profile = self._wants_profile, False
        return asked

    @property
    def exit_code(self) -> ExitCode:
        """Return the exit code of an end without a save."""
        return ExitCode.INTERRUPTED if self.first == signal.SIGINT else ExitCode.TERMINATED

    def _note_save(self, number: int, _: FrameType | None) -> None:
        self._wants_save = True

    def _note_profile(self, number: int, _: FrameType | None) -> None:
        self._wants_profile = True

    def _note(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked helper: it is not the one to finish a step
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.first = self.first or signal.Signals(number)
        if number in _FIRM:
            self._num_firm += 1
        if self._num_firm > 1 or not self.can_finish:
            os._exit(self.exit_code)
