"""Torch's profiler on one rank, from the beginning of a step to the end of another.

    profiler = Profiler(comm, rank, name)
    profiler.begin()
    ...                                        steps
    found = profiler.end(folder)               traces are written to it

`telemetry/peak_memory.py` uses the same profiler of torch's, for the memory of one step, and of two
the second would end the first. So who begins asks `is_profiled`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.hardware import accelerator
from zrun_core.spine import heap, memory_limits
from zrun_core.telemetry.trace_file import Parts, convert

_TO_WRITE = 4  # times the memory that a trace has taken


@dataclass(frozen=True)
class Profiled:
    """What a profile has found, and written.

    Attributes:
        path: of the trace.
        num_bytes: of it.
        memory: of the history of a GPU's memory; None: there is none.
        note: why that could not be written; empty: it could, or there is none.
        parts: what is named, by name.
        exposed_s: seconds that the device waited for other ranks, by axis.
    """

    path: Path
    num_bytes: int
    memory: Path | None
    note: str
    parts: Parts
    exposed_s: dict[str, float]


def is_profiled() -> bool:
    """Return whether a profiler of torch's is on in this process, whoever has begun it."""
    return bool(torch._C._autograd._profiler_enabled())


class Profiler:
    """A profile of one rank."""

    def __init__(self, comm: Comm, rank: int, name: str, *, all_threads: bool) -> None:
        """
        Args:
            comm: of the rank, whose names of what it does are recorded.
            all_threads: trace those of the runtime too, beside the one that trains.
        """
        self._all_threads = all_threads
        self._comm = comm
        self._rank = rank
        self._name = name
        self._on_gpu = accelerator.is_accelerator(comm.device)
        self._profiler: Any = None
        self._has_history = False  # of a GPU's memory
        self._note = ""
        self._resident_bytes = 0  # before there was a trace

    def begin(self) -> None:
        """Begin to trace.

        Raises:
            RuntimeError: torch's profiler is on already, or cannot begin.
        """
        if is_profiled():
            raise RuntimeError("the job's own code has torch's profiler on")
        profiler = torch.autograd.profiler.profile(
            use_device=accelerator.traced_kernels(self._comm.device),
            record_shapes=True,
            experimental_config=_of_all_threads() if self._all_threads else None,
        )
        profiler.__enter__()
        self._profiler = profiler
        self._resident_bytes = memory_limits.resident_bytes([os.getpid()])
        self._begin_memory_history()
        self._comm.spans.take_waits()
        self._comm.spans.is_on = True

    def fills_memory(self) -> bool:
        """Return whether the host would lack memory for a trace that goes on: it is held there.

        To write it takes as much again, several times.
        """
        grown = memory_limits.resident_bytes([os.getpid()]) - self._resident_bytes
        own = memory_limits.process_available()
        left = memory_limits.host_available()
        if own is not None:
            left = min(left, own)
        return left < _TO_WRITE * grown

    def end(self, folder: Path) -> Profiled:
        """End to trace, and write what was traced.

        Args:
            folder: for the files of all ranks; it is made.

        Raises:
            OSError: nothing can be written there.
            RuntimeError: torch's profiler has failed.
            ValueError: it has left no trace.
        """
        target = folder / f"rank-{self._rank}.json.gz"
        raw = folder / f"rank-{self._rank}.json"
        part = folder / f"rank-{self._rank}.part"
        profiler, self._profiler = self._profiler, None
        try:
            self._stop(profiler)
            exposed_s = self._comm.spans.take_waits()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(raw))
            if not raw.exists():
                raise OSError(f"nothing can be written to {folder}: is its disk full?")
            parts = convert(raw, part, os.getpid(), self._rank, self._name)
            os.replace(part, target)
        except BaseException:
            self._end_memory_history(None)
            raise
        finally:
            for left in (raw, part, folder / f"{raw.name}.tmp"):  # the profiler's own name for it
                with suppress(OSError):
                    left.unlink()
        del profiler
        heap.give_back_freed_memory()
        num_bytes = target.stat().st_size
        memory, note = self._end_memory_history(folder / f"rank-{self._rank}.memory.pickle")
        return Profiled(target, num_bytes, memory, note, parts, exposed_s)

    def _stop(self, profiler: Any) -> None:
        """End the profiler, which waits for a GPU."""
        self._comm.spans.is_on = False
        if not self._all_threads and not is_profiled():  # of all threads it is on in none
            raise RuntimeError("the job's own code has ended torch's profiler")
        profiler.__exit__(None, None, None)

    def _begin_memory_history(self) -> None:
        """Have a GPU's memory noted, by private parts of torch: they are not worth the trace."""
        if not self._on_gpu:
            return
        try:
            accelerator.begin_memory_history(self._comm.device)
        except Exception as error:
            self._note = _left_out(error)
            return
        self._has_history = True

    def _end_memory_history(self, path: Path | None) -> tuple[Path | None, str]:
        """Write the history of a GPU's memory, if there is one.

        A `path` of None says that it is not wanted any more.

        Returns:
            Its path, or None, and why it could not be written.
        """
        if not self._has_history:
            return None, self._note
        self._has_history = False
        try:
            accelerator.save_memory_history(None if path is None else str(path))
        except Exception as error:  # a full disk among them
            if path is not None:
                with suppress(OSError):
                    path.unlink()
            return None, _left_out(error)
        return path, ""


def _of_all_threads() -> Any:
    """Return the settings of a profiler that traces every thread of the process."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)


def _left_out(error: Exception) -> str:
    why = f"{type(error).__name__}: {error}"
    return f"the history of memory is left out: torch {torch.__version__}: {why}"
