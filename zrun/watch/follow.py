"""Keeps the state of a run current from its events, records them, and shows them."""

from __future__ import annotations

from collections.abc import Callable

from zrun.watch.screen import Nothing, Screen
from zrun.watch.state import RunState, fold
from zrun_core.events import Event


class Follower:
    """`record` comes before the screen: what a person saw is in the file."""

    def __init__(self, screen: Screen, record: Callable[[Event], None]) -> None:
        self.state = RunState()
        self._screen, self._record = screen, record

    def event(self, event: Event) -> None:
        self._record(event)
        self.state = fold(self.state, event)
        self._draw(lambda: self._screen.show(self.state, event))

    def turn(self) -> None:
        self._draw(lambda: self._screen.turn(self.state))

    def close(self) -> None:
        self._draw(lambda: self._screen.close(self.state))

    def _draw(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except OSError:
            # The terminal or the reader of a pipe is gone. Training is not.
            self._screen = Nothing()
