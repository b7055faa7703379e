"""`zrun stop`: ask a run to end, wait until it has, and print how."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from zrun.flags import MOST_SECONDS, is_finite

if TYPE_CHECKING:
    from zrun.runs.listing import RunSummary


def stop(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run directory, a run id or prefix, or a job name.",
            show_default=False,
        ),
    ],
    now: Annotated[
        bool, typer.Option("--now", help="End the workers at once; nothing is saved.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=MOST_SECONDS,
            callback=is_finite,
            metavar="SECONDS",
            help="How long to wait.",
            show_default="limits.stop_s + 30, and the end of a save",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be done.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Let a run finish its step, save and end; wait until it is gone.

    Example: zrun stop gpt

    Exit codes: 0 it does not run any more; 2 there is no such run; 3 its
    launcher is on another machine; 6 it still runs when the time is over; the
    run's own if it failed while it ended.
    """
    import json

    from zrun.launch import stop_request
    from zrun.runs.listing import RunStatus, find_run, is_script, read_run

    found = read_run(find_run(run, running=True))
    was_running = found.state is RunStatus.RUNNING
    if was_running and dry_run:
        process = stop_request.launcher_of(found)
        which = "the second" if now else "a first"
        print(f"would send {which} signal to process {process.pid} of run {found.run_id}")
        return
    if was_running:
        if found.holder is not None and not as_json:
            how = "ending the workers" if now else "finishing the step"
            if is_script(found.path) and not now:
                how = "its ranks get SIGTERM"
            print(f"run {found.run_id} of {found.job}, {found.holder}: {how}", file=sys.stderr)
        stop_request.stop(found, now, timeout)
        found = read_run(found.path)
    if as_json:
        print(json.dumps(found.to_json() | {"was_running": was_running}, indent=2))
    else:
        print(_end(found) if was_running else f"run {found.run_id} was not running: {_end(found)}")
    if was_running and found.state is RunStatus.FAILED:
        raise typer.Exit(found.exit_code or 1)


def _end(run: RunSummary) -> str:
    """Return one line about how it ended."""
    from zrun.runs.listing import RunStatus, is_script
    from zrun_core.errors import ExitCode

    of_script = is_script(run.path)
    after = f" after step {run.step}" if run.step else " before the first step ended"
    if of_script and not run.step:
        after = ""
    match run.state:
        case RunStatus.STOPPED:
            saved = ", not saved"
            if of_script:
                saved = ""  # nobody knows
            elif run.exit_code == ExitCode.STOPPED:
                saved = ", saved: continue with --resume auto"
            return f"stopped{after}, exit code {run.exit_code}{saved}"
        case RunStatus.FAILED:
            return f"failed{after} (exit code {run.exit_code}): {run.headline}"
        case RunStatus.VANISHED:
            return f"ended{after}; its launcher was killed, so the cause was not recorded"
        case RunStatus.RUNNING:
            return "another launcher has just taken it over"
    return f"finished{after}"
