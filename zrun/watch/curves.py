"""The curves of a run, from its events: all launches that went on with it, in one line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zrun.watch.memory_course import MemoryCourse, held_by_kind
from zrun.watch.run_state import SPLIT, number
from zrun.watch.thinned import Thinned
from zrun_core.spine.events import Event

OF_STEPS = ("loss", "grad_norm", "lr", "tokens_per_s", "samples_per_s", "step_s")
_MARKS = 100
_MOST_METRICS = 40


@dataclass
class Curves:
    """The series of a run, over its steps, by name.

    Fields of `step`; `split` with a part of it; `sent` (bytes, by rank 0); `eval loss`; `metric`
    with the name of one; the tiers `device`, `host` and `disk` (bytes of rank 0's buffers there);
    `process` (its resident bytes); `torch` (bytes that torch holds on its GPU); `wait` with what
    it waited for.

    Attributes:
        planned: bytes that rank 0 was to allocate, by tier.
        went_on: the steps after which another launch went on.
        metrics: names of the series of the user's own metrics, as they came: `top1`, of hooks, or
            `top1 (evaluation)`.
        memory: rank 0's buffers by tier and kind.
    """

    planned: dict[str, int] = field(default_factory=dict)
    went_on: list[int] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    memory: MemoryCourse = field(default_factory=MemoryCourse)
    _series: defaultdict[str, Thinned] = field(default_factory=lambda: defaultdict(Thinned))
    _newest: int = 0

    def of(self, name: str) -> Thinned:
        """Return a series; an empty one where nothing was told."""
        return self._series.get(name, Thinned())

    def take(self, event: Event) -> None:
        """Add an event; of the ranks only rank 0 counts."""
        if event["rank"] != 0:
            return
        match event["type"]:
            case "start":
                self._start(event)
            case "step":
                self._step(event)
            case "eval":
                self._add("eval loss", event["step"], event["loss"])
                for name, value in event.get("metrics", {}).items():
                    if name != "loss":
                        self._add_metric(f"{name} (evaluation)", event["step"], value)
            case "metrics":
                for name, value in event["values"].items():
                    self._add_metric(name, event["step"], value)
            case "memory":
                self._memory(event)

    def _start(self, event: Event) -> None:
        tiers = event.get("planned_tiers") or {"device": event.get("planned_bytes") or {}}
        self.planned = {tier: sum(planned.values()) for tier, planned in tiers.items()}
        step = (event.get("resumed") or {}).get("step", 0)
        self._forget(step + 1)
        if step:
            self.went_on = [*self.went_on, step][-_MARKS:]

    def _step(self, event: Event) -> None:
        step = event["step"]
        if step <= self._newest:  # its `start` was not read
            self._forget(step)
        self._newest = step
        for name in OF_STEPS:
            self._add(name, step, event.get(name))
        split = event.get("split") or {}
        for part in SPLIT:
            self._add(f"split {part}", step, split.get(part))
        self._add("sent", step, (event.get("traffic") or {}).get("sent_bytes"))
        for tier, use in event.get("tiers", {}).items():
            self._add(f"wait {tier}", step, use["waited_s"])
        self._add("wait updates", step, event.get("updates", {}).get("lag_s"))

    def _memory(self, event: Event) -> None:
        step = event["step"]
        self._add("process", step, event.get("rss_bytes"))
        self._add("torch", step, event.get("device_reserved"))
        self.memory.take(step, held_by_kind(event))
        for tier, (held, _) in held_by_tier(event, {}).items():
            self._add(tier, step, held)

    def _add_metric(self, name: str, step: int, value: Any) -> None:
        """Add a point to a metric of the user's own; more names than a page can show are left."""
        if name not in self.metrics:
            if len(self.metrics) == _MOST_METRICS:
                return
            self.metrics.append(name)
        self._add(f"metric {name}", step, value)

    def _add(self, name: str, step: int, value: Any) -> None:
        if value is not None:
            self._series[name].add(step, number(value))

    def _forget(self, step: int) -> None:
        if step > self._newest:
            return
        for series in self._series.values():
            series.forget(step)
        self.memory.forget(step)
        self.went_on = [each for each in self.went_on if each < step]
        self._newest = step - 1


def held_by_tier(memory: Event, planned: Mapping[str, int]) -> dict[str, tuple[int, int | None]]:
    """Return the bytes of a rank's buffers on each tier, and those that were planned.

    Args:
        planned: by tier, for a rank that does not tell; empty: not known.
    """
    if tiers := memory.get("tiers"):
        return {
            tier: (sum(use["allocated"].values()), sum(use["planned"].values()))
            for tier, use in tiers.items()
        }
    held = sum(held_by_kind(memory)["device"].values())
    return {"device": (held, memory.get("planned_bytes", planned.get("device")))}
