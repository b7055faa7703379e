"""Host memory that is pinned where it lies: a device copies from and to it beside what computes.

A copy of host memory must lie in one range that was pinned, or in none: CUDA refuses what begins in
pinned memory and ends in other memory, and does not say what it does with two ranges side by side.
So who copies does it in the parts that `pinned_parts` returns:

    pinned      |--- range ---|- range -|
    memory               |---------|.........|      three copies: `.` is not pinned
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator

import torch

from zrun_core.hardware import accelerator
from zrun_core.memory.layout import whole_pages


class _Ranges:
    """The ranges of addresses that this process has pinned. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: list[tuple[int, int]] = []  # first byte, and the one behind the last; sorted

    def add(self, start: int, stop: int) -> None:
        with self._lock:
            self._ranges = sorted([*self._ranges, (start, stop)])

    def remove(self, start: int) -> None:
        with self._lock:
            self._ranges = [each for each in self._ranges if each[0] != start]

    def borders(self, start: int, stop: int) -> list[int]:
        """Return where ranges begin or end between two addresses."""
        ranges = self._ranges  # which is replaced, never changed
        first = max(0, bisect_right(ranges, (start, start)) - 1)
        found = set[int]()
        for low, high in ranges[first:]:
            if low >= stop:
                break
            found |= {each for each in (low, high) if start < each < stop}
        return sorted(found)


_RANGES = _Ranges()


class Pinned:
    """A range of host memory that is pinned as long as this object lives.

    Attributes:
        refusal: why it is not pinned after all, in the words of the driver; "": it is.
    """

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        """Pin it.

        Args:
            memory: begins on the border of a page, and nobody else has the rest of its last one.
        """
        self.refusal = "unknown"  # until it is tried
        self._memory = memory  # which must not be unmapped before
        start = memory.data_ptr()
        num_bytes = whole_pages(memory.nbytes)
        self.refusal = accelerator.register_host_memory(start, num_bytes)
        if self.refusal:
            accelerator.forget_error(device)
        else:
            _RANGES.add(start, start + num_bytes)

    def __del__(self) -> None:
        if self.refusal or sys.is_finalizing():
            return  # the process ends, and its memory with it
        start = self._memory.data_ptr()
        _RANGES.remove(start)
        accelerator.unregister_host_memory(start)


def pinned_parts(memory: torch.Tensor) -> Iterator[slice]:
    """Yield the parts of host memory of which each lies in one pinned range, or in none.

    Args:
        memory: [n] uint8.
    """
    start = memory.data_ptr()
    borders = _RANGES.borders(start, start + memory.nbytes)
    low = 0
    for border in borders:
        yield slice(low, border - start)
        low = border - start
    yield slice(low, memory.nbytes)
