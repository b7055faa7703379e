"""Runs as a table for a terminal. Pure: nothing is read here."""

from __future__ import annotations

import time
from collections.abc import Sequence

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
    """A row per run, in the order given."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in ("run", "job", "state", "step", "started", "time", "ranks"):
        right = column in ("step", "time")
        wraps = column in ("job", "ranks")
        table.add_column(
            column,
            justify="right" if right else "left",
            no_wrap=not wraps,
            overflow="fold",
            min_width=4,
        )
    for run in runs:
        code = f" {run.exit_code}" if run.exit_code else ""
        table.add_row(
            run.run_id,
            run.job,
            Text(run.state + code, style=_STYLES.get(run.state, "")),
            _steps(run),
            time.strftime("%m-%d %H:%M", time.localtime(run.started)),
            duration(run.seconds) if run.seconds is not None else "",
            _ranks(run),
        )
    return table


def remarks(runs: Sequence[RunSummary]) -> list[str]:
    """A line for each run of which there is more to say."""
    lines = []
    for run in runs:
        place = "" if reference(run.path) == run.run_id else str(run.path)
        if more := "; ".join(part for part in (place, _more(run)) if part):
            lines.append(f"{run.run_id}: {printable(more)}")
    return lines


def _steps(run: RunSummary) -> str:
    if run.step is None and run.total_steps is None:
        return ""
    return f"{run.step or 0}" + (f"/{run.total_steps}" if run.total_steps is not None else "")


def _ranks(run: RunSummary) -> str:
    more = f" +{len(run.hosts) - _SHOWN_HOSTS}" if len(run.hosts) > _SHOWN_HOSTS else ""
    return f"{run.ranks or ''}" + (
        f" on {', '.join(run.hosts[:_SHOWN_HOSTS])}{more}" if run.hosts else ""
    )


def _more(run: RunSummary) -> str:
    match run.state:
        case RunStatus.RUNNING if run.holder is not None and not run.holder.is_here:
            return f"its launcher is {run.holder}"
        case RunStatus.FAILED:
            return run.headline
        case RunStatus.VANISHED:
            return (
                f"its launcher, {run.holder}, was killed"
                if run.holder is not None
                else "its launcher was killed"
            )
    return ""
