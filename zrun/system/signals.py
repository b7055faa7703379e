"""Signals that reach the launcher, and what they ask for.

While no rank trains, the first one ends the launch (`stoppable`): what was started is cleaned away.
While ranks train, they are counted (`LauncherSignals`) for `zrun.launch.supervise` to act on.

    level 1  the first signal         finish the step, save and end
    level 2  the second, or --now     stop the workers at once
    level 3  the third                kill them
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from zrun_core.errors import ExitCode, StoppedError
from zrun_core.spine.stop_signals import PROFILE, SAVE

STOP_NOW = signal.SIGRTMIN  # from `zrun stop --now`


def stop_signals() -> list[int]:
    """Return the signals that ask the launcher to end."""
    found: list[int] = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, STOP_NOW]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup wants it to stay ignored
        found.append(signal.SIGHUP)
    return found


def name_of(number: int) -> str:
    """Return the name by which a person knows a signal that asks for the end."""
    if number == STOP_NOW:
        return "zrun stop --now"
    return signal.Signals(number).name


class LauncherSignals:
    """Signals that came while ranks train: counted in handlers, and acted on by the supervisor.

    Attributes:
        first: the one that came first.
        first_at: unix seconds at which it came.
        level: 0 none; 1 finish the step and save; 2 now; 3 kill. Only SIGINT and SIGTERM go beyond
            1: a closing terminal and a scheduler warn more than once.
        forced_at: unix seconds at which level 2 was reached.
        wants_save: `zrun save` asked, which the supervisor has not seen yet. It asks for no end.
        wants_profile: the same of `zrun profile`.
        wants_pause: the terminal asked (ctrl-Z), which the supervisor has not seen yet.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.first_at: float | None = None
        self.level = 0
        self.forced_at: float | None = None
        self.wants_save = False
        self.wants_profile = False
        self.wants_pause = False
        self._num_firm = 0  # SIGINT and SIGTERM so far

    def force(self) -> None:
        """Go to level 2: what was asked for gently is wanted at once."""
        self.level = max(self.level, 2)
        self._num_firm = max(self._num_firm, 2)
        self.forced_at = self.forced_at or time.time()

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Count signals inside.

        After it they have their former handlers again; they are ignored if one has come, because
        impatient ones must not cut the last words short.
        """
        before = {number: signal.signal(number, self.on_stop) for number in stop_signals()}
        signal.signal(SAVE, self.on_save)
        signal.signal(PROFILE, self.on_profile)
        pausing = signal.getsignal(signal.SIGTSTP)
        if pausing is signal.SIG_DFL:  # a shell without job control ignores it
            signal.signal(signal.SIGTSTP, self.on_pause)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, pausing)
            signal.signal(SAVE, signal.SIG_IGN)
            signal.signal(PROFILE, signal.SIG_IGN)
            for number, handler in before.items():
                signal.signal(number, handler if self.first is None else signal.SIG_IGN)

    def on_stop(self, number: int, _: object = None) -> None:
        """Count a signal that asks for the end. A handler."""
        self.first = self.first or signal.Signals(number)
        self.first_at = self.first_at or time.time()
        if number == STOP_NOW:  # level 2, whatever came before and however often it comes
            self.force()
            return
        if number in (signal.SIGINT, signal.SIGTERM):
            self._num_firm += 1
        self.level = max(1, self._num_firm)
        if self.level > 1:
            self.forced_at = self.forced_at or time.time()

    def on_save(self, number: int, _: object = None) -> None:
        """Take in a request to save. A handler."""
        self.wants_save = True

    def on_profile(self, number: int, _: object = None) -> None:
        """Take in a request for a profile. A handler."""
        self.wants_profile = True

    def on_pause(self, number: int, _: object = None) -> None:
        """Take in ctrl-Z. A handler."""
        self.wants_pause = True


@contextmanager
def stoppable(when: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """Raise `StoppedError` inside at the first signal; later ones are ignored.

    Cleaning up belongs inside: further signals cannot cut it short there. A request to save or
    to profile is ignored too, from here until ranks train or the process ends.

    Args:
        when: the end of the error's line, asked for when the signal comes.

    Yields:
        A function that makes signals count again which `ignore` has silenced.
    """
    signal.signal(SAVE, signal.SIG_IGN)
    signal.signal(PROFILE, signal.SIG_IGN)
    before = {number: signal.getsignal(number) for number in stop_signals()}

    def end(number: int, _: FrameType | None) -> None:
        ignore()
        code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED
        raise StoppedError(f"{name_of(number)}: stopped {when()}", code)

    def arm() -> None:
        for number in before:
            signal.signal(number, end)

    arm()
    try:
        yield arm
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:  # else the process is about to end
                signal.signal(number, handler)


@contextmanager
def held() -> Iterator[None]:
    """Hold signals that ask for the end back until the end of the block.

    What is started inside is then in the hands that clean it away.
    """
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in came:
        signal.raise_signal(number)


def ends_with_parent(turn: Callable[[], None]) -> Callable[[], None]:
    """Return `turn`, made to raise SIGTERM here if the parent of this process has ended."""
    parent = os.getppid()

    def watched() -> None:
        nonlocal parent
        if os.getppid() != parent:
            parent = os.getppid()
            signal.raise_signal(signal.SIGTERM)
        turn()

    return watched


def ignore() -> None:
    """Ignore what asks for the end from now on: it must not cut the last words short."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
