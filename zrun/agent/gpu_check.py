"""`python -m zrun.agent.gpu_check`: compute and train on the GPUs of this host for a minute.

It reads a `GpuQuestion` from stdin as JSON, and prints a list of rows as JSON. What runs on the
GPUs are processes of their own (`zrun_core.library.device_check`), in three turns:

    alone       a process for each GPU: what it computes, against the CPU
    training    a process for each GPU, in groups of two: the runtime, against plain torch
    messages    all of them together: how fast they exchange data
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zrun.job.environment import WORKER_DEFAULTS
from zrun.system import processes
from zrun.topology.visible import environment_of
from zrun.transport.frames import Frame

_RANK = "zrun_core.library.device_check"
_LIMIT_S = 60.0  # of what a process checks
_LOADING_S = 25.0  # that it may take to load its libraries before
_OTHERS_S = 3.0  # that the other ranks of a group get to end once one has failed
_PATIENCE_S = 3 * (_LIMIT_S + _LOADING_S) + 30.0
_SHARE_OF_MEMORY = 4  # of what is free, one part of so many is written and read
_MOST_MEMORY = 2 << 30
_MOST_LINES = 12  # of what a process that failed has said

Part = Literal["alone", "training", "messages"]


@dataclass(frozen=True)
class CheckedGpu:
    """A GPU that is to be checked.

    Attributes:
        index: as `nvidia-smi` counts.
        is_slice: slices of a GPU exchange no data.
    """

    uuid: str
    index: int
    free_bytes: int
    is_slice: bool


@dataclass(frozen=True)
class Row:
    """What a check came to on one or several GPUs.

    Attributes:
        gpus: their numbers.
        found: in words.
        problem: what is wrong; None: nothing.
        rate: bytes per second, where it measures some.
        lines: the last ones that a process said which failed.
    """

    check: str
    gpus: tuple[int, ...]
    found: str
    problem: str | None = None
    rate: float | None = None
    lines: tuple[str, ...] = ()


def run_apart(gpus: Sequence[Frame]) -> list[Frame]:
    """Run this module in a process of its own, which ends with this one.

    Args:
        gpus: the fields of a `CheckedGpu` each.

    Raises:
        RuntimeError: it failed; the text is its last line.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        input=json.dumps({"device": "cuda", "gpus": list(gpus)}).encode(),
        capture_output=True,
        timeout=_PATIENCE_S,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"it ended with status {done.returncode}")
    rows: list[Frame] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    processes.die_with_parent(signal.SIGKILL)
    asked = json.loads(sys.stdin.read())
    gpus = [CheckedGpu(**gpu) for gpu in asked["gpus"]]
    print(json.dumps([asdict(row) for row in check(gpus, asked["device"])]))


def check(gpus: Sequence[CheckedGpu], device: Literal["cpu", "cuda"]) -> list[Row]:
    """Return what all checks came to.

    Args:
        gpus: to be checked; on CPUs, what stands for each rank.
    """
    single = [[gpu] for gpu in gpus]
    together = _pairs(gpus)
    if any(gpu.is_slice for gpu in gpus):
        together = single
    rows = _turn("alone", single, device)
    rows += _turn("training", together, device)
    if len(gpus) > 1 and together is not single:
        rows += _turn("messages", [list(gpus)], device)
    return rows


def _pairs(gpus: Sequence[CheckedGpu]) -> list[list[CheckedGpu]]:
    """Return neighbours two by two; the last three of an odd number together."""
    pairs = [list(gpus[start : start + 2]) for start in range(0, len(gpus), 2)]
    if len(pairs) > 1 and len(pairs[-1]) == 1:
        pairs[-2:] = [pairs[-2] + pairs[-1]]
    return pairs


def _turn(part: Part, groups: Sequence[Sequence[CheckedGpu]], device: str) -> list[Row]:
    """Run a part of the check on several groups of GPUs at the same time."""
    num_ranks = sum(map(len, groups))
    with tempfile.TemporaryDirectory(prefix="zrun-") as folder:
        running = [
            _Group(part, group, device, Path(folder, str(number)), num_ranks)
            for number, group in enumerate(groups)
        ]
        try:
            deadline = time.monotonic() + _LIMIT_S + _LOADING_S
            while time.monotonic() < deadline and not all(group.is_over() for group in running):
                time.sleep(0.05)
        finally:
            for group in running:
                group.kill()
        return [row for group in running for row in group.rows()]


class _Group:
    """The processes of a few GPUs that check them together."""

    def __init__(
        self, part: Part, gpus: Sequence[CheckedGpu], device: str, folder: Path, num_ranks: int
    ) -> None:
        """Start them.

        They work in `folder`, which is made for them. `num_ranks` are those of all groups, which
        share the cores of the host.
        """
        folder.mkdir()
        self._part = part
        self._gpus = gpus
        self._folder = folder
        self._failed_at: float | None = None
        free = min(gpu.free_bytes for gpu in gpus) // _SHARE_OF_MEMORY
        asked = {
            "part": part,
            "device": device,
            "folder": str(folder),
            "memory_bytes": min(_MOST_MEMORY, free),
            "limit_s": _LIMIT_S,
        }
        if free < _MOST_MEMORY // 8:  # a slice, or a GPU of ten years ago
            asked |= {"message_bytes": free // 8, "side": 256}
        cores = max(1, len(os.sched_getaffinity(0)) // num_ranks)
        shared = {
            **{key: os.environ.get(key, value) for key, value in WORKER_DEFAULTS.items()},
            "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
            **environment_of([gpu.uuid for gpu in gpus if gpu.uuid]),
            "OMP_NUM_THREADS": str(cores),
            "WORLD_SIZE": str(len(gpus)),
            "LOCAL_WORLD_SIZE": str(len(gpus)),
        }
        self._processes = [self._start(rank, asked, shared) for rank in range(len(gpus))]

    def _start(self, rank: int, asked: dict[str, Any], shared: dict[str, str]) -> Any:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with self._said(rank).open("wb") as said:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", _RANK, json.dumps(asked)],
                env={**os.environ, **shared, **own},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                preexec_fn=_end_with_parent,  # this process has no other thread
            )

    def is_over(self) -> bool:
        """Return whether all have ended, or one has failed and the others had their time."""
        statuses = [process.poll() for process in self._processes]
        if None not in statuses:
            return True
        if any(statuses) and self._failed_at is None:
            self._failed_at = time.monotonic()
        return self._failed_at is not None and time.monotonic() > self._failed_at + _OTHERS_S

    def kill(self) -> None:
        """End what is left."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def rows(self) -> list[Row]:
        """Return what was found: what rank 0 says, unless another one found a problem."""
        numbers = tuple(gpu.index for gpu in self._gpus)
        found: dict[str, Row] = {}
        for rank in range(len(self._gpus)):
            for outcome in self._told(rank):
                row = Row(gpus=numbers, **outcome)
                if row.check not in found or (row.problem and not found[row.check].problem):
                    found[row.check] = row
        return [*found.values(), *self._failure()]

    def _told(self, rank: int) -> list[dict[str, Any]]:
        path = self._folder / f"{self._part}-{rank}.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _failure(self) -> list[Row]:
        """Return a row for processes that did not come to their end; it names the first."""
        ends = [process.returncode for process in self._processes]
        failed = [rank for rank, status in enumerate(ends) if status]
        if not failed:
            return []
        # One that was killed here only waited for another.
        rank = min(failed, key=lambda rank: (ends[rank] == -signal.SIGKILL, rank))
        lines = self._said(rank).read_text(errors="replace").strip().splitlines()
        problem = _reason(lines, ends[rank])
        numbers = tuple(gpu.index for gpu in self._gpus)
        return [Row(self._part, numbers, problem, problem, None, tuple(lines[-_MOST_LINES:]))]

    def _said(self, rank: int) -> Path:
        return self._folder / f"said-{rank}.txt"


def _reason(lines: Sequence[str], status: int) -> str:
    """Say why a process ended, from its last words."""
    if any(line.startswith("Timeout (") for line in lines):
        own = [line.strip() for line in lines if "zrun_core" in line]
        where = own[0].partition("zrun_core")[2] if own else ""
        at = f" at zrun_core{where}" if where else ""
        return f"it made no progress for {_LIMIT_S:.0f} s{at}"
    if status == -signal.SIGKILL:
        return f"it did not finish within {_LIMIT_S + _LOADING_S:.0f} s"
    if lines and status > 0:
        return lines[-1]
    return f"it ended with status {status}"


def _end_with_parent() -> None:
    processes.die_with_parent(signal.SIGKILL)


if __name__ == "__main__":
    main()
