"""The report of a run as one page: what the text says, curves over its steps, memory by rank."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from zrun.hosts.cluster import several
from zrun.watch import chart, formatting, html, stages
from zrun.watch.chart import Line
from zrun.watch.curves import OF_STEPS, Curves, held_by_tier
from zrun.watch.panel_layout import Facts
from zrun.watch.report import report_rows
from zrun.watch.run_state import RunState
from zrun.watch.tiers import ELSEWHERE
from zrun_core.errors import ExitCode
from zrun_core.sizes import format_size

_RANKS_SHOWN = 64
_HOSTS_SHOWN = 8
_TIERS = ("device", *ELSEWHERE)
_STOPPED = (ExitCode.STOPPED, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
_FEW_POINTS = 64  # of which each is shown
_STYLE = (
    chart.STYLE
    + """
.outcome { font-weight: 600; font-size: 1.05em; }
.outcome b { display: inline-block; margin-right: .6em; padding: .05em .7em; border-radius: 1em; \
color: var(--back); background: var(--bad); }
.outcome.yes b { background: var(--good); }
"""
)


@dataclass(frozen=True)
class Outcome:
    """End of a launch.

    Attributes:
        message: what was told on the terminal; empty where all is well.
    """

    code: int
    message: str = ""


def page(
    facts: Facts,
    outcome: Outcome,
    state: RunState,
    curves: Curves,
    settings: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the whole file.

    Args:
        facts: which run it is.
        outcome: how this launch ended.
        state: what its events have told.
        curves: of the whole run, earlier launches included.
        settings: what was asked for, by name.
    """
    body = [
        f"<h1>{escape(facts.name)}</h1>",
        f'<div class="soft">{escape(_what_ran(facts, state))}</div>',
        *_ending(outcome),
        _charts(state, curves),
        "<h2>Report</h2>",
        html.facts(report_rows(state)),
        f"<h2>Job</h2>{html.facts(settings)}" if settings else "",
        *_pipeline(state),
        *_memory(facts, state, curves),
        *_moved(state),
        *_traffic(state),
        f'<p class="soft">{escape(_origin(state))}</p>',
    ]
    return html.document(f"{facts.name} {facts.run_id}", filter(None, body), _STYLE)


def _what_ran(facts: Facts, state: RunState) -> str:
    """Return `run 20260102-030405-ab12 · 2 ranks on localhost · cpu · ZeRO 2 · bf16`."""
    hosts = list(dict.fromkeys(facts.hosts))
    names = ", ".join(hosts[:_HOSTS_SHOWN])
    if len(hosts) > _HOSTS_SHOWN:
        names += f" and {len(hosts) - _HOSTS_SHOWN} more hosts"
    words = [f"run {facts.run_id}", f"{several(facts.num_ranks, 'rank')} on {names}"]
    if start := state.start:
        words += [str(start["device"])] if start.get("device") else []
        if start.get("stage") is not None:
            words.append(f"ZeRO stage {start['stage']}")
        words += [str(start["precision"])] if start.get("precision") else []
        if start.get("params"):
            words.append(f"{formatting.count(start['params'])} parameters")
    return " · ".join(words)


def _ending(outcome: Outcome) -> list[str]:
    """Return the exit code in words, with the message of a run that did not reach its end."""
    if outcome.code == ExitCode.OK:
        return ['<p class="outcome yes"><b>done</b>exit code 0</p>']
    word = "stopped" if outcome.code in _STOPPED else "failed"
    parts = [f'<p class="outcome no"><b>{word}</b>exit code {outcome.code}</p>']
    if outcome.message:
        parts.append(f"<pre>{escape(outcome.message)}</pre>")
    return parts


def _charts(state: RunState, curves: Curves) -> str:
    """Return all curves of which there are points."""

    speed = _line(curves, "tokens_per_s")
    unit = "Tokens"
    if not any(value for _, value in speed.points):
        speed = _line(curves, "samples_per_s")
        unit = "Samples"
    waits = [
        _line(curves, "wait host", "for host memory", 0),
        _line(curves, "wait disk", "for disk", 1),
        _line(curves, "wait updates", "for updates beside training", 2),
    ]
    losses = [_line(curves, "loss", "training"), _line(curves, "eval loss", "evaluation", 1)]
    if not losses[1].points:
        losses = [_line(curves, "loss")]
    marks = curves.went_on
    drawn = [
        chart.chart("Loss", losses, chart.short, marks=marks),
        chart.chart("Gradient norm", [_line(curves, "grad_norm")], chart.short, marks=marks),
        chart.chart(f"{unit} per second", [speed], chart.short, from_zero=True, marks=marks),
        chart.chart("Seconds of a step", [_line(curves, "step_s")], chart.short, marks=marks),
        _memory_chart("Memory of rank 0 (dashed: plan)", _tier_lines(state, curves), marks),
        _memory_chart("Whole process of rank 0", [_line(curves, "process")], marks),
        chart.chart(
            "Seconds of waiting in a step, rank 0",
            [each for each in waits if any(value for _, value in each.points)],
            chart.short,
            from_zero=True,
            marks=marks,
        ),
        chart.chart("Learning rate", [_line(curves, "lr")], chart.short, marks=marks),
        *(
            chart.chart(name, [_line(curves, f"metric {name}")], chart.short, marks=marks)
            for name in curves.metrics
        ),
    ]
    found = "".join(drawn)
    if not found:
        return '<p class="soft">No step was made, so there are no curves.</p>'
    return f'<h2>Curves</h2><div class="charts">{found}</div>{_notes(curves)}'


def _line(curves: Curves, series: str, name: str = "", color: int = 0) -> Line:
    points = curves.of(series).points
    is_of_each_step = series in OF_STEPS or series.startswith("wait ")
    has_dots = not is_of_each_step and len(points) <= _FEW_POINTS
    return Line(name, points, color, has_dots=has_dots)


def _tier_lines(state: RunState, curves: Curves) -> list[Line]:
    """Return the buffers of rank 0 by tier, each with its plan."""
    names = {"device": "buffers on the device", "host": "host memory", "disk": "disk"}
    if (state.start or {}).get("device") == "cpu":
        names["device"] = "buffers in memory"
    return [
        replace(_line(curves, tier, names[tier], color), level=curves.planned.get(tier))
        for color, tier in enumerate(_TIERS)
    ]


def _memory_chart(title: str, lines: Sequence[Line], marks: Sequence[int]) -> str:
    sizes = [value for line in lines for value in (*line.values, line.level or 0.0)]
    unit = formatting.Unit.of(sizes, least=1)
    return chart.chart(
        title,
        lines,
        lambda value, digits: f"{value / unit.num_bytes:.{max(digits, 6)}g} {unit.name}",
        unit=float(unit.num_bytes),
        from_zero=True,
        marks=marks,
    )


def _notes(curves: Curves) -> str:
    """Return what a reader of the curves should know, where there is such a thing."""
    notes = []
    for series, name in (("loss", "loss"), ("grad_norm", "gradient norm")):
        number = curves.of(series).num_lacking
        if number:
            notes.append(
                f"the {name} was not a finite number in {several(number, 'step')}: red marks"
            )
    if curves.went_on:
        after = ", ".join(map(str, curves.went_on))
        notes.append(f"resumed after step {after}: dotted lines")
    if curves.is_sampled:
        notes.append("events.jsonl is long: the curves are of evenly spaced parts of it")
    return f'<p class="soft">{escape("; ".join(notes))}.</p>' if notes else ""


def _pipeline(state: RunState) -> Iterable[str]:
    """Return the recorded step of a pipeline."""
    drawn = stages.picture(state)
    if drawn:
        yield f"<h2>Step {state.schedules[0]['step']} in the pipeline</h2>"
        yield drawn


def _memory(facts: Facts, state: RunState, curves: Curves) -> Iterable[str]:
    """Return the table of what each rank holds, by tier, beside the plan."""
    ranks = sorted(state.memory)[:_RANKS_SHOWN]
    if not ranks:
        return
    held = {}
    for rank in ranks:
        planned = curves.planned if rank == 0 else {}
        held[rank] = held_by_tier(state.memory[rank], planned)
    tiers = [tier for tier in _TIERS if any(tier in of_rank for of_rank in held.values())]
    on_gpu = any(state.memory[rank].get("device_reserved") is not None for rank in ranks)
    head = ["rank", "host"]
    if facts.places:
        head.append("place")
    for tier in tiers:
        head += [f"{tier}, planned", "measured"]
    if on_gpu:
        head += ["held by torch", "fragmented"]
    head.append("process, at most")
    rows = []
    for rank in ranks:
        event = state.memory[rank]
        cells = [str(rank), facts.hosts[rank] if rank < len(facts.hosts) else "?"]
        if facts.places:
            cells.append(facts.places[rank] if rank < len(facts.places) else "?")
        for tier in tiers:
            measured, planned_bytes = held[rank].get(tier, (None, None))
            cells += [_size(planned_bytes), _size(measured)]
        if on_gpu:
            cells += [_size(event.get("device_reserved")), _size(event.get("device_fragmented"))]
        cells.append(_size(event.get("peak_rss_bytes")))
        rows.append(html.row(cells))
    yield "<h2>Memory by rank</h2>"
    yield html.table(head, rows)
    left = len(state.memory) - len(ranks)
    if left:
        yield f'<p class="soft">{left} more ranks are in events.jsonl.</p>'


def _moved(state: RunState) -> Iterable[str]:
    """Return the table of the bytes that the newest step moved between tiers, and its waits."""
    if not state.step.tiers:
        return
    rows = []
    for tier, use in state.step.tiers.items():
        for way, words in (("read", "read from"), ("written", "written to")):
            sizes = _sum(use["planned"][way]), _sum(use["moved"][way])
            rows.append(html.row([f"{words} {tier}", *map(format_size, sizes)]))
    yield f"<h2>Bytes between tiers in step {state.step.step}, rank 0</h2>"
    yield html.table(("", "planned", "measured"), rows)


def _traffic(state: RunState) -> Iterable[str]:
    """Return the table of what rank 0 has sent in this launch, by kind of collective."""
    traffic = (state.end or {}).get("traffic") or {}
    if not traffic:
        return
    rows = [
        html.row([kind, _size(each.get("expected_bytes")), _size(each.get("measured_bytes"))])
        for kind, each in traffic.items()
    ]
    yield "<h2>Sent by rank 0 in this launch</h2>"
    yield html.table(("collective", "in theory", "measured"), rows)


def _origin(state: RunState) -> str:
    versions = (state.start or {}).get("versions") or {}
    found = [f"{name} {version}" for name, version in versions.items()]
    written = time.strftime("written %Y-%m-%d %H:%M:%S", time.localtime())
    return " · ".join([written, *found, "every number is in events.jsonl beside this page"])


def _sum(sizes: Mapping[str, Any]) -> int:
    return sum(sizes.values())


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_size(num_bytes)
