"""The end of a log, as a report keeps it: with all of what `faulthandler` wrote of a crash."""

from __future__ import annotations

from pathlib import Path

from zrun_core.tracebacks import FATAL

KEPT_LINES = 50
_CRASH_LINES = 300
_TAIL_BYTES = 1 << 16


def last_lines(log: Path, count: int = KEPT_LINES) -> list[str]:
    """The end of a file; nothing where there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    crashes = [number for number, line in enumerate(lines) if line.startswith(FATAL)]
    if crashes:
        count = min(max(count, len(lines) - crashes[-1]), _CRASH_LINES)
    return lines[-count:]
