"""`report.html` of a launch that has ended, in its run directory."""

from __future__ import annotations

import sys
from pathlib import Path

from zrun.pages.outcome import Outcome
from zrun.pages.run_page import page
from zrun.runs.rundir import PAGE, RunDir
from zrun.system.output import say
from zrun.watch.panel_layout import Facts
from zrun.watch.run_record import read_record
from zrun.watch.run_state import RunState


def write_page(rundir: RunDir, facts: Facts, state: RunState, outcome: Outcome) -> Path | None:
    """Write the page, from the record and from what this launch has told.

    Args:
        state: what the events of this launch have told.

    Returns:
        The file; None if it could not be written. That is a warning: the run's end stays as it is.
    """
    try:
        record = read_record(rundir.path)
        record.facts = facts
        record.state = state
        return rundir.write_page(page(record, outcome))
    except Exception as error:  # whatever it is, what was trained is not worse for it
        reason = (
            error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        )
        say(f"warning: {rundir.path / PAGE} was not written: {reason}", sys.stderr)
        return None
