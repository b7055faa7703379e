"""`zrun compare`: runs side by side."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    pass


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...",
            help="Run directories, run ids or prefixes, or job names: their newest runs.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show in which keys runs differ, and what they came to: losses, speed, memory.

    Example: zrun compare 20260102 20260103
    """
    import json

    from zrun.runs.listing import find_run
    from zrun.watch.compared import read_compared
    from zrun.watch.comparison import comparison_table, to_json
    from zrun.watch.console import print_table
    from zrun_core.errors import JobError

    if len(runs) < 2:
        raise JobError("zrun compare: name two runs or more; zrun ps --all lists them")
    paths = [find_run(run) for run in runs]
    compared = read_compared(paths)
    if as_json:
        print(json.dumps(to_json(compared), indent=2))
        return
    print_table(sys.stdout, comparison_table(compared))
