"""The way of a launch's events to record and screens, on which those of many ranks are summed up.

    agents -- memory, memories --> RankWindows -- memory of rank 0, ranks --> Follower
                                               -- memory of each rank ------> Gate, Stragglers

Of at most `FEW_RANKS` each rank's `memory` events go on as they are. Of what many hosts say of
themselves some goes on: see `host_samples.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from zrun.system.output import Dispensable
from zrun.transport.memories import FEW_RANKS, MEMORIES, apart
from zrun.watch.host_samples import SAMPLES, HostSamples
from zrun.watch.rank_digest import digest
from zrun_core.spine.events import Event

_PATIENCE_S = 5.0  # that what ranks told of a step waits for those that have not
_MOST_WINDOWS = 64  # steps: ranks of an asynchronous server are at different ones


class Follow(Protocol):
    def __call__(self, event: Event, line: bytes | None = None) -> None: ...


class RankWindows:
    """Makes one `ranks` event for each step of which the ranks of a large launch tell.

    It comes once all have told of the step, and is of these events. Where some are late or dead it
    comes after some seconds, with what those have told last; once they have told too there is
    another one. So nothing that a rank tells is left out but what it has told anew.
    """

    def __init__(
        self,
        num_ranks: int,
        follow: Follow,
        see: Callable[[Event], None],
        compare: Callable[[Event, Follow], None],
        num_hosts: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wait for events.

        Args:
            num_ranks, num_hosts: of the launch.
            follow: called with each event that is recorded, and its line where it has one.
            see: called with each event, whether it is recorded or not.
            compare: called with each event, and `follow` for what it finds; of a large launch with
                the `memory` events of a step alone, once all ranks have told of it.
        """
        self._num_ranks = num_ranks
        self._follow = follow
        self._see = see
        self._compare = compare
        self._clock = clock
        self._samples = HostSamples(num_hosts, clock)
        self._thin_out = Dispensable("the sampling of hosts")
        self._sum_up = Dispensable("the summary of ranks")
        self._newest: dict[int, Event] = {}  # by rank
        self._peaks: dict[int, int] = {}  # bytes by rank
        self._windows: dict[int, dict[int, Event]] = {}  # by step and rank
        self._since: dict[int, float] = {}  # of what is not summed up yet, by step

    def take(self, event: Event, line: bytes | None) -> None:
        """Take in an event of an agent, or what several ranks have told in one.

        Args:
            line: its text, where that can be recorded as it is.
        """
        if event.get("type") == MEMORIES:
            for each in apart(event):
                self._take(each, None)
        elif event.get("type") not in SAMPLES or self._thin_out.is_left_out:
            self._take(event, line)
        else:
            self._thin_out(self._take_sample, event, line)

    def turn(self) -> None:
        """Sum up what has waited long enough."""
        now = self._clock()
        if any(now - since > _PATIENCE_S for since in self._since.values()):
            self.close()

    def close(self) -> None:
        """Sum up all that waits."""
        if self._since:
            self._since = {}
            self._sum_up(self._say, self._newest)

    def _take_sample(self, event: Event, line: bytes | None) -> None:
        if self._samples.is_kept(event):
            self._take(event, line)

    def _take(self, event: Event, line: bytes | None) -> None:
        sums_up = self._num_ranks > FEW_RANKS and not self._sum_up.is_left_out
        is_memory = event.get("type") == "memory"
        if not sums_up or not is_memory or event["rank"] == 0:
            self._follow(event, line)
        self._see(event)
        if not sums_up:
            self._compare(event, self._follow)
        elif is_memory:
            self._sum_up(self._add, event)
        elif event.get("type") == "peak":
            self._peaks[event["rank"]] = event.get("peak_bytes") or 0

    def _add(self, event: Event) -> None:
        """Add a `memory` event to those of its step."""
        rank, step = event["rank"], event["step"]
        if rank in self._newest and event["time"] < self._newest[rank]["time"]:
            return  # it has told anew meanwhile, and of no lower peaks
        self._newest[rank] = event
        window = self._windows.setdefault(step, {})
        window[rank] = event
        self._since.setdefault(step, self._clock())
        if len(window) == self._num_ranks:
            for told in window.values():
                self._compare(told, self._follow)
            self._say(window)
            self._drop(step)
        elif len(self._windows) > _MOST_WINDOWS:
            del self._windows[min(self._windows)]

    def _say(self, events: dict[int, Event]) -> None:
        self._follow(digest(events, self._peaks), None)

    def _drop(self, step: int) -> None:
        """Forget the windows up to a step; what ranks told in them is among the newest."""
        for each in [each for each in self._windows if each <= step]:
            del self._windows[each]
            self._since.pop(each, None)
