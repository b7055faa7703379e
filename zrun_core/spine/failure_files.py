"""The file in which a rank says why it ends: `failures/rank-N.json`."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

# Of a whole traceback, to the launcher, which reads notes up to a size; the log has all of it.
TOLD_CHARS = 24_000


def write_note(run_dir: Path, rank: int, **fields: Any) -> None:
    """Write the note of a rank that is about to end."""
    folder = run_dir / "failures"
    # What follows in the log is told by the launcher.
    note = {"rank": rank, **fields, "log_bytes": _log_bytes(), "time": time.time()}
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / f"rank-{rank}.json").write_text(json.dumps(note))


def _log_bytes() -> int | None:
    """Return how many bytes this rank has printed; None if they go to no file."""
    sys.stdout.flush()
    found = os.fstat(2)
    return found.st_size if stat.S_ISREG(found.st_mode) else None
