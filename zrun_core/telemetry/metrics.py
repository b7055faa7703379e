"""Time of a step and memory of a rank, measured without making anything wait."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import NamedTuple

import psutil
import torch

from zrun_core.hardware import accelerator, catalogue
from zrun_core.hardware.clock import Mark, Waits, mark, seconds_between
from zrun_core.hardware.spans import Spans
from zrun_core.spine import memory_limits
from zrun_core.telemetry.peak_memory import peak_before

_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s that `device` could do in `dtype`; None if they are not known."""
    if not accelerator.is_accelerator(device) or dtype not in _FORMATS:
        return None
    return catalogue.peak_flops(accelerator.device_name(device), _FORMATS[dtype])


class StepPhase(StrEnum):
    """The parts of a step, as the host sees them."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMM = "comm"  # waiting for other ranks, wherever it happens
    OPTIM = "optim"


class StepMarks(NamedTuple):
    """Where a step began, where each phase did and ended, and where the step ended."""

    start: Mark
    spans: Sequence[tuple[StepPhase, Mark, Mark]]
    stop: Mark


class StepClock:
    """Seconds of one optimizer step by phase.

    They are times of the device: see [Note: times of a stream] in `hardware/clock.py`. They are
    read together with the step's totals, so that measuring never makes anything wait.
    """

    def __init__(self, device: torch.device, names: Spans | None = None) -> None:
        """
        Args:
            names: of what the rank does, for a profile; None: there are none.
        """
        self._device = device
        self._names = names or Spans(device)
        self._spans: list[tuple[StepPhase, Mark, Mark]] = []
        self._start = mark(device)

    @contextmanager
    def during(self, phase: StepPhase) -> Iterator[None]:
        """Count the time inside towards `phase`."""
        start = mark(self._device)
        with self._names.named(phase.value):
            yield
        self._spans.append((phase, start, mark(self._device)))

    def restart(self) -> StepMarks:
        """Begin a new step; return the marks of the one that ends here, for `read`."""
        now = mark(self._device)
        ended = StepMarks(self._start, self._spans, now)
        self._spans = []
        self._start = now
        return ended

    @staticmethod
    def read(ended: StepMarks, waited: Mapping[StepPhase, Waits]) -> tuple[float, dict[str, float]]:
        """Return the seconds of a step, and its seconds by phase.

        Args:
            ended: from `restart`.
            waited: for other ranks, by the phase in which that passed. It counts as communication
                instead.
        """
        start, spans, stop = ended
        step_s = seconds_between(start, stop)
        split = dict.fromkeys(StepPhase, 0.0)
        for phase, first, last in spans:
            split[phase] += seconds_between(first, last)
        for phase, waits in waited.items():
            seconds = waits.seconds()
            split[phase] -= seconds
            split[StepPhase.COMM] += seconds
        return step_s, {phase.value: max(0.0, seconds) for phase, seconds in split.items()}


def process_memory(device: torch.device) -> dict[str, int | None]:
    """Return the bytes that this process holds now and held at most, on host and device.

    None where that cannot be read, as when this process has as many files open as it may.
    """
    resident = None
    with suppress(OSError, psutil.Error):
        resident = psutil.Process().memory_info().rss
    # Asked afterwards; and the kernel adds its counters up in two ways that differ by some pages.
    highest = max(resident or 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    found: dict[str, int | None] = {
        "rss_bytes": resident,
        "peak_rss_bytes": highest,
        "process_bytes": None,
    }
    stats: Mapping[str, int] | None = None
    if accelerator.is_accelerator(device):
        stats = accelerator.memory_stats(device)
    else:
        found["process_bytes"] = memory_limits.peak_resident()
    return found | _allocator_memory(stats, peak_before(device))


def _allocator_memory(
    stats: Mapping[str, int] | None, before: accelerator.Peak
) -> dict[str, int | None]:
    """Return what torch's allocator holds on a GPU, and how much of that is of no use to tensors.

    `stats` are those of `accelerator.memory_stats` (None: there is no such allocator), and `before`
    is the peak that is in these no more.
    """
    if stats is None:
        names = ("device_allocated", "device_reserved", "device_fragmented", "alloc_retries")
        return dict.fromkeys(names)
    allocated = max(before.allocated, stats.get("allocated_bytes.all.peak", 0))
    reserved = max(before.reserved, stats.get("reserved_bytes.all.peak", 0))
    return {
        "device_allocated": allocated,
        "device_reserved": reserved,
        "device_fragmented": reserved - allocated,
        "alloc_retries": stats.get("num_alloc_retries", 0),
    }
