"""`zrun top`: a run on the whole terminal, while it goes on and afterwards."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from zrun.watch.recording import Recording


def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run directory, a run id or its beginning, or a job.",
            show_default="the run that goes on; else this machine",
        ),
    ] = None,
    view: Annotated[
        str | None,
        typer.Option(
            metavar="VIEW",
            help="Print one view and exit: overview, ranks, memory, stages, hosts, messages.",
            show_default="overview, where the output is no terminal",
        ),
    ] = None,
) -> None:
    """Watch a run from another terminal, or look back at one that is over.

    It reads the run's record: nothing listens, and the run does not notice.

    Example: zrun top gpt
    """
    import os
    import time

    from zrun.runs.listing import find_run, list_runs, read_run
    from zrun.runs.run_lock import is_held
    from zrun.top.app import run_on_machine, run_top
    from zrun.watch.console import open_console
    from zrun.watch.recording import Recording

    is_screen = (
        view is None
        and sys.stdin.isatty()
        and sys.stdout.isatty()
        and os.environ.get("TERM") != "dumb"
    )
    console = open_console(sys.stdout)
    path = find_run(run, running=True) if run is not None else _the_one_that_goes_on()
    if path is None:
        midnight = time.mktime((*time.localtime()[:3], 0, 0, 0, 0, 0, -1))
        if is_screen:
            run_on_machine(lambda: list_runs(midnight)[0], sys.stdin, console)
        else:
            _print_machine()
        return
    recording = Recording(path)
    if is_screen:
        run_top(
            recording,
            lambda folder: "running" if is_held(folder) else str(read_run(folder).state),
            sys.stdin,
            console,
        )
        return
    _print_view(recording, view or "overview")


def _the_one_that_goes_on() -> Path | None:
    """Return the run that goes on here, if there is exactly one."""
    from zrun.runs.listing import run_dirs
    from zrun.runs.run_lock import is_held

    held = [path for path in run_dirs() if is_held(path)]
    return held[0] if len(held) == 1 else None


def _print_view(recording: Recording, name: str) -> None:
    """Print one picture, as wide as the terminal or 100 columns.

    Raises:
        JobError: there is no such view.
    """
    from zrun.top.machine import MachineWatch
    from zrun.top.views import VIEWS, Scene
    from zrun.watch.console import open_console
    from zrun.watch.panel_layout import PanelSpace
    from zrun.watch.preface import width_of
    from zrun_core.errors import JobError

    known = {each.name: each for each in VIEWS}
    if name not in known:
        raise JobError(f"--view {name}: write one of {', '.join(known)}")
    recording.read()
    console = open_console(sys.stdout)
    room = PanelSpace(
        width_of(sys.stdout) or 100, 60, not console.encoding.lower().startswith("utf")
    )
    scene = Scene(
        recording.now.state,
        recording.facts,
        recording.curves,
        None,
        list(recording.messages),
        MachineWatch().look() if name == "hosts" else None,
    )
    for line in known[name].lines(scene, room):
        line.rstrip()
        console.print(line, soft_wrap=True)


def _print_machine() -> None:
    from zrun.top.machine import MachineWatch
    from zrun.top.views import machine
    from zrun.watch.console import open_console
    from zrun.watch.panel_layout import PanelSpace

    console = open_console(sys.stdout)
    room = PanelSpace(100, 60, not console.encoding.lower().startswith("utf"))
    for line in machine(MachineWatch().look(), room):
        console.print(line, soft_wrap=True)
