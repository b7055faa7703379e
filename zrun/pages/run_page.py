"""The report of a run as one page: how it ended, curves over its steps, ranks beside their plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from html import escape

from zrun.pages import (
    bars,
    chart,
    document,
    outcome,
    pipeline,
    run_history,
    run_tables,
    traffic_tables,
)
from zrun.pages.outcome import Outcome
from zrun.pages.run_curves import (
    curves_of_memory,
    curves_of_metrics,
    curves_of_times,
    curves_of_training,
)
from zrun.pages.run_gpus import charts_of_gpus, findings, gpus_table
from zrun.pages.run_job import job_keys
from zrun.runs.launches import read_launches
from zrun.watch import formatting
from zrun.watch.panel_layout import Facts
from zrun.watch.pushes import numerics_in_words
from zrun.watch.report import report_rows
from zrun.watch.run_record import RunRecord
from zrun.watch.run_state import RunState
from zrun_core.sizes import several

_HOSTS_SHOWN = 8
_STYLE = chart.STYLE + bars.STYLE + outcome.STYLE + pipeline.STYLE


def page(record: RunRecord, ended: Outcome) -> str:
    """Return the whole file.

    Args:
        ended: how its newest launch ended, or that it goes on.
    """
    facts, state, history = record.facts, record.state, record.history
    launches = ended.of_newest(read_launches(record.run_dir))
    parts: list[tuple[str, Callable[[], str]]] = [
        ("Curves", lambda: curves_of_training(record)),
        ("Your own metrics", lambda: curves_of_metrics(record)),
        (
            "Report",
            lambda: document.facts([*report_rows(state), *findings(record), *_origin(record)]),
        ),
        (
            "Memory",
            lambda: (
                curves_of_memory(record)
                + run_tables.memory_bars(record)
                + run_tables.memory_table(record)
                + run_tables.moved(state)
            ),
        ),
        (
            "Time of a step",
            lambda: (
                run_tables.split_bars(record)
                + run_tables.stragglers(record)
                + curves_of_times(record)
            ),
        ),
        ("GPUs", lambda: charts_of_gpus(record) + gpus_table(record)),
        (_pipeline_title(state), lambda: pipeline.picture(state)),
        ("Staleness of pushes", lambda: run_tables.staleness(state)),
        (
            "Sent along each axis by rank 0 in the newest launch",
            lambda: traffic_tables.traffic(state),
        ),
        ("Launches", lambda: run_history.launches_table(launches, history)),
        ("Saved steps", lambda: run_history.saves_table(history)),
        ("Warnings", lambda: run_history.notices_table(history)),
        ("Job", lambda: job_keys(record.run_dir)),
    ]
    body = [
        f"<h1>{escape(facts.name)}</h1>",
        document.soft(_what_ran(facts, state)),
        ended.html(),
        *(_part(title, make) for title, make in parts),
        document.soft(_written(record)),
    ]
    return document.whole(f"{facts.name} {facts.run_id}", filter(None, body), _STYLE)


def _part(title: str, make: Callable[[], str]) -> str:
    """Return a part of the page; empty where there is nothing to show.

    A record may be of another version, or damaged: what it makes impossible to draw says so, and
    the other parts are there.
    """
    try:
        inside = make()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        inside = document.soft(f"This cannot be drawn from the record: {why[:200]}")
    return f"<h2>{escape(title)}</h2>\n{inside}" if inside else ""


def _what_ran(facts: Facts, state: RunState) -> str:
    """Return `run 20260102-030405-ab12 · 2 ranks on localhost · cpu · ZeRO 2 · bf16`."""
    hosts = list(dict.fromkeys(host for host in facts.hosts if host))
    names = ", ".join(hosts[:_HOSTS_SHOWN])
    if len(hosts) > _HOSTS_SHOWN:
        names += f" and {len(hosts) - _HOSTS_SHOWN} more hosts"
    ranks = several(facts.num_ranks, "rank")
    words = [f"run {facts.run_id}", f"{ranks} on {names}" if names else ranks]
    if start := state.start:
        words += [str(start["device"])] if start.get("device") else []
        if start.get("stage") is not None:
            words.append(f"ZeRO stage {start['stage']}")
        words += [str(start["precision"])] if start.get("precision") else []
        if isinstance(start.get("params"), int):
            words.append(f"{formatting.count(start['params'])} parameters")
        words += filter(None, [numerics_in_words(start)])
    return " · ".join(words)


def _pipeline_title(state: RunState) -> str:
    recorded = state.schedules.get(0) or {}
    return f"Step {recorded.get('step')} in the pipeline"


def _origin(record: RunRecord) -> list[tuple[str, str]]:
    """Return the checkpoint that the newest launch went on from, and the versions."""
    start = record.state.start or {}
    rows = []
    if resumed := start.get("resumed"):
        rows.append(("start", f"after step {resumed['step']} of {resumed.get('path')}"))
    versions = start.get("versions") or {}
    rows.append(("versions", ", ".join(f"{name} {each}" for name, each in versions.items())))
    rows += [("note", str(note)) for note in start.get("notes") or ()]
    return [(name, text) for name, text in rows if text]


def _written(record: RunRecord) -> str:
    words = [time.strftime("written %Y-%m-%d %H:%M:%S"), "every number is in events.jsonl"]
    if record.num_skipped:
        words.append(f"skipped of it, as no events: {several(record.num_skipped, 'line')}")
    return " · ".join(words)
