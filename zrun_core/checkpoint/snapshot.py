"""Copies of what a rank saves, in host memory that is kept from save to save.

A save that training does not wait for is written from a copy. Parameters and buffers may be changed
by the user's code at any time and are copied at once. The optimizer's state is changed by the next
update only: on a CPU the writing thread copies it, beside the next forward and backward, and the
update waits until it has (Mohan et al. 2021, CheckFreq, section 4.2). States that live elsewhere
are not copied: the writing thread reads them where they are, in blocks, and the update waits until
it has read the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from zrun_core.checkpoint.manifest_fields import RANK, VALUE
from zrun_core.checkpoint.shard_file import WriteItem
from zrun_core.hardware import accelerator
from zrun_core.memory.arena import flat_buffer
from zrun_core.tiers.pinning import Pinned

_ALIGNMENT = 64  # bytes


@dataclass
class LateCopies:
    """Copies that the writing thread makes, and states that it reads where they live.

    Attributes:
        pairs: the copy, and the memory that is copied.
        reads_elsewhere: there are such states.
        made: set when all copies are made and all states are read, or when one has failed.
    """

    pairs: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    reads_elsewhere: bool = False
    made: threading.Event = field(default_factory=threading.Event)

    def make(self) -> None:
        try:
            for copy, original in self.pairs:
                copy.copy_(original)
        finally:
            if not self.reads_elsewhere:
                self.made.set()


class Snapshot:
    """The memory of the copies: as much as they take, pinned where they come from an accelerator.

    Attributes:
        note: why copies are slower than they might be, for the user; empty if they are not.
    """

    def __init__(self, device: torch.device) -> None:
        self.note = ""
        self._device = device
        self._memory: torch.Tensor | None = None
        self._pinned: Pinned | None = None

    def take(self, items: Sequence[WriteItem]) -> tuple[list[WriteItem], LateCopies]:
        """Copy `items`, or reserve the memory for those that can wait.

        Args:
            items: views of the memory that training uses, on its device, and states elsewhere.

        Returns:
            The same items with their copies for data, and what the writing thread is to copy.
        """
        memory = self._reserve(sum(_size(item) for item in items))
        copies = []
        late = LateCopies()
        offset = 0
        for item in items:
            data = item.data
            if not isinstance(data, torch.Tensor):
                late.reads_elsewhere = True
                copies.append(item)
                continue
            copy = memory[offset : offset + data.nbytes].view(data.dtype)
            copies.append(replace(item, data=copy))
            if item.state in (VALUE, RANK) or accelerator.is_accelerator(data.device):
                copy.copy_(data, non_blocking=True)
            else:
                late.pairs.append((copy, data))
            offset += _size(item)
        if accelerator.is_accelerator(self._device):
            accelerator.synchronize_stream(self._device)
        return copies, late

    def _reserve(self, num_bytes: int) -> torch.Tensor:
        if self._memory is not None and self._memory.numel() >= num_bytes:
            return self._memory
        self._pinned = self._memory = None  # before the new one is taken: never both
        memory = flat_buffer(num_bytes, torch.uint8, torch.device("cpu"))
        if num_bytes and accelerator.is_accelerator(self._device):
            self._pin(memory)
        self._memory = memory
        return memory

    def _pin(self, memory: torch.Tensor) -> None:
        self._pinned = Pinned(memory, self._device)
        if self._pinned.refusal:
            self.note = (
                "the host memory of background saves could not be pinned (the driver says "
                f"{self._pinned.refusal}), so training waits longer for each save: ulimit -l "
                "unlimited may help"
            )


def _size(item: WriteItem) -> int:
    """Return the bytes of the copies that an item takes."""
    if not isinstance(item.data, torch.Tensor):
        return 0
    return -(-item.data.nbytes // _ALIGNMENT) * _ALIGNMENT
