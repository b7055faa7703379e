"""A simulated GPU for torch's wheel for CPUs. See the README beside.

    environment = simulated_gpu.environment(devices=2, delay_us=300, seed=7)
    subprocess.run([sys.executable, "script.py"], env=environment)

In a process of that environment `torch.device("cuda")` computes, and `init_process_group("nccl")`
makes groups. Importing this package imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from simulated_gpu.build import why_not
from simulated_gpu.settings import environment

__all__ = [
    "clear_races",
    "configure",
    "count",
    "environment",
    "is_installed",
    "mark",
    "races",
    "stalls",
    "trace",
    "why_not",
]


def is_installed() -> bool:
    """Whether the GPUs of this process are simulated."""
    return "simulated_gpu.cuda" in sys.modules


def _extension() -> Any:
    from simulated_gpu import install

    if not is_installed():
        raise RuntimeError("this process has no simulated GPUs: start it in `environment()`")
    return install.extension()


def configure(**settings: Any) -> None:
    """Change settings of this process: see `settings.py`."""
    _extension().configure(**settings)


def count() -> dict[str, Any]:
    """How often what happened: kernels, waits of the host, operators that made it wait."""
    found: dict[str, Any] = _extension().count()
    return found


def races() -> list[str]:
    """The races that were found: each a line that names both accesses, then where they were."""
    found: list[str] = _extension().races()
    return found


def clear_races() -> None:
    """Forget what was found."""
    _extension().clear_races()


def stalls(for_s: float = 0.0) -> str:
    """What streams do, and what hosts wait for, that have done so for as long: a line each."""
    found: str = _extension().stalls(for_s)
    return found


def mark(kind: str, number: int) -> None:
    """Add an entry of this kind to the trace, with a number that says what it is about."""
    _extension().mark(kind, number)


@contextmanager
def trace() -> Iterator[list[dict[str, Any]]]:
    """List what the host asks of streams inside, in its order; the list is filled at the end.

    Yields:
        Entries with a "kind": "kernel" on a "stream", with "name", "line", bytes "read" and
        "written", "flops" and the "link" that it is limited by; "host kernel" of an operator on
        pinned memory; "record" of a place in a stream; "wait" of a stream, or "host wait", for the
        record with the index "point"; those of `mark`. "thread" is the host's.
    """
    found: list[dict[str, Any]] = []
    _extension().begin_trace()
    try:
        yield found
    finally:
        found += _extension().end_trace()
