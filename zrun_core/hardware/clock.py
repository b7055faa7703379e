"""Times on a device's own clock: where in its work something begins, ends and is waited for.

[Note: times of a stream]
The host of an accelerator runs ahead of it, so that its clock says when work was queued. There a
mark is an event in the stream: the device notes when it comes by. What lies between two marks is
known once the stream has passed both, and nobody waits for that: times of a step are read with the
step's totals, which arrive behind them.

    stream   forward | NCCL is not done yet | forward ...
             begin --^                end --^                `Waits` count what lies between

On a CPU a mark is what the host's clock says, and everything is known at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from zrun_core.hardware.accelerator import TimingEvent, is_accelerator

Mark = float | TimingEvent

_LOOK_EVERY = 64  # stretches, after which those that have passed are added up
_MOST_UNPASSED = 1024  # as far as a host runs ahead: drivers queue no more


def mark(device: torch.device) -> Mark:
    """Return where the work that this thread gives to `device` is now."""
    if is_accelerator(device):
        return TimingEvent(device)
    return time.perf_counter()


def seconds_between(begin: Mark, end: Mark) -> float:
    """Return the seconds between two marks of a device, once it has passed the later one."""
    if isinstance(begin, TimingEvent) and isinstance(end, TimingEvent):
        end.wait_on_host()
        return begin.seconds_until(end)
    assert isinstance(begin, float), "a mark of another device"
    assert isinstance(end, float), "a mark of another device"
    return end - begin


def is_passed(mark: Mark) -> bool:
    """Return whether a device has come by a mark."""
    return not isinstance(mark, TimingEvent) or mark.is_completed()


class Stretch(NamedTuple):
    """What lies between two marks of a device."""

    begin: Mark
    end: Mark


class Unpassed:
    """Stretches that a device has not passed: one thread adds them, another one looks.

    On a CPU all have been passed when they are known.
    """

    def __init__(self) -> None:
        self._stretches: deque[Stretch] = deque(maxlen=_MOST_UNPASSED)

    def add(self, stretch: Stretch) -> None:
        """Look after a stretch from now on."""
        self._stretches.append(stretch)

    def current(self) -> Stretch | None:
        """Return the stretch in which the device is; None: it is in none, as far as is known."""
        while self._stretches:
            oldest = self._stretches[0]
            if not is_passed(oldest.end):
                return oldest if is_passed(oldest.begin) else None
            self._stretches.popleft()
        return None


class Waits:
    """Seconds for which a device waited, as the sum of stretches between two marks.

    A stretch that the stream has not passed yet is held with its marks. It is added up when it has,
    so that these are never more than the host runs ahead.
    """

    def __init__(self, device: torch.device, unpassed: Unpassed | None = None) -> None:
        """Count from now on.

        Args:
            unpassed: that each stretch is added to, for who looks where the device is.
        """
        self._device = device
        self._unpassed = unpassed
        self._seconds = 0.0
        self._ahead: deque[Stretch] = deque()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what passes inside, unless it fails: a device may be lost then."""
        begin = mark(self._device)
        yield
        self._count(Stretch(begin, mark(self._device)))

    def take(self) -> Waits:
        """Return what was counted since the last call."""
        taken = Waits(self._device)
        taken += self
        self._seconds = 0.0
        self._ahead.clear()
        return taken

    def __iadd__(self, other: Waits) -> Waits:
        self._seconds += other._seconds
        self._ahead.extend(other._ahead)
        return self

    def seconds(self) -> float:
        """Return all of them, once the device has passed the last one."""
        while self._ahead:
            self._seconds += seconds_between(*self._ahead.popleft())
        return self._seconds

    def _count(self, stretch: Stretch) -> None:
        if isinstance(stretch.end, float):
            self._seconds += seconds_between(*stretch)
            return
        if self._unpassed is not None:
            self._unpassed.add(stretch)
        self._ahead.append(stretch)
        if len(self._ahead) % _LOOK_EVERY == 0:
            self._add_passed()

    def _add_passed(self) -> None:
        while self._ahead and is_passed(self._ahead[0].end):
            self._seconds += seconds_between(*self._ahead.popleft())
