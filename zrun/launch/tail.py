"""The end of a log, as a report keeps it."""

from __future__ import annotations

from pathlib import Path

KEPT_LINES = 50
_TAIL_BYTES = 1 << 16


def last_lines(log: Path, count: int = KEPT_LINES) -> list[str]:
    """The end of a file; nothing where there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
