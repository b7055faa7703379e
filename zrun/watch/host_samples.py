"""What hosts and their GPUs say of themselves every ten seconds, of many hosts now and then.

Of at most `FEW_HOSTS` each event goes on. Of more, each host's go on as rarely as it takes for all
of them to be as many: of 512 hosts every 320 seconds. A GPU that is slowed down for another reason,
or that has found an error in its memory, is told of within a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from zrun.topology.boards import POWER_CAP
from zrun_core.spine.events import Event

FEW_HOSTS = 16  # of a launch, up to which all that they say is recorded
SAMPLES = ("gpus", "host")  # types of these events
_TELL_S = 10.0  # between two of a host
_NEWS_S = 60.0  # at least, between two that go on out of turn


class _Told(NamedTuple):
    """The last event of a host that went on: when, in seconds, and what ailed its GPUs."""

    at: float
    ailing: list[object]


class HostSamples:
    """Decides which of the events of hosts are recorded."""

    def __init__(self, num_hosts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_s = _TELL_S * num_hosts / FEW_HOSTS
        self._keeps_all = num_hosts <= FEW_HOSTS
        self._clock = clock
        self._told: dict[tuple[str, int], _Told] = {}  # by type, and first rank of the host

    def is_kept(self, event: Event) -> bool:
        """Return whether an event of one of `SAMPLES` goes on; it counts as told then."""
        if self._keeps_all:
            return True
        key = event["type"], event["rank"]
        now, ailing = self._clock(), _ailing(event)
        told = self._told.get(key)
        if told is not None:
            patience_s = self._period_s if ailing == told.ailing else _NEWS_S
            if now - told.at < min(patience_s, self._period_s):
                return False
        self._told[key] = _Told(now, ailing)
        return True


def _ailing(event: Event) -> list[object]:
    """Return what is wrong with the GPUs of a host, which is news when it changes."""
    return [
        (sorted(set(each.get("slowed") or ()) - {POWER_CAP}), each.get("uncorrected"))
        for each in event.get("gpus") or ()
    ]
