"""Ranks and stages that the others wait for: what each needs for itself in a step, which are slow.

That is the time of a step on its device, without the waiting for other ranks.

In a pipeline a rank is compared with those of its stage, and the stages with each other: one that
has more of the model to compute is no slow machine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any, NamedTuple

from zrun.watch import formatting
from zrun.watch.panel_layout import Facts
from zrun_core.spine.events import Event

_TIMES = 3  # that one is told of as slow, one after the other, before it counts
# One is slow that works longer than is usual by each of these.
# of what is usual; of the step; seconds
_MORE = 0.25
_SHARE = 0.1
_LEAST_S = 0.005
_NAMED = 3


def own_times(event: Mapping[str, Any]) -> dict[str, float]:
    """Return a rank's own seconds per step by part, from its `memory` event."""
    split = event.get("split") or {}
    return {part: float(seconds) for part, seconds in split.items() if part != "comm"}


def tolerance(usual_s: float, step_s: float) -> float:
    """Return how many seconds longer than is usual one may work before it counts as slow.

    Args:
        usual_s: seconds for which others work in a step.
        step_s: seconds of the whole step.
    """
    return max(usual_s * _MORE, step_s * _SHARE, _LEAST_S)


class _Worker(NamedTuple):
    """A rank, or all ranks of a stage.

    Attributes:
        name: for a person.
        ranks: it, or those of the stage.
        times: seconds of its own in a step, by part; of a stage, the medians of its ranks.
    """

    name: str
    ranks: Sequence[int]
    times: Mapping[str, float]

    @property
    def own_s(self) -> float:
        return sum(self.times.values())


class _Late(NamedTuple):
    """One that works longer than the others.

    Attributes:
        worker: it.
        kind: rank | stage.
        usual: times of the others, by part.
        usual_s: for which they work.
    """

    worker: _Worker
    kind: str
    usual: Mapping[str, float]
    usual_s: float


class Stragglers:
    """Warns of each rank, and each stage of a pipeline, that is slow for some time, once."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._step = 0  # of which ranks told last
        self._before = 0  # the one of which they told before that
        self._events: dict[int, Event] = {}  # of that step, by rank
        self._times: Counter[str] = Counter()  # that one was slow in succession, by name
        self._since: dict[str, int] = {}  # the step after which it has been slow
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
        late = {each.worker.name: each for each in find_late(self._events, self._facts.rank)}
        self._times = Counter({name: self._times[name] + 1 for name in late})
        self._since = {name: self._since.get(name, self._before) for name in late}
        news = [each for name, each in late.items() if self._times[name] == _TIMES]
        for each in sorted(news, key=lambda each: -each.worker.own_s)[:_NAMED]:
            rank = each.worker.ranks[0]
            emit({"type": "warning", "time": time.time(), "rank": rank, "message": self._say(each)})

    def _say(self, late: _Late) -> str:
        worker, kind, usual, usual_s = late
        lost = {part: took - usual[part] for part, took in worker.times.items()}
        part = max(lost, key=lambda part: lost[part])
        works = formatting.seconds(worker.own_s)
        median = formatting.seconds(usual_s)
        text = (
            f"{worker.name} is slow, and the others wait for it: busy {works} of each step, the "
            f"median {kind} {median}, most of the difference is in {part}; this has been so for "
            f"{self._step - self._since[worker.name]} steps"
        )
        if kind == "stage":
            text += "; move the borders with parallel.split"
        return text


def _usual(workers: Sequence[_Worker]) -> dict[str, float]:
    """Return the median of the times of each part."""
    parts = {part for worker in workers for part in worker.times}
    return {part: median_low(worker.times.get(part, 0.0) for worker in workers) for part in parts}


def find_late(events: Mapping[int, Event], name: Callable[[int], str] = str) -> Iterator[_Late]:
    """Yield the ranks that are slow for their stage, and the stages that are slow.

    Args:
        events: by rank, a `memory` event.
    """
    by_stage: dict[int, list[_Worker]] = {}
    for rank, event in sorted(events.items()):
        stage = (event.get("pipeline") or {}).get("stage", 0)
        by_stage.setdefault(stage, []).append(_Worker(name(rank), [rank], own_times(event)))
    step_s = sum((events[min(events)].get("split") or {}).values())
    for workers in by_stage.values():
        yield from _late_of("rank", workers, step_s)
    stages = []
    for stage, workers in sorted(by_stage.items()):
        names = ", ".join(worker.name for worker in workers[:_NAMED])
        if len(workers) > _NAMED:
            names += ", ..."
        ranks = [rank for worker in workers for rank in worker.ranks]
        stages.append(_Worker(f"stage {stage} ({names})", ranks, _usual(workers)))
    yield from _late_of("stage", stages, step_s)


def _late_of(kind: str, workers: Sequence[_Worker], step_s: float) -> Iterator[_Late]:
    usual_s = median_low(worker.own_s for worker in workers)
    most = usual_s + tolerance(usual_s, step_s)
    for worker in workers:
        if worker.own_s > most:
            yield _Late(worker, kind, _usual(workers), usual_s)
