"""Wait for what processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 90.0


def wait_for(condition: Callable[[], Any]) -> Any:
    """What `condition` comes to, once it is something."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.02)
    return found
