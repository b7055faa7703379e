"""`zrun ps`: list runs and their states."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def ps(
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Show runs of earlier days, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List active runs and those of today: in ./runs, and your others on this machine.

    Example: zrun ps --all
    """
    import json
    import time

    from zrun.runs.listing import list_runs

    midnight = time.mktime((*time.localtime()[:3], 0, 0, 0, 0, 0, -1))
    runs, num_others = list_runs(None if everything else midnight)
    if as_json:
        print(json.dumps([run.to_json() for run in runs], indent=2))
        return
    if runs:
        from zrun.watch.console import open_console
        from zrun.watch.runs_table import remarks, runs_table

        console = open_console(sys.stdout)
        console.print(runs_table(runs))
        for remark in remarks(runs):
            console.print(remark, markup=False)
    else:
        print(
            "no run is active, and none began today" if num_others else "no runs in ./runs",
            file=sys.stderr,
        )
    if num_others:
        others = "1 earlier run" if num_others == 1 else f"{num_others} earlier runs"
        print(f"{others}: zrun ps --all", file=sys.stderr)
