"""`zrun logs`: the logs of a run's processes."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zrun.watch.log_view import LogSource, Tail


def logs(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run directory, a run id or prefix, or a job name.",
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
        bool, typer.Option("--follow", "-f", help="Keep printing until the run ends.")
    ] = False,
    grep: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Only lines that match this regular expression.",
            show_default=False,
        ),
    ] = None,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines",
            "-n",
            min=0,
            max=10**9,
            help="Only the last N lines.",
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
    import os
    import re

    from zrun.runs.listing import find_run
    from zrun.runs.run_lock import is_held
    from zrun.watch.log_view import shown, sources
    from zrun_core.errors import JobError

    try:
        pattern = re.compile(grep) if grep is not None else None
    except re.error as error:
        raise JobError(f"--grep {grep}: {error}") from None
    path = find_run(run, running=follow)
    last = 10 if lines is None and follow else lines
    read_from = last if pattern is None else None  # what matches may lie anywhere
    tails = [source.tail(read_from) for source in sources(path, rank)]
    runs_on: Callable[[], bool] | None = None
    if follow and is_held(path):
        runs_on = partial(is_held, path)
    _tell_what_is_shown(tails, path, goes_on=runs_on is not None)
    printed: set[str] = set()
    try:
        for name, line in shown(tails, pattern, last, runs_on):
            printed.add(name)
            _print(name, line, as_json=as_json, is_named=len(tails) > 1)
            if runs_on is not None:
                sys.stdout.flush()
        sys.stdout.flush()
    except BrokenPipeError:  # `head` has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return
    if pattern is None and last != 0:
        _tell_if_silent(tails, path, printed)


def _tell_what_is_shown(tails: list[Tail], path: Path, *, goes_on: bool) -> None:
    """Say on stderr which logs are missing, or that they are followed."""
    if not tails:
        print(f"no log of this kind in {path / 'logs'}", file=sys.stderr)
    if goes_on:
        told = (
            f"following {path.name} until it ends, in {path / 'logs'}; Ctrl-C stops following, "
            "not the run"
        )
        print(told, file=sys.stderr)
        return
    for tail in tails:
        if not tail.exists:
            print(_why_missing(tail.source), file=sys.stderr)


def _why_missing(source: LogSource) -> str:
    import shlex
    import socket

    missing = f"{source.name}: no log {source.path}"
    if source.host in ("", socket.gethostname()):
        return missing
    command = shlex.join(["ssh", source.host, "cat", str(source.path)])
    return f"{missing}; it is on {source.host}: {command}"


def _print(name: str, line: str, *, as_json: bool, is_named: bool) -> None:
    import json

    if as_json:
        line = json.dumps({"source": name, "line": line})
    elif is_named:
        line = f"{name}: {line}"
    data = line.encode(sys.stdout.encoding, errors="backslashreplace")
    sys.stdout.buffer.write(data + b"\n")


def _tell_if_silent(tails: list[Tail], path: Path, printed: set[str]) -> None:
    """Say so if the logs exist and nothing is in them."""
    names = [tail.source.name for tail in tails if tail.exists and not tail.source.is_record]
    if not names or not printed.isdisjoint(names):
        return
    who = names[0] if len(names) == 1 else f"any of {len(names)} processes"
    print(f"nothing has been printed so far by {who}: see {path / 'logs'}", file=sys.stderr)
