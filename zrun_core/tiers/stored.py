"""States that live elsewhere, as they are stored there: for a save, which reads beside training.

    state on disk     |#### block 0 ####|#### block 1 ####|## block 2 ##|
    a tensor of it                 |-----------|                            read in two blocks

What is read must not be written meanwhile: the next update waits until a save has read everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

from zrun_core.memory.arena import byte_buffer
from zrun_core.tiers.swap_file import Extent
from zrun_core.tiers.transfer import Transfer

_NUM_BLOCKS = 4  # two moments are read in turns, each with the block that follows


class BlockSource(Protocol):
    """A reader of blocks, with memory to lend for them."""

    def read_stored(self, extent: Extent, target: torch.Tensor, start: int) -> Transfer:
        """Begin to read from byte `start` of an extent on."""
        ...

    def lend(self) -> torch.Tensor | None:
        """Return memory, [n] uint8 on a border of pages, until `take_back`; None: there is none."""
        ...

    def take_back(self, memory: torch.Tensor) -> None:
        """Take memory back that was lent."""
        ...


class Stored(Protocol):
    """Elements of a state that lives elsewhere."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...
    def numel(self) -> int: ...

    def __getitem__(self, elements: slice) -> Stored:
        """Return the range [start:stop] of them."""
        ...

    def read(self, reader: BlockReader) -> Iterator[torch.Tensor]:
        """Yield their bytes, uint8, in order. What was yielded is valid until the next."""
        ...


class StoredOnHost:
    """Elements in host memory that is not the device's."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    @property
    def dtype(self) -> torch.dtype:
        return self._memory.dtype

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def numel(self) -> int:
        return self._memory.numel()

    def __getitem__(self, elements: slice) -> StoredOnHost:
        return StoredOnHost(self._memory[elements])

    def read(self, reader: BlockReader) -> Iterator[torch.Tensor]:
        yield self._memory.view(torch.uint8)


class Part(NamedTuple):
    """A piece of a state on disk.

    Attributes:
        start: its first byte in the state.
    """

    start: int
    extent: Extent

    @property
    def stop(self) -> int:
        return self.start + self.extent.num_bytes

    def of(self, memory: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return its bytes in uint8 `memory`, which begins with byte `first` of the state."""
        return memory[self.start - first : self.stop - first]


class StoredOnDisk:
    """Elements in extents of the rank's file."""

    def __init__(
        self, source: BlockSource, parts: Sequence[Part], dtype: torch.dtype, start: int, stop: int
    ) -> None:
        """
        Args:
            dtype: of the elements.
            start: first byte of them in the state.
            stop: the one after the last.
        """
        self._source = source
        self._parts = parts
        self._dtype = dtype
        self._start = start
        self._stop = stop

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def nbytes(self) -> int:
        return self._stop - self._start

    def numel(self) -> int:
        return self.nbytes // self._dtype.itemsize

    def __getitem__(self, elements: slice) -> StoredOnDisk:
        first, last, _ = elements.indices(self.numel())
        start = self._start + first * self._dtype.itemsize
        stop = self._start + max(first, last) * self._dtype.itemsize
        return StoredOnDisk(self._source, self._parts, self._dtype, start, stop)

    def read(self, reader: BlockReader) -> Iterator[torch.Tensor]:
        blocks = list(self._blocks())
        for number, (block, low, high) in enumerate(blocks):
            memory = reader.get(block)
            for following, _, _ in blocks[number + 1 : number + 2]:
                reader.begin(following)
            yield memory[low:high]

    def _blocks(self) -> Iterator[tuple[_Block, int, int]]:
        """Yield the blocks that have some of the bytes, each with where these begin and end."""
        for part in self._parts:
            low = max(self._start, part.start) - part.start
            high = min(self._stop, part.stop) - part.start
            if low >= high:
                continue
            size = part.extent.block_bytes
            for start in range(low - low % size, high, size):
                num_bytes = min(size, part.extent.num_bytes - start)
                block = _Block(self._source, part.extent, start, num_bytes)
                yield block, max(low - start, 0), min(high - start, num_bytes)


class _Block(NamedTuple):
    source: BlockSource
    extent: Extent
    start: int  # in the extent
    num_bytes: int


class BlockReader:
    """Reads blocks to a few pieces of memory, and keeps the last ones: for one thread.

    Tensors are not cut where blocks are, so that most blocks are asked for again at once. The
    memory is lent, as far as there is any; `with` gives it back.
    """

    def __init__(self) -> None:
        """Take no memory yet."""
        self._held: dict[tuple[Extent, int], tuple[torch.Tensor, Transfer]] = {}  # oldest first
        self._spare: list[torch.Tensor] = []
        self._lent: list[tuple[BlockSource, torch.Tensor]] = []

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget all blocks, and give back what was lent."""
        for _, coming in self._held.values():
            with suppress(Exception):  # whoever wanted the block was told
                coming.wait_on_host()
        self._held.clear()
        self._spare.clear()
        while self._lent:
            source, memory = self._lent.pop()
            source.take_back(memory)

    def begin(self, block: _Block) -> None:
        """Begin to read a block, unless it is here or on its way."""
        key = block.extent, block.start
        if key in self._held:
            self._held[key] = self._held.pop(key)
            return
        memory = self._take(block)
        target = memory[: block.num_bytes]
        coming = block.source.read_stored(block.extent, target, block.start)
        self._held[key] = memory, coming

    def get(self, block: _Block) -> torch.Tensor:
        """Return a block, [num_bytes] uint8, in memory that stays for the next two blocks."""
        self.begin(block)
        memory, coming = self._held[block.extent, block.start]
        coming.wait_on_host()
        return memory[: block.num_bytes]

    def _take(self, block: _Block) -> torch.Tensor:
        if len(self._held) < _NUM_BLOCKS:
            return self._more(block)
        memory, coming = self._held.pop(next(iter(self._held)))
        coming.wait_on_host()
        return memory if memory.numel() >= block.num_bytes else self._more(block)

    def _more(self, block: _Block) -> torch.Tensor:
        """Return memory that is lent, or new."""
        size = min(block.extent.block_bytes, block.extent.num_bytes)
        if not self._spare and (memory := block.source.lend()) is not None:
            self._lent.append((block.source, memory))
            self._spare += [piece for piece in memory.split(size) if piece.numel() == size]
        if self._spare and self._spare[-1].numel() >= size:
            return self._spare.pop()
        return byte_buffer(size, torch.device("cpu"))
