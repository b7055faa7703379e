"""Lines of the launcher outside the screens, for a terminal that may be gone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from zrun_core.errors import ZrunError
from zrun_core.spine.printable import printable


def say(text: str, out: TextIO) -> None:
    """Print the last words of this process, if their reader is still there.

    Where it is not, both streams lead nowhere from then on: Python would end with an exit code of
    its own if its last flush failed.
    """
    try:
        print(printable(text), file=out, flush=True)
    except OSError:
        with open(os.devnull, "wb") as nothing:
            for stream in (1, 2):
                os.dup2(nothing.fileno(), stream)


def notify(text: str) -> None:
    """Print a line to stderr while the run goes on, unless the terminal is gone."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Dispensable:
    """Calls what only tells of a run: where that fails, it is left out from then on, with a note.

    No mistake in it is worth a run.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_left_out = False

    @property
    def is_left_out(self) -> bool:
        return self._is_left_out

    def __call__(self, call: Callable[..., object], *args: object) -> None:
        """Call `call`, unless one of the calls before has failed."""
        if self._is_left_out:
            return
        try:
            call(*args)
        except ZrunError:  # a signal ends the run
            raise
        except Exception as error:
            self._is_left_out = True
            why = f"{type(error).__name__}: {error}"
            notify(f"warning: {self._what} is off from here on: {why}")
