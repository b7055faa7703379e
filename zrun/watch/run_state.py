"""The state of a run, from its events: `state = fold(state, event)`. Pure; screens draw it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zrun.watch.phases import Doing
from zrun.watch.pushes import Pushes, fold_pushes
from zrun_core.spine.events import Event

_CURVE_POINTS = 512
_SPEED_STEPS = 20  # over which speeds are averaged
_WARM_STEPS = 2  # of an attempt: the first warms up, the second one's memory is measured
_RANKS_TOGETHER = 64
_KEPT_METRICS = 64

SPLIT = ("data", "forward", "backward", "comm", "optim")
MEMORY_KINDS = ("params", "grads", "optim", "rings")


@dataclass(frozen=True)
class Curve:
    """A series thinned to a bounded number of points, evenly, however long the run."""

    points: tuple[float, ...] = ()
    stride: int = 1  # steps per point
    _pending: int = 0

    def add(self, value: float) -> Curve:
        if not math.isfinite(value):
            return self
        if self._pending + 1 < self.stride:
            return replace(self, _pending=self._pending + 1)
        points = (*self.points, value)
        if len(points) > _CURVE_POINTS:
            return Curve(points[::2], self.stride * 2)  # the first one stays
        return Curve(points, self.stride)


@dataclass(frozen=True)
class Step:
    """The newest `step` event, as far as screens show it."""

    step: int = 0
    loss: float = math.nan
    has_loss: bool = True  # a script of the user's own tells none
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    skips: int = 0
    samples: int = 0
    tokens: int = 0
    total_samples: int = 0
    total_tokens: int = 0
    epoch: float | None = None
    step_s: float = 0.0
    tflops: float | None = None
    mfu: float | None = None
    split: Mapping[str, float] = field(default_factory=dict)
    tiers: Mapping[str, Any] = field(default_factory=dict)
    updates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TierUse:
    """Recent use that rank 0 made of memory beside its device, per step.

    Attributes:
        read, written: bytes.
        waited_s: seconds that training has waited for it.
    """

    read: float
    written: float
    waited_s: float


@dataclass(frozen=True)
class Evaluation:
    step: int
    metrics: Mapping[str, float]  # the loss comes first, that of the first set

    @property
    def loss(self) -> float:
        return next(iter(self.metrics.values()))


class ByRank(Mapping[int, Event]):
    """An event of each rank, immutable.

    Ranks lie in parts of 64, so a new event copies the dict of one part, not of thousands of ranks.
    """

    def __init__(self, parts: dict[int, dict[int, Event]] | None = None) -> None:
        self._parts = parts or {}  # by rank // _RANKS_TOGETHER

    def plus(self, events: Iterable[Event]) -> ByRank:
        """Return a copy with newer events of some ranks."""
        parts = dict(self._parts)
        own = set[int]()
        for event in events:
            rank = event["rank"]
            number = rank // _RANKS_TOGETHER
            if number not in own:
                own.add(number)
                parts[number] = dict(parts.get(number, ()))
            parts[number][rank] = event
        return ByRank(parts)

    @property
    def events(self) -> list[Event]:
        """The events of all ranks, in no order."""
        return [event for part in self._parts.values() for event in part.values()]

    def __getitem__(self, rank: int) -> Event:
        return self._parts.get(rank // _RANKS_TOGETHER, {})[rank]

    def __iter__(self) -> Iterator[int]:
        return (rank for number in sorted(self._parts) for rank in self._parts[number])

    def __len__(self) -> int:
        return sum(map(len, self._parts.values()))

    def __bool__(self) -> bool:
        return bool(self._parts)


@dataclass(frozen=True)
class RunState:
    """Everything known about a run."""

    start: Event | None = None
    step: Step = Step()
    losses: Curve = Curve()
    first: Step = Step()  # that this attempt made
    recent: tuple[Step, ...] = ()  # the last few steps, oldest first
    traffic_bytes: int = 0  # sent by rank 0
    tier_waits: Mapping[str, float] = field(default_factory=dict)  # seconds of rank 0, by tier
    update_lag: float = 0.0  # seconds that rank 0 has waited for updates beside training
    memory: ByRank = field(default_factory=ByRank)  # by rank, its newest `memory` event
    ranks: Event | None = None  # of many ranks, the newest sum; `memory` has the worst then
    gpus: ByRank = field(default_factory=ByRank)  # by rank, what its GPU's sensors said last
    hosts: Mapping[int, Event] = field(default_factory=dict)  # by first rank, the newest `host`
    stages: Mapping[int, Event] = field(default_factory=dict)  # of a pipeline, by number
    schedules: Mapping[int, Event] = field(default_factory=dict)  # by stage, the newest recorded
    pushes: Pushes | None = None  # of an asynchronous server
    evals: tuple[Evaluation, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)  # of hooks, the newest of each name
    saved: int | None = None  # the newest step that is committed
    pause_s: Mapping[str, float] = field(default_factory=dict)  # the last "eval", the last "save"
    num_warnings: int = 0
    profiles: Mapping[int, Event] = field(default_factory=dict)  # by rank, the newest
    estimate: Event | None = None  # the newest comparison with what was predicted
    end: Event | None = None
    doing: Doing | None = None  # what the run is waiting for
    elapsed_s: float | None = None  # since this attempt began, by the launcher's clock

    @property
    def total_steps(self) -> int | None:
        return self.start.get("total_steps") if self.start else None

    @property
    def resumed(self) -> Event | None:
        """The checkpoint that the run went on from; None if it began with this attempt."""
        return (self.start or {}).get("resumed")

    @property
    def timed(self) -> tuple[Step, ...]:
        """The last few steps, over which speeds are averaged; one that warms up only if alone."""
        warm = self.first.step + _WARM_STEPS
        return tuple(step for step in self.recent if step.step >= warm) or self.recent[-1:]

    @property
    def step_s(self) -> float | None:
        """Seconds per step lately."""
        if not self.timed:
            return None
        return sum(step.step_s for step in self.timed) / len(self.timed)

    @property
    def speed(self) -> tuple[float, str] | None:
        """Tokens per second lately; samples where the data has no tokens."""
        seconds = sum(step.step_s for step in self.timed)
        for unit, name in (("tokens", "tok/s"), ("samples", "samples/s")):
            total = sum(getattr(step, unit) for step in self.timed)
            if total and seconds:
                return total / seconds, name
        return None

    @property
    def newest_metrics(self) -> dict[str, float]:
        """Numbers of the newest evaluation, but for its first loss, and of hooks."""
        if not self.evals:
            return dict(self.metrics)
        _, *evaluated = self.evals[-1].metrics.items()
        return dict(evaluated) | dict(self.metrics)

    @property
    def tflops(self) -> float | None:
        return self._rate("tflops")

    @property
    def mfu(self) -> float | None:
        return self._rate("mfu")

    @property
    def split(self) -> dict[str, float]:
        """The share of each part of a step lately, of the time that is accounted for."""
        sums = {part: sum(step.split.get(part, 0.0) for step in self.timed) for part in SPLIT}
        total = sum(sums.values())
        if not total:
            return {}
        return {part: value / total for part, value in sums.items()}

    def use_of(self, tier: str) -> TierUse | None:
        """Return what steps have lately moved between the device and `tier`."""
        uses = [step.tiers[tier] for step in self.timed if tier in step.tiers]
        if not uses:
            return None
        return TierUse(
            read=sum(sum(use["moved"]["read"].values()) for use in uses) / len(uses),
            written=sum(sum(use["moved"]["written"].values()) for use in uses) / len(uses),
            waited_s=sum(use["waited_s"] for use in uses) / len(uses),
        )

    def updates(self, name: str) -> float:
        """Return the mean over the last few steps of a number of the updates beside training."""
        told = [step.updates[name] for step in self.timed if name in step.updates]
        return sum(told) / max(1, len(told))

    @property
    def planned_bytes(self) -> dict[str, int]:
        """Planned bytes of one rank by kind."""
        planned = (self.start or {}).get("planned_bytes") or {}
        return {kind: planned.get(kind) or 0 for kind in MEMORY_KINDS}

    def _rate(self, name: str) -> float | None:
        """Return the mean over time of a rate that steps tell; None if none does."""
        told = [step for step in self.timed if getattr(step, name) is not None]
        seconds = sum(step.step_s for step in told)
        total: float = sum(step.step_s * getattr(step, name) for step in told)
        if not seconds:
            return None
        return total / seconds


def fold(state: RunState, event: Event) -> RunState:
    """Return `state` after `event`.

    Unknown types and fields are left out: an older launcher may follow a newer worker.
    """
    match event.get("type"):
        case "start":
            return _fold_start(state, event)
        case "stage" | "schedule" | "profile":
            return _fold_newest(state, event)
        case "step":
            return _fold_step(state, event)
        case "memory" | "ranks" | "gpus" | "host":
            return _fold_ranks(state, event)
        case "eval":
            found = event.get("metrics") or {"loss": event["loss"]}  # older records have no more
            metrics = {name: number(value) for name, value in found.items()}
            evaluation = Evaluation(event["step"], metrics)
            state = _paused(state, "eval", event.get("seconds"))
            return replace(state, evals=(*state.evals, evaluation))
        case "metrics":
            values = {name: number(value) for name, value in event["values"].items()}
            newest = list((dict(state.metrics) | values).items())[:_KEPT_METRICS]
            return replace(state, metrics=dict(newest))
        case "save":
            return replace(_paused(state, "save", event.get("stall_s")), saved=event["step"])
        case "pushes":
            return replace(state, pushes=fold_pushes(state.pushes, event))
        case "warning":
            return replace(state, num_warnings=state.num_warnings + 1)
        case "estimate":
            return replace(state, estimate=event)
        case "end":
            return replace(state, end=event)
    return state


def _fold_start(state: RunState, event: Event) -> RunState:
    if state.ranks is not None:  # of ranks that are gone
        state = replace(state, memory=ByRank(), ranks=None)
    return replace(state, start=event)


def _paused(state: RunState, kind: str, seconds: float | None) -> RunState:
    if seconds is None:
        return state
    return replace(state, pause_s={**state.pause_s, kind: float(seconds)})


def _fold_newest(state: RunState, event: Event) -> RunState:
    """Return `state` after an event that replaces the one before it, of a stage or a rank."""
    if event["type"] == "profile":
        return replace(state, profiles={**state.profiles, event["rank"]: event})
    if event["type"] == "stage":
        return replace(state, stages={**state.stages, event["stage"]: event})
    return replace(state, schedules={**state.schedules, event["stage"]: event})


def _fold_ranks(state: RunState, event: Event) -> RunState:
    if event["type"] == "host":
        numbers = {key: told for key, told in event.items() if isinstance(told, int | float)}
        return replace(state, hosts={**state.hosts, int(event["rank"]): numbers})
    if event["type"] == "gpus":
        return replace(state, gpus=state.gpus.plus(event["gpus"]))
    if event["type"] == "ranks":
        own = [state.memory[0]] if 0 in state.memory else []
        return replace(state, memory=ByRank().plus([*own, *event["worst"]]), ranks=event)
    return fold_memory(state, [event])


def fold_memory(state: RunState, events: Iterable[Event]) -> RunState:
    """Return `state` after some `memory` events."""
    return replace(state, memory=state.memory.plus(events))


def _fold_step(state: RunState, event: Event) -> RunState:
    fields = {
        name: event[name] for name in Step.__dataclass_fields__ if event.get(name) is not None
    }
    fields |= {
        name: number(fields[name]) for name in ("loss", "grad_norm", "loss_scale") if name in fields
    }
    step = Step(**fields, has_loss="loss" in fields)
    first = state.first
    if not first.step:
        first = step
    sent_bytes = (event.get("traffic") or {}).get("sent_bytes") or 0
    return replace(
        state,
        step=step,
        first=first,
        losses=state.losses.add(step.loss),
        recent=(*state.recent, step)[-_SPEED_STEPS:],
        traffic_bytes=state.traffic_bytes + sent_bytes,
        tier_waits={
            tier: state.tier_waits.get(tier, 0.0) + use["waited_s"]
            for tier, use in step.tiers.items()
        },
        update_lag=state.update_lag + step.updates.get("lag_s", 0.0),
    )


def number(value: Any) -> float:
    """Return a number of an event; those that JSON lacks travel as text."""
    return float(value)
