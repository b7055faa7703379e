"""What a script's ranks and the agent of their host agree on: a signal, files, a variable."""

from __future__ import annotations

import signal
from pathlib import Path

SPEC = "ZRUN_SPEC"  # variable of a script's ranks: path of spec.json of the run that they are of
# Asks a rank to write what torch's flight recorder says; those before it are in `stop_signals.py`.
ASK = signal.SIGRTMIN + 3


def stacks_file(run_dir: Path, rank: int) -> Path:
    """Return the file to which a rank writes its stacks on SIGQUIT."""
    return run_dir / "stacks" / f"rank-{rank}.txt"


def waits_file(run_dir: Path, rank: int) -> Path:
    """Return the file to which a rank writes what it waits for, on `ASK`."""
    return run_dir / "stacks" / f"rank-{rank}.json"


def status_file(run_dir: Path, rank: int) -> Path:
    """Return the file to which a rank writes the status of its script, at the end of Python."""
    return run_dir / "stacks" / f"rank-{rank}.status"
