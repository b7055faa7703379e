"""Signals that reach the launcher while no rank trains: whatever was started is cleaned away, and it ends.

While ranks train, `zrun.launch.supervise.LauncherSignals` counts them instead.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from zrun_core.errors import ExitCode, StoppedError
from zrun_core.spine.stop_signals import SAVE

STOP_NOW = signal.SIGRTMIN  # from `zrun stop --now`


def numbers() -> list[int]:
    """Those that ask the launcher to end."""
    found: list[int] = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, STOP_NOW]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup wants it to stay ignored
        found.append(signal.SIGHUP)
    return found


def name_of(number: int) -> str:
    """What a person calls a signal that asks for the end."""
    return "zrun stop --now" if number == STOP_NOW else signal.Signals(number).name


@contextmanager
def stoppable(when: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """The first signal raises `StoppedError`, with a line that ends in `when()`; later ones change nothing any more.

    Cleaning up belongs inside: nobody who keeps on pressing can cut it short there. What is handed out makes signals
    count again that `ignore` has silenced. A request to save means nothing now, and until the process ends: unless
    ranks train.
    """
    signal.signal(SAVE, signal.SIG_IGN)
    before = {number: signal.getsignal(number) for number in numbers()}

    def end(number: int, _: FrameType | None) -> None:
        ignore()
        by_hand = number == signal.SIGINT
        raise StoppedError(
            f"{name_of(number)}: stopped {when()}",
            ExitCode.INTERRUPTED if by_hand else ExitCode.TERMINATED,
        )

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


def ends_with_parent(turn: Callable[[], None]) -> Callable[[], None]:
    """`turn`, which looks too whether the process that started this one has ended: that is a SIGTERM then."""
    parent = os.getppid()

    def watched() -> None:
        nonlocal parent
        if os.getppid() != parent:
            parent = os.getppid()
            signal.raise_signal(signal.SIGTERM)
        turn()

    return watched


def ignore() -> None:
    """What comes now must not cut the last words short."""
    for number in numbers():
        signal.signal(number, signal.SIG_IGN)
