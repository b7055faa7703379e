"""`zrun logs`: what the processes of a run printed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def logs(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run directory, a run id or its beginning, or a job.",
            show_default=False,
        ),
    ],
    rank: Annotated[
        str,
        typer.Option(
            "--rank",
            "-r",
            metavar="RANK",
            help="A rank, several (0,4-7), all, messages (of the launcher), launcher, agent.",
        ),
    ] = "all,messages",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends.")
    ] = False,
    grep: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX", help="Only lines in which this is found.", show_default=False
        ),
    ] = None,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines",
            "-n",
            min=0,
            max=10**9,
            help="The last so many.",
            show_default="all; 10 with -f",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each line.")
    ] = False,
) -> None:
    """Print the logs of a run, without what would move the cursor or colour the screen.

    Example: zrun logs gpt -r 3 -f
    """
    import json
    import os
    import re
    import shlex
    import socket

    from zrun.runs.listing import find_run
    from zrun.runs.run_lock import is_held
    from zrun.watch.log_view import shown, sources
    from zrun_core.errors import JobError

    try:
        pattern = re.compile(grep) if grep is not None else None
    except re.error as error:
        raise JobError(f"--grep {grep}: {error}") from None
    path = find_run(run, running=follow)
    found = sources(path, rank)
    last = 10 if lines is None and follow else lines
    tails = [source.tail(last if pattern is None else None) for source in found]
    goes_on = follow and is_held(path)
    for tail in tails if not goes_on else ():
        if not tail.exists:
            elsewhere = tail.source.host not in ("", socket.gethostname())
            far = shlex.join(["ssh", tail.source.host, "cat", str(tail.source.path)])
            where = f"; it is on {tail.source.host}: {far}" if elsewhere else ""
            print(f"{tail.source.name}: no log {tail.source.path}{where}", file=sys.stderr)
    if not tails:
        print(f"no log of this kind in {path / 'logs'}", file=sys.stderr)
    if goes_on:
        print(
            f"following {path.name} until it ends, in {path / 'logs'}; Ctrl-C leaves it running",
            file=sys.stderr,
        )
    printed = set()
    try:
        for name, line in shown(tails, pattern, last, (lambda: is_held(path)) if goes_on else None):
            printed.add(name)
            if as_json:
                line = json.dumps({"source": name, "line": line})
            elif len(tails) > 1:
                line = f"{name}: {line}"
            sys.stdout.buffer.write(
                line.encode(sys.stdout.encoding, errors="backslashreplace") + b"\n"
            )
            if goes_on:
                sys.stdout.flush()
        sys.stdout.flush()
    except BrokenPipeError:  # `head` has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return
    logs_asked = [tail for tail in tails if tail.exists and not tail.source.is_record]
    if (
        logs_asked
        and pattern is None
        and last != 0
        and printed.isdisjoint(tail.source.name for tail in logs_asked)
    ):
        who = (
            logs_asked[0].source.name
            if len(logs_asked) == 1
            else f"any of {len(logs_asked)} processes"
        )
        print(f"nothing has been printed so far by {who}: see {path / 'logs'}", file=sys.stderr)
