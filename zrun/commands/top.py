"""`zrun top`: a run on the whole terminal, while it goes on and afterwards."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.text import Text

    from zrun.watch.panel_layout import PanelSpace
    from zrun.watch.recording import Recording


def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run directory, a run id or prefix, or a job name.",
            show_default="the running one; else this machine",
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
    from zrun.top.machine import MachineWatch
    from zrun.top.views import VIEWS, machine
    from zrun.watch.console import open_console
    from zrun.watch.recording import Recording
    from zrun_core.errors import JobError

    names = [each.name for each in VIEWS]
    if view is not None and view not in names:
        raise JobError(f"--view {view}: write one of {', '.join(names)}")
    can_draw = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    is_screen = can_draw and view is None
    console = open_console(sys.stdout)
    path = find_run(run, running=True) if run is not None else _the_one_that_goes_on()
    if path is None and view is not None:
        raise JobError(f"--view {view}: name a run (zrun ps): none is running, or several are")
    if path is None and is_screen:
        midnight = time.mktime((*time.localtime()[:3], 0, 0, 0, 0, 0, -1))
        run_on_machine(lambda: list_runs(midnight)[0], sys.stdin, console)
    elif path is None:
        _print(machine(MachineWatch().look(), _room(console)), console)
    elif is_screen:
        run_top(
            Recording(path),
            lambda folder: "running" if is_held(folder) else str(read_run(folder).state),
            sys.stdin,
            console,
        )
    else:
        _print(_drawn(Recording(path), view or "overview", _room(console)), console)


def _the_one_that_goes_on() -> Path | None:
    """Return the run that goes on here, if there is exactly one."""
    from zrun.runs.listing import run_dirs
    from zrun.runs.run_lock import is_held

    held = [path for path in run_dirs() if is_held(path)]
    return held[0] if len(held) == 1 else None


def _drawn(recording: Recording, name: str, room: PanelSpace) -> list[Text]:
    """Return the lines of one view of a run as it is now."""
    from zrun.top.machine import MachineWatch
    from zrun.top.views import VIEWS, Scene

    recording.read()
    scene = Scene(
        recording.now.state,
        recording.facts,
        recording.curves,
        None,
        list(recording.messages),
        MachineWatch().look() if name == "hosts" else None,
    )
    (view,) = (each for each in VIEWS if each.name == name)
    return view.lines(scene, room)


def _room(console: Console) -> PanelSpace:
    """Return the room for what is printed: as wide as the terminal, or 100 columns."""
    from zrun.watch.console import knows_ascii_only
    from zrun.watch.panel_layout import PanelSpace
    from zrun.watch.preface import width_of

    return PanelSpace(width_of(sys.stdout) or 100, 60, knows_ascii_only(console))


def _print(lines: list[Text], console: Console) -> None:
    for line in lines:
        line.rstrip()
        console.print(line, soft_wrap=True)
