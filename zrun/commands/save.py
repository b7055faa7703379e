"""`zrun save`: have a run save now and train on, and print where the step is."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from zrun.flags import MOST_SECONDS, is_finite
from zrun_core.spine.printable import printable


def save(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run directory, a run id or prefix, or a job name.",
            show_default=False,
        ),
    ],
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=MOST_SECONDS,
            callback=is_finite,
            metavar="SECONDS",
            help="How long to wait.",
            show_default="limits.save_s",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be done.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Let a run save at the end of its step and train on; wait until the step is on the disk.

    Example: zrun save gpt

    Exit codes: 0 it is saved; 2 there is no such run, it does not run, or its
    job has no checkpoint; 3 its launcher is on another machine, or no rank
    trains yet; 6 it is not saved when the time is over; 8 it could not be
    saved, or the run ended before; the run's own if it failed.
    """
    import json

    from zrun.launch import save_request, stop_request
    from zrun.runs.listing import find_run, read_run
    from zrun.watch import formatting
    from zrun_core.sizes import format_size

    found = read_run(find_run(run, running=True))
    save_request.check(found)  # before anything is said
    if dry_run:
        process = stop_request.launcher_of(found, "save")
        print(
            f"would ask process {process.pid} of run {found.run_id} to save at the end of the step"
        )
        return
    if found.holder is not None and not as_json:
        print(
            f"run {found.run_id} of {found.job}, {found.holder}: saving at the end of the step",
            file=sys.stderr,
        )
    try:
        saved = save_request.save(
            found, stop_request.limits_of(found.path).save_s if timeout is None else timeout
        )
    except save_request.RunEndedError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise typer.Exit(error.run.exit_code or error.exit_code) from None
    if as_json:
        print(json.dumps(read_run(found.path).to_json() | {"saved": saved.to_json()}, indent=2))
    else:
        size = format_size(saved.bytes)
        took = formatting.seconds(saved.seconds)
        print(f"saved step {saved.step} ({size}, {took}): {saved.path}")
