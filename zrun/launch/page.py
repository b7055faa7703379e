"""`report.html` of a launch that has ended, in its run directory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zrun.runs.rundir import PAGE, RunDir
from zrun.system.output import say
from zrun.watch.curves import read_curves
from zrun.watch.panel_layout import Facts
from zrun.watch.report_page import Outcome, page
from zrun.watch.run_state import RunState


def write_page(
    rundir: RunDir,
    facts: Facts,
    state: RunState,
    outcome: Outcome,
    settings: Callable[[], Sequence[tuple[str, str]]] = tuple,
) -> Path | None:
    """Write the page, from the record and from what this launch has told.

    Args:
        rundir: of the run.
        facts: which run it is.
        state: what the events of this launch have told.
        outcome: how it ended.
        settings: returns what was asked for, by name.

    Returns:
        The file; None if it could not be written. That is a warning: the run's end stays as it is.
    """
    try:
        curves = read_curves(rundir.events)
        return rundir.write_page(page(facts, outcome, state, curves, settings()))
    except Exception as error:  # whatever it is, what was trained is not worse for it
        reason = (
            error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        )
        say(f"warning: {rundir.path / PAGE} was not written: {reason}", sys.stderr)
        return None
