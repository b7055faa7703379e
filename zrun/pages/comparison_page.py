"""Runs side by side as one page: keys that differ, their curves in one chart each, what came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from zrun.job.hidden import may_be_secret
from zrun.pages import chart, document
from zrun.pages.chart import Line
from zrun.pages.document import NUM_COLORS
from zrun.pages.run_curves import line, memory_chart, speed_of
from zrun.watch.comparison import ComparedRun, Row, cell, rows
from zrun_core.sizes import several

MOST_RUNS = NUM_COLORS  # a chart tells no more of them apart
_MOST_METRICS = 20
_THINNEST, _THINNER, _WIDEST = 1.3, 1.3, 5.0  # lines


def page(runs: Sequence[ComparedRun]) -> str:
    """Return the whole file, for two runs or more that have told of something."""
    made = rows(runs)
    title = f"{several(len(runs), 'run')} side by side"
    body = [
        f"<h1>{title}</h1>",
        _key(runs),
        "<h2>Keys that differ</h2>",
        _keys(runs, [row for row in made if row.is_key]),
        "<h2>Curves</h2>",
        _charts(runs),
        *(document.soft(note) for note in _notes(runs)),
        "<h2>Figures</h2>",
        _table(runs, [row for row in made if not row.is_key]),
        document.soft("Behind a number is its ratio to the first run's."),
        document.soft(time.strftime("written %Y-%m-%d %H:%M:%S")),
    ]
    return document.whole(title, body, chart.STYLE)


def _key(runs: Sequence[ComparedRun]) -> str:
    words = "".join(
        f'<span style="background:var(--c{number})"></span>{escape(run.name)} ({run.outcome})'
        for number, run in enumerate(runs)
    )
    return f'<p class="key">{words}</p>'


def _keys(runs: Sequence[ComparedRun], keys: Sequence[Row]) -> str:
    if not any(run.keys for run in runs):
        return document.soft("No job.yaml of them can be read.")
    if not keys:
        return document.soft("None: but for names and logs, the jobs are the same.")
    return _table(runs, [_without_secrets(row) for row in keys])


def _without_secrets(row: Row) -> Row:
    if not any(map(may_be_secret, row.name.split("."))):
        return row
    return row._replace(values=["***" if value is not None else None for value in row.values])


def _table(runs: Sequence[ComparedRun], made: Sequence[Row]) -> str:
    lines = [
        document.row([row.name, *(cell(row, number) for number in range(len(runs)))])
        for row in made
    ]
    return document.table(["", *(run.name for run in runs)], lines, "words")


def _charts(runs: Sequence[ComparedRun]) -> str:
    speeds = sorted({speed_of(run.curves) for run in runs})
    drawn = [
        _chart(runs, "Loss", "loss"),
        _chart(runs, "Evaluation", "eval loss"),
        _chart(runs, "Gradient norm", "grad_norm"),
        *(_chart(runs, f"{unit} per second", name, from_zero=True) for name, unit in speeds),
        _chart(runs, "Seconds of a step", "step_s"),
        _chart(runs, "Learning rate", "lr"),
        memory_chart("Buffers of rank 0 on its device", _lines(runs, "device"), ()),
        memory_chart("Held by torch on rank 0's GPU", _lines(runs, "torch"), ()),
        memory_chart("Whole process of rank 0", _lines(runs, "process"), ()),
    ]
    names = dict.fromkeys(name for run in runs for name in run.curves.metrics)
    drawn += [_chart(runs, name, f"metric {name}") for name in list(names)[:_MOST_METRICS]]
    found = "".join(drawn)
    if not found:
        return document.soft("None of them has made a step.")
    return f'<div class="charts">{found}</div>'


def _chart(runs: Sequence[ComparedRun], title: str, series: str, *, from_zero: bool = False) -> str:
    return chart.chart(title, _lines(runs, series), chart.short, from_zero=from_zero)


def _lines(runs: Sequence[ComparedRun], series: str) -> list[Line]:
    """Return a line for each run, each thinner than those that it may cover."""
    return [
        replace(
            line(run.curves, series),
            name=run.name,
            color=number,
            width=min(_WIDEST, _THINNEST + _THINNER * (len(runs) - 1 - number)),
        )
        for number, run in enumerate(runs)
    ]


def _last_step(run: ComparedRun) -> int:
    return max((step for step, _ in run.curves.of("step_s").points), default=0)


def _notes(runs: Sequence[ComparedRun]) -> list[str]:
    """Return what a reader of the curves should know, where there is such a thing."""
    last = {
        run.name: max((step for step, _ in run.curves.of("step_s").points), default=0)
        for run in runs
    }
    notes = []
    if len(set(last.values())) > 1:
        ends = ", ".join(f"{name} at step {step}" for name, step in last.items())
        notes.append(f"The curves end where the runs do: {ends}.")
    without = [run.name for run in runs if not run.curves.of("loss").points]
    if without:
        notes.append(f"Without a loss: {', '.join(without)}.")
    for run in runs:
        if number := run.curves.of("loss").num_lacking:
            steps = several(number, "step")
            notes.append(f"The loss of {run.name} was not a finite number in {steps}: red marks.")
    return notes
