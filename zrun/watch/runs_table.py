"""Runs as a table for a terminal. Pure: nothing is read here."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from zrun.runs.listing import RunStatus, RunSummary, reference
from zrun.watch.formatting import duration
from zrun_core.spine.printable import printable

_STYLES = {
    RunStatus.RUNNING: "green",
    RunStatus.FAILED: "red",
    RunStatus.VANISHED: "red",
    RunStatus.STOPPED: "yellow",
}
_SHOWN_HOSTS = 2


def runs_table(runs: Sequence[RunSummary]) -> Table:
    """Return a table with a row per run, in the order given."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    columns = ["run", "job", "state", "step", "loss", "started", "time", "left", "ranks"]
    if all(run.left_s is None for run in runs):
        columns.remove("left")
    for column in columns:
        justify: JustifyMethod = "left"
        if column in ("step", "loss", "time", "left"):
            justify = "right"
        wraps = column in ("job", "ranks")
        table.add_column(column, justify=justify, no_wrap=not wraps, overflow="fold", min_width=4)
    for run in runs:
        cells: dict[str, str | Text] = {
            "run": run.run_id,
            "job": run.job,
            "state": _state(run),
            "step": _steps(run),
            "loss": "" if run.loss is None else f"{run.loss:.4g}",
            "started": time.strftime("%m-%d %H:%M", time.localtime(run.started)),
            "time": _seconds(run.seconds),
            "left": _seconds(run.left_s),
            "ranks": _ranks(run),
        }
        table.add_row(*(cells[column] for column in columns))
    return table


def remarks(runs: Sequence[RunSummary]) -> list[str]:
    """Return a line for each run of which there is more to say."""
    lines = []
    for run in runs:
        place = ""
        if reference(run.path) != run.run_id:
            place = str(run.path)
        if more := "; ".join(part for part in (place, _more(run)) if part):
            lines.append(f"{run.run_id}: {printable(more)}")
    return lines


def _steps(run: RunSummary) -> str:
    if run.step is None and run.total_steps is None:
        return ""
    if run.total_steps is None:
        return f"{run.step}"
    return f"{run.step or 0}/{run.total_steps}"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _state(run: RunSummary) -> Text:
    words: str = run.state
    if run.exit_code:
        words += f" {run.exit_code}"
    return Text(words, style=_STYLES.get(run.state, ""))


def _ranks(run: RunSummary) -> str:
    words = f"{run.ranks or ''}"
    if run.hosts:
        words += f" on {', '.join(run.hosts[:_SHOWN_HOSTS])}"
    if len(run.hosts) > _SHOWN_HOSTS:
        words += f" +{len(run.hosts) - _SHOWN_HOSTS}"
    return words


def _more(run: RunSummary) -> str:
    match run.state:
        case RunStatus.RUNNING if run.holder is not None and not run.holder.is_here:
            return f"its launcher is {run.holder}"
        case RunStatus.FAILED:
            return run.headline
        case RunStatus.VANISHED:
            if run.holder is None:
                return "its launcher was killed"
            return f"its launcher, {run.holder}, was killed"
    return ""
