"""The screens of a run, behind one interface: a live panel, plain lines, JSON lines, or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from zrun.watch.console import open_console
from zrun.watch.live import Live
from zrun.watch.panel_layout import Facts
from zrun.watch.plain import Plain
from zrun.watch.run_state import RunState
from zrun.watch.ui import Ui, choose
from zrun_core.spine.events import Event, encode

# between two pictures
PERIOD_S = 0.25
_SSH_PERIOD_S = 0.5


class Screen(Protocol):
    def show(self, state: RunState, event: Event) -> None:
        """Show `event`, which has just become part of `state`."""

    def turn(self, state: RunState) -> None:
        """Show `state` again, if it is time."""

    def close(self, state: RunState) -> None:
        """Show `state` for the last time."""


class Nothing:
    """No screen; what needs no more than one method starts from it."""

    def show(self, state: RunState, event: Event) -> None: ...
    def turn(self, state: RunState) -> None: ...
    def close(self, state: RunState) -> None: ...


class Json(Nothing):
    """Every event as a line of JSON."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, state: RunState, event: Event) -> None:
        print(encode(event).decode(), file=self._out, flush=True)


class ScriptScreen:
    """The lines of a script, and a panel from the moment on at which it begins to tell of steps."""

    def __init__(self, out: TextIO, every: int, open_panel: Callable[[], Screen]) -> None:
        self._now: Screen = Plain(out, every)
        self._open_panel: Callable[[], Screen] | None = open_panel

    def show(self, state: RunState, event: Event) -> None:
        if event.get("type") == "start" and self._open_panel is not None:
            self._now = self._open_panel()
            self._open_panel = None
        self._now.show(state, event)

    def turn(self, state: RunState) -> None:
        self._now.turn(state)

    def close(self, state: RunState) -> None:
        self._now.close(state)


def open_screen(
    ui: Ui,
    facts: Facts,
    every: int,
    out: TextIO,
    environ: Mapping[str, str],
    *,
    is_script: bool = False,
) -> Screen:
    """Open the screen for `ui`.

    Args:
        every: steps between plain lines.
        environ: says what `auto` means, and which colours there are.
        is_script: it may never tell of a step.
    """
    match choose(ui, out.isatty(), environ, shutil.get_terminal_size().columns):
        case Ui.json:
            return Json(out)
        case Ui.none:
            return Nothing()
        case Ui.live:
            period_s = PERIOD_S
            if "SSH_CONNECTION" in environ:
                period_s = _SSH_PERIOD_S

            def open_panel() -> Screen:
                return Live(open_console(out, environ), facts, period_s)

            return ScriptScreen(out, every, open_panel) if is_script else open_panel()
    return Plain(out, every)
