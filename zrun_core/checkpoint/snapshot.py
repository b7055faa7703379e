"""Copies of what a rank saves, in host memory that is kept from save to save.

A save that training does not wait for is written from a copy. Parameters and buffers may be changed
by the user's code at any time and are copied at once. The optimizer's state is changed by the next
update only: on a CPU the writing thread copies it, beside the next forward and backward, and the
update waits until it has (Mohan et al. 2021, CheckFreq, section 4.2).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from zrun_core.checkpoint.manifest_fields import RANK, VALUE
from zrun_core.checkpoint.shard_file import WriteItem
from zrun_core.memory.arena import flat_buffer

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class LateCopies:
    """Copies that the writing thread makes.

    Attributes:
        pairs: the copy, and the memory that is copied.
        made: set when all are made, or when one has failed.
    """

    pairs: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    made: threading.Event = field(default_factory=threading.Event)

    def make(self) -> None:
        try:
            for copy, original in self.pairs:
                copy.copy_(original)
        finally:
            self.made.set()


class Snapshot:
    """The memory of the copies; pinned where they come from a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None

    def take(self, items: Sequence[WriteItem]) -> tuple[list[WriteItem], LateCopies]:
        """Copy `items`, or reserve the memory for those that can wait.

        Args:
            items: views of the memory that training uses, on its device.

        Returns:
            The same items with their copies for data, and what the writing thread is to copy.
        """
        sizes = [-(-item.data.nbytes // _ALIGNMENT) * _ALIGNMENT for item in items]
        memory = self._reserve(sum(sizes))
        copies = []
        late = LateCopies()
        offset = 0
        for item, size in zip(items, sizes, strict=True):
            copy = memory[offset : offset + item.data.nbytes].view(item.data.dtype)
            copies.append(replace(item, data=copy))
            if item.state in (VALUE, RANK) or item.data.is_cuda:
                copy.copy_(item.data, non_blocking=True)
            else:
                late.pairs.append((copy, item.data))
            offset += size
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copies, late

    def _reserve(self, num_bytes: int) -> torch.Tensor:
        if self._memory is not None and self._memory.numel() >= num_bytes:
            return self._memory
        self._memory = None  # before the new one is taken: never both
        if self._device.type == "cuda":
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            self._memory = flat_buffer(num_bytes, torch.uint8, torch.device("cpu"))
        return self._memory
