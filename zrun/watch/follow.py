"""Keeps the state of a run current from its events, records them, and shows them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby

from zrun.system.output import notify
from zrun.watch.phases import Doing
from zrun.watch.run_state import RunState, fold, fold_memory
from zrun.watch.screen import Nothing, Screen
from zrun_core.errors import ZrunError
from zrun_core.spine.events import Event, encode


class Follower:
    """Takes events in, and in each turn records and shows those that came.

    Thousands of ranks may tell of themselves in a turn: their `memory` events become one change of
    the state.
    """

    def __init__(self, screen: Screen, record: Callable[[Sequence[bytes]], None]) -> None:
        self.state = RunState()
        """Begin to follow a run.

        Args:
            screen: shows each event, and the state in each turn.
            record: gets the events' lines before the screen: what a person saw is in the file.
        """
        self._screen = screen
        self._record = record
        self._new: list[Event] = []
        self._lines: list[bytes] = []
        self._opened = time.monotonic()

    def event(self, event: Event, line: bytes | None = None) -> None:
        """Take in an event.

        Args:
            line: its text, where there is one that can be recorded as it is.
        """
        self._new.append(event)
        self._lines.append(encode(event) if line is None else line)

    def turn(self, doing: Doing | None = None) -> None:
        """Record and show what has come.

        Args:
            doing: what the run is waiting for.
        """
        self._take_in()
        self.state = replace(self.state, doing=doing)
        with self._drawing():
            self._screen.turn(self.state)

    def close(self) -> None:
        self._take_in()
        self.state = replace(self.state, doing=None)
        with self._drawing():
            self._screen.close(self.state)

    def _take_in(self) -> None:
        self.state = replace(self.state, elapsed_s=time.monotonic() - self._opened)
        new = self._new
        lines = self._lines
        self._new = []
        self._lines = []
        if lines:
            self._record(lines)
        for is_memory, group in groupby(new, lambda event: event.get("type") == "memory"):
            events = list(group)
            if is_memory:
                self.state = fold_memory(self.state, events)
                self._show(events)
                continue
            for event in events:
                self.state = fold(self.state, event)
                self._show([event])

    def _show(self, events: Sequence[Event]) -> None:
        with self._drawing():
            for event in events:
                self._screen.show(self.state, event)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # The terminal or the reader of a pipe is gone. Training is not.
            self._screen = Nothing()
        except ZrunError:  # a signal ends the run
            raise
        except Exception as error:  # a mistake in drawing is worth no run
            with suppress(Exception):
                self._screen.close(self.state)  # which gives the terminal back first
            self._screen = Nothing()
            notify(f"warning: the screen is off from here on: {type(error).__name__}: {error}")
