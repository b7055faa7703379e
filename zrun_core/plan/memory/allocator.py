"""Simulators of CUDA's caching allocator and of a CPU's heap: what they take beyond bytes in use.

CUDA's rules are those of torch's c10/cuda/CUDACachingAllocator.cpp, for one stream. Sizes are
rounded up to 512 bytes. The smallest free block that suffices is taken, and split where the rest is
worth keeping; free neighbours join. If none suffices, a segment is taken from the device: of 2 MiB
for sizes up to 1 MiB, of 20 MiB for sizes below 10 MiB, else of the size in steps of 2 MiB.

    allocate A, 4 MiB    |AAAA................|     a segment of 20 MiB, split: 16 MiB are free
    allocate B, 8 MiB    |AAAABBBBBBBB........|     cut out of the free block
    free A               |....BBBBBBBB........|     two free blocks, 4 and 8 MiB
    allocate C, 9 MiB    |....BBBBBBBB........||CCCCCCCCC...........|
                                                    neither holds it: 40 MiB reserved, 17 in use
    free B               |....................||CCCCCCCCC...........|     neighbours have joined

With expandable segments (PYTORCH_ALLOC_CONF=expandable_segments:True, as zrun sets it) each kind of
size has one segment that grows by pages at its end, so that hardly anything is wasted: C would take
the free 8 MiB at the end, and one page of 20 MiB more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zrun_core.plan.trace.profile import Trace
from zrun_core.plan.trace.rows import values_at

MIB = 1 << 20
_ROUND = 512
_SMALL = MIB  # sizes up to this come from the small pool
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB  # sizes from this on get a segment of their own
_OWN_ROUND = 2 * MIB
_EXPANDABLE_BYTES = 1 << 49  # addresses of an expandable segment, enough for all memory there is
# Of glibc
_HEAP_ROUND = 16  # sizes are multiples of it
_HEAP_SMALL = 1024  # from this size on tensors are aligned,
_HEAP_ALIGN = 96  # and cut out of a block that is so much larger
_HEAP_BESIDE = 64  # what torch notes of a tensor: counters of versions, saved variables


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A range of one segment, linked to its neighbours.

    Attributes:
        segment: number of the segment.
        address: of its first byte, among the addresses of all segments, which lie apart.
        size: bytes.
        is_small: whether it belongs to the pool of sizes up to 1 MiB.
        allocated: whether it is in use.
        mapped: whether there is memory at its addresses.
        previous: its neighbour before it.
        next: its neighbour after it.
    """

    segment: int
    address: int
    size: int
    is_small: bool
    allocated: bool = False
    mapped: bool = True
    previous: MemoryBlock | None = None
    next: MemoryBlock | None = None


class _Pool:
    """Free blocks of one kind, by size and address."""

    def __init__(self) -> None:
        self.keys: list[tuple[int, int]] = []
        self._blocks: dict[tuple[int, int], MemoryBlock] = {}

    def add(self, block: MemoryBlock) -> None:
        key = (block.size, block.address)
        insort(self.keys, key)
        self._blocks[key] = block

    def remove(self, block: MemoryBlock) -> None:
        key = (block.size, block.address)
        del self.keys[bisect_left(self.keys, key)]
        del self._blocks[key]

    def from_size(self, size: int) -> Iterator[MemoryBlock]:
        """Yield free blocks of at least `size`, the best fit first."""
        for place in range(bisect_left(self.keys, (size, 0)), len(self.keys)):
            yield self._blocks[self.keys[place]]

    def all(self) -> list[MemoryBlock]:
        return list(self._blocks.values())


class CachingAllocator:
    """Allocates by the rules, in numbers only.

    Attributes:
        allocated: bytes in use now, rounded as the allocator counts them.
        reserved: bytes taken from the device now.
        peak_allocated: the most of `allocated` so far.
        peak_reserved: the most of `reserved` so far.
    """

    def __init__(self, *, expandable: bool = False, capacity: int | None = None) -> None:
        """
        Args:
            expandable: whether segments are expandable.
            capacity: bytes of the device; before it is exceeded, segments that are free are given
                back. None: no limit.
        """
        self.expandable = expandable
        self.capacity = capacity
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        self._pools = {True: _Pool(), False: _Pool()}
        self._num_segments = 0
        self._next_address = 0
        # Expandable: the addresses without memory at the end of each pool's segment.
        self._tails: dict[bool, MemoryBlock] = {}

    # Allocating

    def allocate(self, num_bytes: int) -> MemoryBlock | None:
        """Return a block of at least `num_bytes`; None for 0 bytes, which take none."""
        if num_bytes <= 0:
            return None
        size = -(-num_bytes // _ROUND) * _ROUND
        is_small = size <= _SMALL
        block = self._find(size, is_small)
        if block is None:
            block = self._grow(size, is_small)
        else:
            self._pools[is_small].remove(block)
        if self._should_split(block, size):
            self._split(block, size)
        block.allocated = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def _find(self, size: int, is_small: bool) -> MemoryBlock | None:
        """Return the free block to take; None if none is large enough."""
        fitting = self._pools[is_small].from_size(size)
        found = next(fitting, None)
        if found is None or not self.expandable:
            return found
        for block in fitting:  # a free block that can still grow counts as large as it can become
            if _reach(block) >= _reach(found):
                break
            found = block
        return found

    def _grow(self, size: int, is_small: bool) -> MemoryBlock:
        """Return a block of memory that is taken from the device."""
        if self.expandable:
            return self._map(size, is_small)
        if is_small:
            segment_bytes = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment_bytes = _LARGE_SEGMENT
        else:
            segment_bytes = -(-size // _OWN_ROUND) * _OWN_ROUND
        self._reserve(segment_bytes)
        block = MemoryBlock(self._num_segments, self._next_address, segment_bytes, is_small)
        self._num_segments += 1
        self._next_address += segment_bytes + _OWN_ROUND
        return block

    def _map(self, size: int, is_small: bool) -> MemoryBlock:
        """Extend the pool's segment by memory, behind what is free at its end."""
        page = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        tail = self._tails.get(is_small)
        if tail is None:
            self._next_address += 2 * _EXPANDABLE_BYTES
            tail = MemoryBlock(
                self._num_segments, self._next_address, _EXPANDABLE_BYTES, is_small, mapped=False
            )
            self._num_segments += 1
            self._tails[is_small] = tail
        before = _free_before(tail)
        missing = size if before is None else size - before.size
        fresh_bytes = -(-missing // page) * page
        self._reserve(fresh_bytes)
        before = _free_before(tail)  # it may just have been given back
        if before is not None:
            self._pools[is_small].remove(before)
            before.size += fresh_bytes
            block = before
        else:
            block = MemoryBlock(
                tail.segment, tail.address, fresh_bytes, is_small, previous=tail.previous, next=tail
            )
            if tail.previous is not None:
                tail.previous.next = block
            tail.previous = block
        tail.address += fresh_bytes
        tail.size -= fresh_bytes
        return block

    def _reserve(self, num_bytes: int) -> None:
        if self.capacity is not None and self.reserved + num_bytes > self.capacity:
            self.release_cached()
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _should_split(self, block: MemoryBlock, size: int) -> bool:
        rest = block.size - size
        if block.is_small or self.expandable:
            return rest >= _ROUND
        return rest > _SMALL

    def _split(self, block: MemoryBlock, size: int) -> None:
        rest = MemoryBlock(
            block.segment,
            block.address + size,
            block.size - size,
            block.is_small,
            previous=block,
            next=block.next,
        )
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        block.size = size
        self._pools[block.is_small].add(rest)

    # Freeing

    def free(self, block: MemoryBlock | None) -> None:
        """Give back what `allocate` returned."""
        if block is None:
            return
        block.allocated = False
        self.allocated -= block.size
        pool = self._pools[block.is_small]
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.mapped and not neighbour.allocated:
                pool.remove(neighbour)
                self._join(block, neighbour)
        pool.add(block)

    @staticmethod
    def _join(block: MemoryBlock, neighbour: MemoryBlock) -> None:
        """Extend `block` by its free `neighbour`."""
        if neighbour is block.previous:
            block.address = neighbour.address
            block.previous = neighbour.previous
            if block.previous is not None:
                block.previous.next = block
        else:
            block.next = neighbour.next
            if block.next is not None:
                block.next.previous = block
        block.size += neighbour.size

    def free_blocks(self) -> tuple[object, ...]:
        """Return all that decides what is allocated where, while the same blocks are in use."""
        return self.reserved, *(tuple(pool.keys) for pool in self._pools.values())

    def release_cached(self) -> None:
        """Give back to the device what is wholly free, as torch's `empty_cache` does."""
        for is_small, pool in self._pools.items():
            page = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
            for block in pool.all():
                if self.expandable:
                    tail = self._tails[is_small]
                    if block.next is tail:  # pages at the end; those in the middle are left to it
                        self._unmap(block, tail, block.size // page * page)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _unmap(self, block: MemoryBlock, tail: MemoryBlock, num_bytes: int) -> None:
        if not num_bytes:
            return
        self._pools[block.is_small].remove(block)
        self.reserved -= num_bytes
        tail.address -= num_bytes
        tail.size += num_bytes
        block.size -= num_bytes
        if block.size:
            self._pools[block.is_small].add(block)
        else:
            tail.previous = block.previous
            if block.previous is not None:
                block.previous.next = tail


def _reach(block: MemoryBlock) -> int:
    """Return how large the block could become without moving."""
    if block.next is None or block.next.mapped:
        return block.size
    return block.size + block.next.size


def _free_before(tail: MemoryBlock) -> MemoryBlock | None:
    """Return the free block before a segment's addresses without memory."""
    before = tail.previous
    if before is None or before.allocated:
        return None
    return before


@dataclass(frozen=True)
class Reserved:
    """The most bytes of a training step: in use, and taken from the device."""

    allocated: int
    reserved: int


def simulate(
    trace: Trace,
    micro: int,
    steady: Sequence[int],
    *,
    accumulation: int = 1,
    late: Sequence[int] = (),
    expandable: bool = True,
    capacity: int | None = None,
) -> Reserved:
    """Replay training steps: the buffers of the states, then the timeline of each micro-batch.

    Args:
        trace: of a micro-batch.
        micro: samples of it.
        steady: bytes of each buffer that is allocated before the first step.
        accumulation: micro-batches per step; more than two change no more than two.
        late: bytes of each buffer that the first update allocates, such as an optimizer's moments.
        expandable: whether segments are expandable.
        capacity: bytes of the device; None: no limit.
    """
    allocator = CachingAllocator(expandable=expandable, capacity=capacity)
    for num_bytes in steady:
        allocator.allocate(num_bytes)
    passes = _passes(trace, micro)
    differ = len(passes.adding) > len(passes.first)
    # Passes that leave the free blocks as they found them: repeated, they do the same.
    settled: set[object] = set()
    for step in range(2):
        for number in range(min(accumulation, 2)):
            adds = number > 0 and differ
            before = adds, allocator.free_blocks()
            if before in settled:
                continue
            _replay(allocator, passes.adding if adds else passes.first)
            if (adds, allocator.free_blocks()) == before:
                settled.add(before)
        if step == 0:
            for num_bytes in late:
                allocator.allocate(num_bytes)
    return Reserved(allocator.peak_allocated, allocator.peak_reserved)


class _Passes(NamedTuple):
    """Events of a micro-batch as (tensor, bytes, whether it comes), in order.

    Attributes:
        first: in the first micro-batch of a step.
        adding: in those that add their gradients to it.
    """

    first: list[tuple[int, int, bool]]
    adding: list[tuple[int, int, bool]]


def _passes(trace: Trace, micro: int) -> _Passes:
    events = trace.of(micro).events
    sizes = np.rint(values_at(events["size"], micro)).astype(np.int64)
    columns = [column.tolist() for column in (events["tensor"], sizes, events["alloc"])]
    adding = [*zip(*columns, strict=True)]
    is_first = (~events["accumulates"]).tolist()
    first = [event for event, happens in zip(adding, is_first, strict=True) if happens]
    return _Passes(first, adding)


def _replay(
    allocator: CachingAllocator | Heap, events: Sequence[tuple[int, int, bool]], beside: int = 0
) -> None:
    """Run one micro-batch. What is still there at the end goes then.

    Args:
        allocator: of its tensors.
        events: of the micro-batch.
        beside: bytes that lie in the same memory for each tensor, until the micro-batch ends.
    """
    blocks: dict[int, Any] = {}
    small = []
    for tensor, num_bytes, comes in events:
        if comes:
            if beside:
                small.append(allocator.allocate(beside))
            blocks[tensor] = allocator.allocate(num_bytes)
        else:
            allocator.free(blocks.pop(tensor))
    for block in (*blocks.values(), *small):
        allocator.free(block)


class Heap:
    """The heap of glibc, from which tensors come on a CPU, in numbers only.

    It never shrinks in a worker. The smallest hole that suffices is taken and cut, neighbours join,
    and what fits nowhere grows the heap at its end. An aligned block is cut out of one that is 96
    bytes larger, so that a tensor does not fit where one of its size has been:

        allocate A, B of 4096    |A 4096|B 4096|96|
        free A                   | 4096 |B 4096|96|
        allocate C of 4096       | 4096 |B 4096|C 4096|96|    needs 4192: grows at the end

    With those 96 bytes beside it a hole would suffice for the next tensor of this size; but small
    things that torch keeps for each tensor settle there.

    Attributes:
        num_bytes: from its beginning to the end of the last block that it ever had.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._holes: list[tuple[int, int]] = []  # (bytes, address), sorted
        self._size_at: dict[int, int] = {}  # of holes, by address
        self._start_of: dict[int, int] = {}  # of holes, by their end

    def allocate(self, num_bytes: int) -> tuple[int, int] | None:
        """Return address and size of a block; None for 0 bytes."""
        if num_bytes <= 0:
            return None
        size = -(-num_bytes // _HEAP_ROUND) * _HEAP_ROUND
        needed = size
        if size >= _HEAP_SMALL:
            needed += _HEAP_ALIGN
        place = bisect_left(self._holes, (needed, 0))
        if place < len(self._holes):
            hole, address = self._holes[place]
            self._take(address)
            if hole > size:
                self._add(address + size, hole - size)
            return address, size
        address = self._start_of.get(self.num_bytes, self.num_bytes)
        if address < self.num_bytes:
            self._take(address)
        self.num_bytes = address + needed
        if needed > size:
            self._add(address + size, needed - size)
        return address, size

    def free(self, block: tuple[int, int] | None) -> None:
        """Give back what `allocate` returned."""
        if block is None:
            return
        address, size = block
        after = self._size_at.get(address + size)
        if after is not None:
            self._take(address + size)
            size += after
        before = self._start_of.get(address)
        if before is not None:
            self._take(before)
            size += address - before
            address = before
        self._add(address, size)

    def _add(self, address: int, size: int) -> None:
        insort(self._holes, (size, address))
        self._size_at[address] = size
        self._start_of[address + size] = address

    def _take(self, address: int) -> None:
        size = self._size_at.pop(address)
        del self._start_of[address + size]
        del self._holes[bisect_left(self._holes, (size, address))]


def heap_bytes(
    trace: Trace, micro: int, built: Sequence[int], late: Sequence[int], accumulation: int = 1
) -> int:
    """Return the size to which a CPU's heap grows in two steps.

    Args:
        trace: of a micro-batch.
        micro: samples of it.
        built: bytes of what is there and gone before the first step: the model as its factory
            makes it.
        late: bytes of what the first update makes, such as an optimizer's moments.
        accumulation: micro-batches per step.
    """
    heap = Heap()
    passes = _passes(trace, micro)
    for block in [heap.allocate(num_bytes) for num_bytes in built]:
        heap.free(block)
    for sizes in (late, ()):
        for number in range(min(accumulation, 2)):
            _replay(heap, passes.adding if number else passes.first, _HEAP_BESIDE)
        for num_bytes in sizes:
            heap.allocate(num_bytes)
    return heap.num_bytes
