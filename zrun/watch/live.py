"""The panel at the bottom of a terminal; messages scroll away above it."""

from __future__ import annotations

import time

from rich.console import Console
from rich.panel import Panel

from zrun.watch.console import knows_ascii_only
from zrun.watch.panel import WIDEST, panel
from zrun.watch.panel_layout import Facts
from zrun.watch.pinned import Pinned
from zrun.watch.plain import message_line
from zrun.watch.run_state import RunState
from zrun_core.spine.events import Event

_SHARE = 0.04  # of a core, for drawing


class Live:
    """Draws the panel again and again, in a small share of a core.

    A frame takes 10 ms of the launcher's time, with thousands of ranks twice that, and 5 KB of an
    ssh line's.
    """

    def __init__(self, console: Console, facts: Facts, period_s: float) -> None:
        """Draw the first frame.

        Args:
            period_s: seconds between two frames; more where drawing takes too much of a core.
        """
        self._console = console
        self._facts = facts
        self._period_s = period_s
        self._ascii_only = knows_ascii_only(console)
        self._due = 0.0
        self._state = RunState()
        self._pinned = Pinned(console, self._panel)
        self._pinned.start()
        self._draw(self._state)

    def show(self, state: RunState, event: Event) -> None:
        line = message_line(event)
        if line is not None:
            self._console.print(line, markup=False, highlight=False)

    def turn(self, state: RunState) -> None:
        if time.monotonic() >= self._due:
            self._draw(state)

    def close(self, state: RunState) -> None:
        """Leave the last frame in the scrollback."""
        self._state = state
        self._pinned.stop()

    def _draw(self, state: RunState) -> None:
        self._state = state
        start = time.monotonic()
        busy = time.thread_time()
        self._pinned.refresh()
        self._due = start + max(self._period_s, (time.thread_time() - busy) / _SHARE)

    def _panel(self, width: int, height: int) -> Panel:
        columns = min(width, WIDEST)
        return panel(self._state, self._facts, columns, height, ascii_only=self._ascii_only)
