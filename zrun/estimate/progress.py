"""How far an estimate is, for those who wait: on a terminal a line that changes, else a line now
and then.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from zrun.watch import formatting

if TYPE_CHECKING:
    from rich.status import Status

    from zrun_core.plan.answer.search import SearchState

_BETWEEN_LINES_S = 15.0  # where they are not overwritten
_TICK_S = 0.5


class Progress:
    """Tells of an estimate that is being made, while it is entered.

    with Progress("estimating job.yaml") as progress:
        answer(question, "best", watch=progress.watch)
    """

    def __init__(
        self,
        doing: str,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._doing = doing
        self._out = sys.stderr if out is None else out
        self._clock = clock
        self._start_s = self._told_s = clock()
        self._state: SearchState | None = None
        self._status: Status | None = None
        self._is_over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def watch(self, state: SearchState) -> None:
        """Take note of where a search stands."""
        self._state = state

    def line(self) -> str:
        """Return where it stands: `estimating job.yaml, 12s: tracing tp 2 (1 of 3), ...`."""
        elapsed = formatting.duration(self._clock() - self._start_s)
        parts = [f"{self._doing}, {elapsed}"]
        state = self._state
        if state is None:
            return parts[0]
        if state.way:
            parts.append(f"tracing one of {state.tp} ranks ({state.way} of {state.ways} ways)")
        if state.considered:
            parts.append(f"{state.tried:,} of {state.considered:,} configurations estimated")
        if state.best is not None:
            step = formatting.seconds(state.best.time.seconds)
            parts.append(f"best so far {step}: {state.best.candidate}; Ctrl-C keeps it")
        return f"{parts[0]}: {'; '.join(parts[1:])}"

    def tell(self) -> None:
        """Show where it stands, if it is time."""
        if self._status is not None:
            self._status.update(self.line())
        elif self._clock() - self._told_s >= _BETWEEN_LINES_S:
            self._told_s = self._clock()
            print(self.line(), file=self._out, flush=True)

    def _tick(self) -> None:
        while not self._is_over.wait(_TICK_S):
            self.tell()

    def __enter__(self) -> Self:
        if self._out.isatty():
            from zrun.watch.console import open_console

            self._status = open_console(self._out).status(self.line())
            self._status.start()
        self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._ticker.join()
        if self._status is not None:
            self._status.stop()
