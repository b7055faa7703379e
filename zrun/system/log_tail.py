"""The end of a log, as a report keeps it: with all of what `faulthandler` wrote of a crash."""

from __future__ import annotations

from pathlib import Path

from zrun.system.tail_file import as_text
from zrun_core.spine.tracebacks import FATAL

KEPT_LINES = 50
_CRASH_LINES = 300
_TAIL_BYTES = 1 << 20  # a progress bar that was drawn for minutes is one line of them


def last_lines(log: Path, count: int = KEPT_LINES) -> list[str]:
    """Return the end of a file as a terminal would have left it; nothing where there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = [as_text(line) for line in file.read().removesuffix(b"\n").split(b"\n")]
    except OSError:
        return []
    if lines == [""]:
        return []
    crashes = [number for number, line in enumerate(lines) if line.startswith(FATAL)]
    if crashes:
        count = min(max(count, len(lines) - crashes[-1]), _CRASH_LINES)
    return lines[-count:]
