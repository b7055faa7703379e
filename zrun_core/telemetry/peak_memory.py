"""Peak memory of tensors in one step, measured: the planner's peak is compared with it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from zrun_core.hardware import accelerator

_autograd: Any = torch.autograd  # its stubs know no scopes


_NONE = accelerator.Peak(0, 0)
_before: dict[torch.device, accelerator.Peak] = {}  # until its count began anew


def _begin_anew(device: torch.device) -> None:
    """Have the allocator count its peak from here, and remember the one so far."""
    earlier, newest = peak_before(device), accelerator.peak_memory(device)
    _before[device] = accelerator.Peak(*map(max, earlier, newest))
    accelerator.reset_peak_memory(device)


def peak_before(device: torch.device) -> accelerator.Peak:
    """Return the peak of `device` that its allocator forgot when a `PeakMemory` was entered."""
    return _before.get(device, _NONE)


class PeakMemory:
    """Watches what torch's allocator gives out and gets back, while it is entered.

    On CUDA the allocator counts by itself. On a CPU torch's profiler notes each allocation, also
    those inside of operators. That costs some microseconds and a kilobyte each, so only one step is
    watched. Parts of torch that this needs have no public names: where one is missing, nothing is
    measured, and no step fails for it.

    Attributes:
        num_bytes: on CUDA, of all tensors; on a CPU, above what there was at the beginning. None:
            not measured, because the user profiles this step, or for `note`.
        reserved: held by the allocator at most; None on a CPU, which has none that would tell.
        note: why it could not be measured; empty: it could, or the user profiles.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes: int | None = None
        self.reserved: int | None = None
        self.note = ""
        self._device = device
        self._profiler: Any = None
        self._quiet = ExitStack()

    def __enter__(self) -> Self:
        if accelerator.is_accelerator(self._device):
            _begin_anew(self._device)
            return self
        try:
            # A second profiler would end the first, the user's.
            if not torch._C._autograd._profiler_enabled():
                self._quiet.enter_context(_quiet_allocator())
                self._profiler = _allocations_only()
        except Exception as error:  # whatever it is, only a number is missing
            self._leave_out(error)
        return self

    def __exit__(self, *error: object) -> None:
        if accelerator.is_accelerator(self._device):
            self.num_bytes, self.reserved = accelerator.peak_memory(self._device)
        elif self._profiler is not None:
            try:
                self.num_bytes = _highest(_autograd._disable_profiler())
            except Exception as failure:
                self._leave_out(failure)
        self._quiet.close()

    def _leave_out(self, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        self.note = f"the peak of memory is left out: torch {torch.__version__}: {why}"


def _allocations_only() -> Any:
    """Start torch's profiler without noting operators, which would take several times the memory.

    Returns:
        The profiler.
    """
    from torch._C._profiler import RecordScope

    profiler = torch.autograd.profiler.profile(profile_memory=True)
    profiler._prepare_trace()
    _autograd._enable_profiler(
        profiler.config(), profiler.kineto_activities, {RecordScope.USER_SCOPE}
    )
    return profiler


_ERRORS = 2  # glog's number for what is worse than a warning


@contextmanager
def _quiet_allocator() -> Iterator[None]:
    """Silence torch's warnings of blocks that are older than its profiler and freed under it.

    Only torch's own C++ says less inside, and only if the environment does not set its level.
    """
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # another system, or another torch
        yield
        return
    before = level.value
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        level.value = max(before, _ERRORS)
    try:
        yield
    finally:
        level.value = before


def _highest(results: Any) -> int:
    """The highest sum of the sizes, which are negative for what is given back."""
    events = [
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]"
    ]
    level = highest = 0
    for _, num_bytes in sorted(events, key=lambda event: event[0]):
        level += num_bytes
        highest = max(highest, level)
    return highest
