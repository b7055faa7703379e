"""Wait for what processes bring about."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 300.0  # only bounds a failure: a busy machine may take long


def wait_for(condition: Callable[[], Any]) -> Any:
    """What `condition` comes to, once it is something."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.02)
    return found


def lines_of(launcher: subprocess.Popen[str], until: str) -> list[str]:
    """What it says on stderr, up to the line with `until`."""
    assert launcher.stderr is not None
    lines = []
    while until not in (lines or [""])[-1]:
        lines.append(launcher.stderr.readline())
        assert lines[-1], lines
    return lines
