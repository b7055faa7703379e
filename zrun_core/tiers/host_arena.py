"""Host memory for states that leave the device, and for what is on the way to a disk.

torch pins memory in powers of two, and keeps what it has pinned: of states that fill most of a host
that may be half as much again. Here each piece is as large as it is, begins on the border of a
page, and is pinned when it is handed out: memory that is never asked for is not touched.
"""

from __future__ import annotations

import sys

import torch

from zrun_core.errors import OffloadError, PreflightError
from zrun_core.hardware import accelerator
from zrun_core.memory.arena import Region, byte_buffer
from zrun_core.memory.layout import whole_pages
from zrun_core.sizes import format_size
from zrun_core.tiers.pinning import Pinned


class HostArena:
    """Host memory of which pieces are handed out, and given back or kept for life.

        |xxxxxx|    |xx|..........      a piece goes to the first gap that is wide enough
        |xxxxxx|xxx |xx|..........      `..` was never used: neither touched nor pinned

    A piece may lie across memory that was pinned in two ranges, or not at all: see `pinning.py`.

    Attributes:
        num_bytes: of all of it; whole pages.
        used_bytes: up to the end of the furthest piece so far.
        note: why a device's copies are slower than they might be, for the user; empty if they are
            not.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Reserve addresses. What is not handed out takes no memory, and counts towards no limit.

        Args:
            num_bytes: rounded up to whole pages.

        Raises:
            PreflightError: the system does not reserve so much.
        """
        self.num_bytes = whole_pages(num_bytes)
        self.used_bytes = 0
        self.note = ""
        self._device = device
        self._taken: dict[int, int] = {}  # first byte of a piece -> the one behind its last
        self._pinned: list[Pinned] = []
        self._region: Region | None = None
        try:
            if sys.platform.startswith("linux") and num_bytes:
                self._region = Region(self.num_bytes, protected=True)
                self._memory = self._region.tensor(self.num_bytes)
            else:
                self._memory = byte_buffer(self.num_bytes, torch.device("cpu"))
        except MemoryError as error:
            raise PreflightError(
                f"offload: cannot reserve {format_size(num_bytes)} of host memory ({error}): "
                "check ulimit -v, or lower offload.host_memory"
            ) from None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [numel] of undefined values, zeros at first, that begin on the border of a page.

        Args:
            numel: elements.

        Raises:
            OffloadError: there is no gap of so much.
        """
        num_bytes = numel * dtype.itemsize
        start = self._gap(whole_pages(num_bytes))
        stop = start + whole_pages(num_bytes)
        if stop > self.num_bytes:
            raise OffloadError(
                f"offload: {format_size(num_bytes)} of host memory are needed, and "
                f"{format_size(self.num_bytes - start)} are left of "
                f"{format_size(self.num_bytes)}: raise offload.host_memory, or offload fewer "
                "states (offload.fraction)"
            )
        if stop > self.used_bytes:
            self._grow(stop)
        if num_bytes:
            self._taken[start] = stop
        return self._memory[start : start + num_bytes].view(dtype)

    def give(self, piece: torch.Tensor) -> None:
        """Take back what `take` returned; nothing may read or write it any more."""
        if piece.numel():
            del self._taken[piece.data_ptr() - self._memory.data_ptr()]

    def _grow(self, stop: int) -> None:
        """Make the memory up to `stop` usable."""
        start = self.used_bytes
        try:
            if self._region is not None:
                self._region.unprotect(start, stop - start)
        except MemoryError as error:
            raise OffloadError(
                f"offload: only {format_size(start)} of host memory can be allocated ({error}): "
                "check ulimit -d, or offload fewer states (offload.fraction)"
            ) from None
        if accelerator.is_accelerator(self._device) and not self.note:
            self._pin(self._memory[start:stop])
        self.used_bytes = stop

    def _gap(self, num_bytes: int) -> int:
        """Return where the first gap of `num_bytes` begins; the last one has no end."""
        end = 0
        for start in sorted(self._taken):
            if start - end >= num_bytes:
                break
            end = self._taken[start]
        return end

    def _pin(self, piece: torch.Tensor) -> None:
        pinned = Pinned(piece, self._device)
        if not pinned.refusal:
            self._pinned.append(pinned)
            return
        self.note = (
            f"host memory of offload could not be pinned (the driver says {pinned.refusal}), so "
            "training waits for copies, which are slower too: ulimit -l unlimited may help"
        )
