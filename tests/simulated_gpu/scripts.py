"""Run a piece of Python in a process of its own, which finds simulated GPUs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import simulated_gpu

TIMEOUT_S = 120


def run(
    script: str,
    *,
    more: dict[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    **settings: Any,
) -> str:
    """Return what a script prints.

    Args:
        script: its source text.
        more: variables of its environment.
        timeout_s: seconds after which the process is ended, and the test fails.
        settings: of the simulated GPUs.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**simulated_gpu.environment(**settings), **(more or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
