"""`zrun compare`: runs side by side."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from zrun.watch.comparison import ComparedRun


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...",
            help="Run directories, run ids or their beginnings, or jobs: their newest runs.",
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
    from zrun.watch.comparison import comparison_table, to_json
    from zrun.watch.console import print_table
    from zrun_core.errors import JobError

    if len(runs) < 2:
        raise JobError("zrun compare: name two runs or more; zrun ps --all lists them")
    paths = [find_run(run) for run in runs]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):  # of several folders
        names = [str(path) for path in paths]
    compared = [_read(path, name) for path, name in zip(paths, names, strict=True)]
    if as_json:
        print(json.dumps(to_json(compared), indent=2))
        return
    print_table(sys.stdout, comparison_table(compared))


def _read(path: Path, name: str) -> ComparedRun:
    """Return a run as its files tell of it; what cannot be read is left out."""
    from contextlib import suppress

    import yaml

    from zrun.job.flat_keys import flat_keys
    from zrun.runs.listing import read_run
    from zrun.watch.comparison import ComparedRun
    from zrun.watch.recording import Recording

    recording = Recording(path)
    recording.read()
    summary = read_run(path)
    keys = {}
    with suppress(OSError, yaml.YAMLError, AttributeError):
        keys = flat_keys(yaml.safe_load((path / "job.yaml").read_text(encoding="utf-8")))
    return ComparedRun(
        name, str(summary.state), keys, recording.now.state, recording.curves, summary.seconds
    )
