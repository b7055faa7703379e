"""Which ranks the others have waited for over a run, in constant memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import median

from zrun.watch.stragglers import find_late, own_times
from zrun.watch.thinned import Thinned
from zrun_core.spine.events import Event

_LEAST_RANKS = 2


class RankTimes:
    """The seconds of a step in which ranks do not wait for others, over its steps.

    Attributes:
        least, median, most: over ranks, by step.
        num_samples: times that all ranks have told of the same steps.
        late: of these, how often each rank, and each stage of a pipeline, was slow, by name.
    """

    def __init__(self) -> None:
        self.least = Thinned()
        self.median = Thinned()
        self.most = Thinned()
        self.num_samples = 0
        self.late: Counter[str] = Counter()
        self._num_ranks = 0
        self._step = 0  # of which ranks told last
        self._events: dict[int, Event] = {}  # of that step, by rank
        self._is_warm = False

    def take(self, event: Event) -> None:
        """Take in an event of the run."""
        if event["type"] == "start":
            self._begin((event.get("resumed") or {}).get("step", 0), event.get("world_size") or 1)
        if event["type"] == "ranks":
            self._take_sum(event)
        if event["type"] != "memory" or not event.get("split"):
            return
        if event["step"] != self._step:
            self._step = event["step"]
            self._events = {}
        self._events[event["rank"]] = event
        if len(self._events) == self._num_ranks >= _LEAST_RANKS:
            self._judge()

    def _take_sum(self, event: Event) -> None:
        """Take in what many ranks have told, once all have told of the same step."""
        if event["told"] != self._num_ranks or "busy_s" not in event["most"]:
            return
        self._step = event["step"]
        if self._is_warm:
            least, usual, most = (event[name]["busy_s"] for name in ("least", "median", "most"))
            late = [*(f"rank {rank}" for rank in event["late"]), *event["late_stages"]]
            self._add(least, usual, most, late)
        self._is_warm = True

    def _begin(self, step: int, num_ranks: int) -> None:
        for series in (self.least, self.median, self.most):
            series.forget(step + 1)
        self._num_ranks = num_ranks
        self._step = step
        self._events = {}
        self._is_warm = False

    def _judge(self) -> None:
        """Compare ranks; the first time that they tell of a step it warms up."""
        if not self._is_warm:
            self._is_warm = True
            return
        own = [sum(own_times(event).values()) for event in self._events.values()]
        late = find_late(self._events, lambda rank: f"rank {rank}")
        self._add(min(own), median(own), max(own), [each.worker.name for each in late])

    def _add(self, least: float, usual: float, most: float, late: Iterable[str]) -> None:
        for series, value in ((self.least, least), (self.median, usual), (self.most, most)):
            series.add(self._step, value)
        self.num_samples += 1
        self.late.update(dict.fromkeys(late, 1))
