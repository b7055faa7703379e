"""`zrun profile`: have a run trace its next steps, and print where their time goes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from zrun.flags import MOST_SECONDS, is_finite
from zrun_core.spine.printable import printable

_DIGITS = 6  # of a rank


def profile(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run directory, a run id or prefix, or a job name.",
            show_default=False,
        ),
    ],
    steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many steps, from the next one on.")
    ] = 3,
    ranks: Annotated[str, typer.Option(metavar="LIST", help="Ranks to trace, as in 0,1.")] = "0",
    timeout: Annotated[
        float,
        typer.Option(
            min=0,
            max=MOST_SECONDS,
            callback=is_finite,
            metavar="SECONDS",
            help="How long to wait.",
        ),
    ] = 600.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be done.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Trace the next steps of a run, for Perfetto, and train on.

    Print what took the most time, and how long ranks waited for each other.

    Example: zrun profile gpt --steps 3 --ranks 0,1

    Exit codes: 0 the traces are written; 2 there is no such run, it does not
    run, has no such ranks or steps, or takes no profile now; 3 its launcher is
    on another machine, or no rank trains yet; 6 the time is over; 8 the run
    ended before; the run's own if it failed.
    """
    import json

    from zrun.launch import profile_request, stop_request
    from zrun.runs.listing import find_run, read_run
    from zrun.watch.profile_table import profile_text

    chosen = _ranks(ranks)
    found = read_run(find_run(run, running=True))
    profile_request.check(found, steps, chosen)  # before anything is said
    which = f"{steps} steps" if steps > 1 else "1 step"
    if dry_run:
        process = stop_request.launcher_of(found, "profile")
        of_ranks = ", ".join(map(str, chosen))
        print(
            f"would ask process {process.pid} of run {found.run_id} to trace {which} on rank "
            f"{of_ranks}"
        )
        return
    if found.holder is not None and not as_json:
        print(
            f"run {found.run_id} of {found.job}, {found.holder}: tracing {which}", file=sys.stderr
        )
    try:
        events = profile_request.profile(found, steps, chosen, timeout)
    except profile_request.RunEndedError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise typer.Exit(error.run.exit_code or error.exit_code) from None
    if as_json:
        print(json.dumps(events, indent=2))
        return
    print("\n\n".join(map(profile_text, events)))


def _ranks(text: str) -> list[int]:
    """Return the ranks of a list such as 0,1, each once.

    Raises:
        BadParameter: it is no such list.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) <= _DIGITS for word in words):
        raise typer.BadParameter("write numbers with commas: 0,1", param_hint="--ranks")
    return sorted(set(map(int, words)))
