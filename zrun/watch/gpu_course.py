"""What the GPUs of a run said of themselves, over its steps and by host, in constant memory."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zrun.topology.boards import POWER_CAP
from zrun.watch.thinned import Thinned
from zrun_core.spine.events import Event

OF_HOSTS = ("utilisation", "power_w", "temperature_c", "slowed")  # series


@dataclass
class GpuSums:
    """What one GPU said in the newest launch. None: it never told.

    Attributes:
        num_looks: how often it told of itself.
        hottest, slowest, most_bytes: degrees, MHz of its cores, and bytes of its memory.
        power_limit_w: as it told last.
        slowed: by reason, how often it was slower than it could be.
        corrected, uncorrected: memory errors since the driver was loaded, as it told last.
        new_uncorrected: of these, since it told first.
        remap: "pending" or "failed", as it told last.
    """

    num_looks: int = 0
    hottest: float | None = None
    slowest: float | None = None
    most_bytes: int | None = None
    power_limit_w: float | None = None
    slowed: Counter[str] = field(default_factory=Counter)
    corrected: int | None = None
    uncorrected: int | None = None
    remap: str | None = None
    _first_uncorrected: int | None = None
    _sums: defaultdict[str, list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0, 0.0])
    )

    def take(self, told: Mapping[str, Any]) -> None:
        """Take in what the GPU says at one moment."""
        self.num_looks += 1
        for name in ("utilisation", "power_w"):
            if (value := told.get(name)) is not None:
                self._sums[name][0] += float(value)
                self._sums[name][1] += 1
        self.hottest = _choose(max, self.hottest, told.get("temperature_c"))
        self.slowest = _choose(min, self.slowest, told.get("clock_mhz"))
        self.most_bytes = _choose(max, self.most_bytes, told.get("used_bytes"))
        self.power_limit_w = told.get("power_limit_w", self.power_limit_w)
        self.slowed.update(map(str, told.get("slowed") or ()))
        self.corrected = told.get("corrected", self.corrected)
        self.uncorrected = told.get("uncorrected", self.uncorrected)
        self.remap = told.get("remap")
        if self._first_uncorrected is None:
            self._first_uncorrected = self.uncorrected

    def mean(self, name: str) -> float | None:
        """Return the mean of `utilisation` or `power_w` over all looks."""
        total, count = self._sums[name]
        return total / count if count else None

    @property
    def new_uncorrected(self) -> int:
        return (self.uncorrected or 0) - (self._first_uncorrected or 0)

    @property
    def throttled(self) -> dict[str, int]:
        """The reasons that are no matter of course: a GPU with work is at its power limit."""
        return {why: number for why, number in self.slowed.most_common() if why != POWER_CAP}


def _choose(which: Any, known: Any, value: Any) -> Any:
    return (
        which(each for each in (known, value) if each is not None) if value is not None else known
    )


class GpuCourse:
    """The GPUs of a run.

    Attributes:
        hosts: by the first rank of a host, its series over steps by name: the mean `utilisation`
            and `power_w` of its GPUs, the highest `temperature_c`, and how many were `slowed` by
            more than their power limit.
        gpus: by rank.
    """

    def __init__(self) -> None:
        self.hosts: dict[int, dict[str, Thinned]] = {}
        self.gpus: dict[int, GpuSums] = {}
        self._step = 0

    def take(self, event: Event) -> None:
        """Take in an event of the run."""
        match event["type"]:
            case "start":
                self._begin((event.get("resumed") or {}).get("step", 0))
            case "step":
                self._step = event["step"]
            case "gpus":
                self._look(int(event["rank"]), event["gpus"])

    def _begin(self, step: int) -> None:
        """Forget what a launch makes again, and what is summed up of the launch before."""
        for series in self.hosts.values():
            for each in series.values():
                each.forget(step + 1)
        self.gpus = {}
        self._step = step

    def _look(self, host: int, told: list[Mapping[str, Any]]) -> None:
        for each in told:
            self.gpus.setdefault(int(each["rank"]), GpuSums()).take(each)
        boards = {each.get("uuid", each["rank"]): each for each in told}.values()  # ranks may share
        series = self.hosts.setdefault(host, {name: Thinned() for name in OF_HOSTS})
        for name, choose in (
            ("utilisation", statistics.fmean),
            ("power_w", statistics.fmean),
            ("temperature_c", max),
        ):
            values = [float(each[name]) for each in boards if each.get(name) is not None]
            if values:
                series[name].add(self._step, choose(values))
        slowed = [set(each.get("slowed") or ()) - {POWER_CAP} for each in boards]
        series["slowed"].add(self._step, float(sum(map(bool, slowed))))
