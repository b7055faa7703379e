"""Ranks that the others wait for: what each needs for itself in a step, and which of them are slow.

On a CPU that is the time of a step without the waiting for other ranks. On a GPU waiting is part of
forward and backward, on every rank alike, so that only the time in which it has no data is its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median_low

from zrun.watch import formatting
from zrun.watch.panel_layout import Facts
from zrun_core.spine.events import Event

_TIMES = 3  # that a rank is told of as slow, one after the other, before it counts
# A rank is slow that works longer than the median by each of these.
# of the median; of the step; seconds
_MORE = 0.25
_SHARE = 0.1
_LEAST_S = 0.005
_NAMED = 3


def own_times(event: Event) -> dict[str, float]:
    """Return a rank's own seconds per step by part, from its `memory` event."""
    split = event.get("split") or {}
    if event.get("device_allocated") is not None:
        return {part: float(split[part]) for part in ("data",) if part in split}
    return {part: float(seconds) for part, seconds in split.items() if part != "comm"}


class Stragglers:
    """Warns of each rank that is slow for some time, once."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._step = 0  # of which ranks told last
        self._before = 0  # the one of which they told before that
        self._events: dict[int, Event] = {}  # of that step, by rank
        self._times: Counter[int] = Counter()  # that a rank was slow in succession
        self._since: dict[int, int] = {}  # the step after which it has been slow
        self._is_first = True

    def see(self, event: Event, emit: Callable[[Event], None]) -> None:
        """Take in an event of the run; `emit` gets a warning when there is one."""
        if event.get("type") != "memory":
            return
        if event["step"] != self._step:
            self._before = self._step
            self._step = event["step"]
            self._events = {}
        self._events[event["rank"]] = event
        if len(self._events) == self._facts.num_ranks > 1:
            if not self._is_first:  # which warms up
                self._judge(emit)
            self._is_first = False

    def _judge(self, emit: Callable[[Event], None]) -> None:
        times = {rank: own_times(event) for rank, event in self._events.items()}
        own = {rank: sum(parts.values()) for rank, parts in times.items()}
        usual = median_low(own.values())
        step_s = sum((self._events[min(own)].get("split") or {}).values())
        late = max(usual * _MORE, step_s * _SHARE, _LEAST_S)
        slow = [rank for rank, seconds in own.items() if seconds > usual + late]
        self._times = Counter({rank: self._times[rank] + 1 for rank in slow})
        self._since = {rank: self._since.get(rank, self._before) for rank in slow}
        news = [rank for rank in slow if self._times[rank] == _TIMES]
        for rank in sorted(news, key=lambda rank: -own[rank])[:_NAMED]:
            lost = {part: took - _usual(times.values(), part) for part, took in times[rank].items()}
            part = max(lost, key=lambda part: lost[part])
            works = formatting.seconds(own[rank])
            median = formatting.seconds(usual)
            message = (
                f"{self._facts.rank(rank)} is slow, and the others wait: it works for {works} of "
                f"each step, the median rank for {median}, most of the difference is in {part}; "
                f"so for {self._step - self._since[rank]} steps"
            )
            emit({"type": "warning", "time": time.time(), "rank": rank, "message": message})


def _usual(times: Iterable[dict[str, float]], part: str) -> float:
    return median_low(parts.get(part, 0.0) for parts in times)
