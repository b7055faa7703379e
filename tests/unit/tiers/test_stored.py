"""A save reads states where they are stored: in blocks, in little memory, and without a fetch."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from zrun_core.errors import OffloadError
from zrun_core.memory.arena import Region
from zrun_core.tiers import stored
from zrun_core.tiers.stored import BlockReader, Part, Stored, StoredOnDisk, StoredOnHost
from zrun_core.tiers.swap_file import Extent, SwapFile
from zrun_core.tiers.transfer import Transfer

PAGE = 4096
BLOCK = 4 * PAGE
SIZES = (5 * BLOCK + PAGE, 3 * PAGE, 2 * BLOCK)  # of the extents of a state


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[SwapFile]:
    file = SwapFile(tmp_path, sum(SIZES), num_threads=2, block_bytes=BLOCK)
    yield file
    file.close()


class Source:
    """Reads a file, and lends pieces of memory."""

    def __init__(self, swap: SwapFile, pieces: Sequence[torch.Tensor] = ()) -> None:
        self._swap = swap
        self.pieces = list(pieces)

    def read_stored(self, extent: Extent, target: torch.Tensor, start: int) -> Transfer:
        return self._swap.read(extent, target, start=start)

    def lend(self) -> torch.Tensor | None:
        return self.pieces.pop() if self.pieces else None

    def take_back(self, memory: torch.Tensor) -> None:
        self.pieces.append(memory)


def a_state(swap: SwapFile, source: Source | None = None) -> tuple[torch.Tensor, StoredOnDisk]:
    """A state in several extents: in memory, fp32, and on the disk."""
    memory = Region(sum(SIZES), huge=False).tensor()
    memory.random_(0, 256, generator=torch.Generator().manual_seed(1))
    parts: list[Part] = []
    for size in SIZES:
        part = Part(sum(SIZES[: len(parts)]), swap.reserve(size, name="the record of 0"))
        swap.write(part.extent, part.of(memory)).wait()
        parts.append(part)
    on_disk = StoredOnDisk(source or Source(swap), parts, torch.float32, 0, memory.nbytes)
    return memory.view(torch.float32), on_disk


def content_of(found: Stored, reader: BlockReader) -> bytes:
    return b"".join(part.numpy().tobytes() for part in found.read(reader))


def test_any_range_has_the_bytes_that_were_stored(swap: SwapFile) -> None:
    memory, on_disk = a_state(swap)
    numel = memory.numel()
    assert (on_disk.numel(), on_disk.nbytes, on_disk.dtype) == (numel, 4 * numel, torch.float32)
    chance = random.Random(5)
    ranges = [sorted(chance.choices(range(numel + 1), k=2)) for _ in range(40)]
    reader = BlockReader()
    for first, last in [(0, numel), (0, 0), (numel, numel), *ranges]:
        of_both = memory[first:last], on_disk[first:last], StoredOnHost(memory)[first:last]
        for found in of_both[1:]:
            assert (found.numel(), found.nbytes) == (last - first, 4 * (last - first))
            assert content_of(found, reader) == of_both[0].numpy().tobytes()
        half = (last - first) // 2  # a range of a range
        assert content_of(on_disk[first:last][half:], reader) == (
            memory[first + half : last].numpy().tobytes()
        )


@pytest.mark.parametrize(
    ("lent", "num_taken"), [([], 4), ([5 * BLOCK], 0), ([BLOCK + PAGE] * 2, 2), ([PAGE], 4)]
)
def test_a_block_is_read_once_for_all_tensors_in_it_and_memory_is_constant(
    swap: SwapFile, monkeypatch: pytest.MonkeyPatch, lent: list[int], num_taken: int
) -> None:
    """That of others as far as they lend it, which they get back."""
    taken = Mock(wraps=stored.byte_buffer)
    monkeypatch.setattr(stored, "byte_buffer", taken)
    pieces = [Region(size, huge=False).tensor() for size in lent]
    source = Source(swap, pieces)
    memory, on_disk = a_state(swap, source)
    before = swap.read_bytes
    found = b""
    with BlockReader() as reader:
        for first in range(0, memory.numel(), 96):
            found += content_of(on_disk[first : first + 96], reader)
        assert not source.pieces
    assert found == memory.numpy().tobytes()
    assert swap.read_bytes - before == memory.nbytes
    assert [call.args[0] for call in taken.call_args_list] == [BLOCK] * num_taken
    assert sorted(each.data_ptr() for each in source.pieces) == sorted(
        each.data_ptr() for each in pieces
    )


def test_a_disk_that_fails_is_told(swap: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    _, on_disk = a_state(swap)

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OffloadError, match=r"cannot read the record of 0 in .*the disk fails"):
        content_of(on_disk, BlockReader())
