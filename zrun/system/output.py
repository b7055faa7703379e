"""What the launcher says outside the screens: whoever read it may be gone."""

from __future__ import annotations

import os
from typing import TextIO

from zrun_core.spine.printable import printable


def say(text: str, out: TextIO) -> None:
    """Print, if anybody still listens. Python would end with a code of its own if the last flush failed."""
    try:
        print(printable(text), file=out, flush=True)
    except OSError:
        with open(os.devnull, "wb") as nothing:
            for stream in (1, 2):
                os.dup2(nothing.fileno(), stream)
