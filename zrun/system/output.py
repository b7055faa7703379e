"""Lines of the launcher outside the screens, for a terminal that may be gone."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

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
