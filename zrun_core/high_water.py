"""The most memory that tensors took at any moment of one step, measured: what the planner's peak is compared with."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Self

import torch


class HighWater:
    """Watches what torch's allocator gives out and gets back, while it is entered.

    On CUDA the allocator counts by itself. On a CPU torch's profiler notes each allocation, also those inside of
    operators; it costs some microseconds each, so that one step is watched and not all of them.

    Attributes:
        num_bytes: on CUDA, of all tensors; on a CPU, above what there was at the beginning. None: not measured, because
            somebody else profiles this step.
        reserved: held by the allocator at most; None on a CPU, which has none that would tell.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes: int | None = None
        self.reserved: int | None = None
        self._device = device
        self._profiler: Any = None

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return self
        if torch._C._autograd._profiler_enabled():  # a second one would end the first, the user's
            return self
        profiler = torch.autograd.profiler.profile(profile_memory=True)
        with suppress(RuntimeError):
            profiler.__enter__()
            self._profiler = profiler
        return self

    def __exit__(self, *error: object) -> None:
        if self._device.type == "cuda":
            self.num_bytes = torch.cuda.max_memory_allocated(self._device)
            self.reserved = torch.cuda.max_memory_reserved(self._device)
        elif self._profiler is not None:
            with suppress(RuntimeError):
                self._profiler.__exit__(*error)
                self.num_bytes = _highest(self._profiler.kineto_results)


def _highest(results: Any) -> int:
    """The highest sum of the sizes, which are negative for what is given back."""
    events = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    level = highest = 0
    for _, num_bytes in sorted(events, key=lambda event: event[0]):
        level += num_bytes
        highest = max(highest, level)
    return highest
