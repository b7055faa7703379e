"""The GPUs of a run as charts by host, a table, and what is wrong with them in words."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from zrun.pages import chart, document
from zrun.pages.chart import Line
from zrun.pages.document import NUM_COLORS
from zrun.watch.gpu_course import GpuSums
from zrun.watch.run_record import RunRecord
from zrun_core.sizes import format_size, several

_GPUS_SHOWN = 64
_NAMED = 8
_FEW_POINTS = 64  # of which each is shown
_CHARTS = (
    ("utilisation", "Percent of the time in which GPUs compute, mean of each host"),
    ("power_w", "Watts of a GPU, mean of each host"),
    ("temperature_c", "Degrees of the hottest GPU of each host"),
    ("slowed", "GPUs of each host that are slowed by more than their power limit"),
)


def findings(record: RunRecord) -> list[tuple[str, str]]:
    """Return what GPUs told that a person should know, as names and texts."""
    gpus = record.gpus.gpus
    slowed = [_slowed(record, rank, gpus[rank]) for rank in _worst(gpus) if gpus[rank].throttled]
    errors = [_errors(record, rank, gpu) for rank, gpu in sorted(gpus.items())]
    rows = [("slowed GPUs", slowed), ("memory errors", [each for each in errors if each])]
    return [(name, _listed(found)) for name, found in rows if found]


def _worst(gpus: dict[int, GpuSums]) -> list[int]:
    """Return the ranks of GPUs, those that were slowed most often first."""
    return sorted(gpus, key=lambda rank: (-sum(gpus[rank].throttled.values()), rank))


def _slowed(record: RunRecord, rank: int, gpu: GpuSums) -> str:
    looks = several(gpu.num_looks, "look")
    reasons = " and ".join(f"{why} in {number} of {looks}" for why, number in gpu.throttled.items())
    strain = [] if gpu.hottest is None else [f"{gpu.hottest:.0f} degrees at most"]
    strain += [] if gpu.slowest is None else [f"down to {gpu.slowest:.0f} MHz"]
    return ", ".join([f"{_named(record, rank)}: {reasons}", *strain])


def _errors(record: RunRecord, rank: int, gpu: GpuSums) -> str:
    words = []
    if gpu.new_uncorrected > 0:
        words.append(several(gpu.new_uncorrected, "new uncorrectable error"))
    if gpu.remap == "pending":
        words.append("memory is to be replaced at its next reset")
    elif gpu.remap:
        words.append("no memory is left to replace what is broken: replace the GPU")
    return f"{_named(record, rank)}: {', '.join(words)}" if words else ""


def _listed(found: list[str]) -> str:
    more = [f"{len(found) - _NAMED} more GPUs"] if len(found) > _NAMED else []
    return "; ".join([*found[:_NAMED], *more])


def _named(record: RunRecord, rank: int) -> str:
    host = _host(record, rank)
    return f"rank {rank} on {host}" if host else f"rank {rank}"


def _host(record: RunRecord, rank: int) -> str:
    hosts = record.facts.hosts
    return hosts[rank] if rank < len(hosts) else ""


def charts_of_gpus(record: RunRecord) -> str:
    """Return a chart for each kind of sensor, with a line for each host."""
    shown = sorted(heapq.nlargest(NUM_COLORS, record.gpus.hosts, key=_strain_of(record)))
    drawn = []
    for name, title in _CHARTS:
        lines = []
        for number, first in enumerate(shown):
            points = record.gpus.hosts[first][name].points
            host = _host(record, first) or f"ranks from {first}"
            lines.append(Line(host, points, number, has_dots=len(points) <= _FEW_POINTS))
        if name == "slowed" and not any(value for line in lines for value in line.values):
            continue
        marks = record.curves.went_on
        drawn.append(chart.chart(title, lines, chart.short, from_zero=True, marks=marks))
    found = "".join(drawn)
    if not found:
        return ""
    left = len(record.gpus.hosts) - len(shown)
    more = document.soft(f"{several(left, 'more host')} are in events.jsonl.") if left else ""
    return f'<div class="charts">{found}</div>{more}'


def _strain_of(record: RunRecord) -> Callable[[int], tuple[float, float, int]]:
    """Return what orders hosts by how much their GPUs were slowed, then by how hot they were."""

    def strain(first: int) -> tuple[float, float, int]:
        series = record.gpus.hosts[first]
        most = {
            name: max((value for _, value in series[name].points), default=0.0)
            for name in ("slowed", "temperature_c")
        }
        return most["slowed"], most["temperature_c"], -first

    return strain


def gpus_table(record: RunRecord) -> str:
    """Return what each GPU told in the newest launch, those that were slowed most often first."""
    gpus = record.gpus.gpus
    if not gpus:
        return ""
    head = (
        "rank", "host", "busy", "power", "its limit", "hottest", "lowest clock", "memory, at most",
        "errors corrected", "uncorrectable", "slowed by",
    )  # fmt: skip
    ranks = sorted(gpus)
    if len(ranks) > _GPUS_SHOWN:
        ranks = _worst(gpus)[:_GPUS_SHOWN]
    rows = [document.row(_cells(record, rank, gpus[rank])) for rank in ranks]
    left = len(gpus) - len(ranks)
    more = document.soft(f"{left} more GPUs are in events.jsonl.") if left else ""
    return document.table(head, rows, "words") + more


def _cells(record: RunRecord, rank: int, gpu: GpuSums) -> list[str]:
    reasons = gpu.throttled | gpu.slowed  # a power limit comes last
    slowed = [f"{why} ({number / gpu.num_looks:.0%})" for why, number in reasons.items()]
    return [
        str(rank),
        _host(record, rank) or "?",
        _number(gpu.mean("utilisation"), "%"),
        _number(gpu.mean("power_w"), " W"),
        _number(gpu.power_limit_w, " W"),
        _number(gpu.hottest, " C"),
        _number(gpu.slowest, " MHz"),
        "-" if gpu.most_bytes is None else format_size(int(gpu.most_bytes)),
        _number(gpu.corrected),
        _number(gpu.uncorrected),
        ", ".join(slowed) or "-",
    ]


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.0f}{unit}"
