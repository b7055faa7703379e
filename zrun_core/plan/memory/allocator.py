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

from zrun_core.pipeline.actions import ActionKind
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
_HEAP_ALIGN = 96  # and cut out of a block that is so much larger: half of that is before it
# Of the pieces that are left, small things settle in so many that are there until the pass ends:
# nodes of autograd, saved variables, what glibc keeps for the next small one. Measured, by
# replaying all that ranks have allocated, with recomputation and without it.
_SETTLED = 1 / 20
_GOLDEN = 0.6180339887498949  # its multiples, taken modulo 1, are spread evenly


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A range of one segment, linked to its neighbours.

    Attributes:
        segment: address of the first byte of the segment.
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
    """Free blocks of one kind, by size and address, and addresses that have no memory."""

    def __init__(self) -> None:
        self.keys: list[tuple[int, int]] = []
        self.unmapped: dict[int, MemoryBlock] = {}  # by address
        self._blocks: dict[tuple[int, int], MemoryBlock] = {}

    def add(self, block: MemoryBlock) -> None:
        if not block.mapped:
            self.unmapped[block.address] = block
            return
        key = (block.size, block.address)
        insort(self.keys, key)
        self._blocks[key] = block

    def remove(self, block: MemoryBlock) -> None:
        if not block.mapped:
            del self.unmapped[block.address]
            return
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
        self._next_address = 0

    # Allocating

    def allocate(self, num_bytes: int) -> MemoryBlock | None:
        """Return a block of at least `num_bytes`; None for 0 bytes, which take none."""
        if num_bytes <= 0:
            return None
        size = -(-num_bytes // _ROUND) * _ROUND
        is_small = size <= _SMALL
        block = self._find(size, is_small)
        if block is not None:
            self._pools[is_small].remove(block)
        else:
            block = self._grow(size, is_small)
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
        grow = self._extend if self.expandable else self._new_segment
        if self.capacity is not None:
            block = grow(size, is_small, self.capacity)
            if block is not None:
                return block
            self.release_cached()
        block = grow(size, is_small, None)
        assert block is not None
        return block

    def _new_segment(self, size: int, is_small: bool, limit: int | None) -> MemoryBlock | None:
        """Return a segment; None if more would be reserved than `limit`."""
        if is_small:
            segment_bytes = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment_bytes = _LARGE_SEGMENT
        else:
            segment_bytes = -(-size // _OWN_ROUND) * _OWN_ROUND
        if not self._reserve(segment_bytes, limit):
            return None
        return self._addresses(segment_bytes, is_small)

    def _addresses(self, num_bytes: int, is_small: bool) -> MemoryBlock:
        block = MemoryBlock(self._next_address, self._next_address, num_bytes, is_small)
        self._next_address += num_bytes + _LARGE_SEGMENT
        return block

    def _extend(self, size: int, is_small: bool, limit: int | None) -> MemoryBlock | None:
        """Return a block of an expandable segment; None if more would be reserved than `limit`.

        Memory goes to the lowest addresses where there is room, together with what is free there.
        """
        block = self._room(size, is_small)
        if not block.mapped and not self._map(block, min(block.size, size), limit):
            return None
        while block.size < size:  # it is free, and behind it are addresses without memory
            behind = block.next
            assert behind is not None
            if not self._map(behind, min(size - block.size, behind.size), limit):
                return None
            block = behind
        self._pools[is_small].remove(block)
        return block

    def _room(self, size: int, is_small: bool) -> MemoryBlock:
        """Return the first of the free or unmapped blocks side by side that hold `size`."""
        pool = self._pools[is_small]
        for address in sorted(pool.unmapped):
            first = pool.unmapped[address]
            if first.previous is not None and not first.previous.allocated:
                first = first.previous
            room = 0
            each: MemoryBlock | None = first
            while each is not None and not each.allocated and room < size:
                room += each.size
                each = each.next
            if room >= size:
                return first
        page = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        space = _EXPANDABLE_BYTES
        if self.capacity is not None:
            space = max(size, self.capacity + self.capacity // 8)
        block = self._addresses(-(-space // page) * page, is_small)
        block.mapped = False
        pool.add(block)
        return block

    def _map(self, block: MemoryBlock, size: int, limit: int | None) -> bool:
        """Put memory at the first addresses of a block that has none, and free it.

        Returns:
            False: nothing is done, more would be reserved than `limit`.
        """
        page = _SMALL_SEGMENT if block.is_small else _LARGE_SEGMENT
        size = -(-size // page) * page
        if not self._reserve(size, limit):
            return False
        self._pools[block.is_small].remove(block)
        if size < block.size:
            self._split(block, size)
        block.mapped = True
        self._put_back(block)
        return True

    def _reserve(self, num_bytes: int, limit: int | None) -> bool:
        if limit is not None and self.reserved + num_bytes > limit:
            return False
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

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
            mapped=block.mapped,
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
        self._put_back(block)

    def _put_back(self, block: MemoryBlock) -> None:
        """Join a block with its neighbours that are as it is, and add it to its pool."""
        pool = self._pools[block.is_small]
        for neighbour in (block.previous, block.next):
            if neighbour is None or neighbour.allocated or neighbour.mapped != block.mapped:
                continue
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
        pools = self._pools.values()
        found = (
            part for pool in pools for part in (tuple(pool.keys), tuple(sorted(pool.unmapped)))
        )
        return self.reserved, *found

    def release_cached(self) -> None:
        """Give back to the device what is wholly free, as torch's `empty_cache` does."""
        for pool in self._pools.values():
            for block in pool.all():
                if self.expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _unmap(self, block: MemoryBlock) -> None:
        """Take the whole pages that lie in a free block away from it."""
        page = _SMALL_SEGMENT if block.is_small else _LARGE_SEGMENT
        begin = -(-(block.address - block.segment) // page) * page
        end = (block.address - block.segment + block.size) // page * page
        if begin >= end:
            return
        pool = self._pools[block.is_small]
        pool.remove(block)
        if block.segment + end < block.address + block.size:
            self._split(block, block.segment + end - block.address)
        if block.segment + begin > block.address:
            self._split(block, block.segment + begin - block.address)
            pool.add(block)
            assert block.next is not None
            block = block.next
            pool.remove(block)
        block.mapped = False
        self.reserved -= end - begin
        self._put_back(block)
        if block.previous is None and block.next is None:
            pool.remove(block)


def _reach(block: MemoryBlock) -> int:
    """Return how large the block could become without moving."""
    if block.next is None or block.next.mapped:
        return block.size
    return block.size + block.next.size


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
        steady: bytes of each buffer that is allocated before the first step.
        accumulation: micro-batches per step; more than two change no more than two.
        late: bytes of each buffer that the first update allocates, such as an optimizer's moments.
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


def _replay(allocator: CachingAllocator | Heap, events: Sequence[tuple[int, int, bool]]) -> None:
    """Run one micro-batch. What is still there at the end goes then."""
    blocks: dict[int, Any] = {}
    for tensor, num_bytes, comes in events:
        if comes:
            blocks[tensor] = allocator.allocate(num_bytes)
        else:
            allocator.free(blocks.pop(tensor))
    for block in blocks.values():
        allocator.free(block)


class Heap:
    """The heap of glibc, from which tensors come on a CPU, in numbers only.

    It never shrinks in a worker. The smallest hole that suffices is taken and cut, neighbours join,
    and what fits nowhere grows the heap at its end. An aligned block is cut out of one that is 96
    bytes larger, so that a tensor does not fit where one of its size has been:

        allocate A, B of 4096    |48|A 4096|48|48|B 4096|48|
        free A                   |    4192    |48|B 4096|48|
        allocate C of 4096       |48|C 4096|48|48|B 4096|48|    it has room where A was, but for:
        a small thing settles    |48|A 4096|..|48|B 4096|48|    in a piece, and A goes
        allocate C of 4096       |   4144  |..|48|B 4096|48|48|C 4096|48|    grows at the end

    Attributes:
        num_bytes: from its beginning to the end of the last block that it ever had.
        settled: pieces beside blocks that are in use for small things, until who frees them.
    """

    def __init__(self, share_settled: float = 0.0) -> None:
        """
        Args:
            share_settled: of the pieces beside blocks, those in which small things settle.
        """
        self.num_bytes = 0
        self.settled: list[tuple[int, int]] = []
        self._share_settled = share_settled
        self._num_pieces = 0
        self._holes: list[tuple[int, int]] = []  # (bytes, address), sorted
        self._size_at: dict[int, int] = {}  # of holes, by address
        self._start_of: dict[int, int] = {}  # of holes, by their end

    def allocate(self, num_bytes: int) -> tuple[int, int] | None:
        """Return address and size of a block; None for 0 bytes."""
        if num_bytes <= 0:
            return None
        size = -(-num_bytes // _HEAP_ROUND) * _HEAP_ROUND
        if size < _HEAP_SMALL:
            return self._cut(size), size
        around = self._cut(size + _HEAP_ALIGN)
        before = _HEAP_ALIGN // 2
        self._leave((around, before))
        self._leave((around + before + size, _HEAP_ALIGN - before))
        return around + before, size

    def _cut(self, size: int) -> int:
        """Return the address of so many bytes that were free."""
        place = bisect_left(self._holes, (size, 0))
        if place < len(self._holes):
            hole, address = self._holes[place]
            self._take(address)
            if hole > size:
                self._add(address + size, hole - size)
            return address
        address = self._start_of.get(self.num_bytes, self.num_bytes)
        if address < self.num_bytes:
            self._take(address)
        self.num_bytes = address + size
        return address

    def _leave(self, piece: tuple[int, int]) -> None:
        """Free a piece beside a block, unless something small settles in it."""
        self._num_pieces += 1
        if self._num_pieces * _GOLDEN % 1 < self._share_settled:
            self.settled.append(piece)
        else:
            self.free(piece)

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


def heap_bytes(trace: Trace, micro: int, built: Sequence[int], accumulation: int = 1) -> int:
    """Return the size to which a CPU's heap grows in two steps.

    Args:
        built: bytes of what is there and gone before the first step: the model as its factory
            makes it.
        accumulation: micro-batches per step.
    """
    heap = Heap(_SETTLED)
    passes = _passes(trace, micro)
    _build(heap, built)
    for _ in range(2):
        for number in range(min(accumulation, 2)):
            _replay(heap, passes.adding if number else passes.first)
            _free_all(heap, heap.settled)
    return heap.num_bytes


def heap_bytes_of_stage(
    trace: Trace,
    micro: int,
    chunks: Sequence[range],
    actions: Sequence[tuple[ActionKind, int, int]],
    built: Sequence[int],
    *,
    accumulating: bool,
) -> int:
    """Return the size to which the heap of a pipeline stage grows in two steps.

    Args:
        chunks: of the stage: the segments of each.
        actions: of a step, in order, each with its chunk, counted among the stage's own, and its
            micro-batch.
        built: as of `heap_bytes`.
        accumulating: whether gradients are added to those of earlier micro-batches.
    """
    heap = Heap(_SETTLED)
    trace = trace.of(micro)
    parts = []
    for segments in chunks:
        events = trace.lifetimes.chunk(segments, accumulating)
        sizes = np.rint(values_at(events.size, micro)).astype(np.int64)[events.tensor]
        rows = [
            *zip(events.tensor.tolist(), sizes.tolist(), (events.sign > 0).tolist(), strict=True)
        ]
        parts.append((rows[: events.forward_end], rows[events.forward_end :]))
    makes_weights_late = any(kind is ActionKind.WEIGHT for kind, *_ in actions)
    _build(heap, built)
    for _ in range(2):
        # By chunk and micro-batch: its tensors, and what has settled beside them.
        under_way: dict[tuple[int, int], tuple[dict[int, Any], list[tuple[int, int]]]] = {}
        for kind, chunk, number in actions:
            blocks, settled = under_way.setdefault((chunk, number), ({}, []))
            if kind is not ActionKind.WEIGHT:
                for tensor, num_bytes, comes in parts[chunk][kind is ActionKind.BACKWARD]:
                    if comes:
                        blocks[tensor] = heap.allocate(num_bytes)
                    else:
                        heap.free(blocks.pop(tensor))
                settled += heap.settled
                heap.settled.clear()
            last = ActionKind.WEIGHT if makes_weights_late else ActionKind.BACKWARD
            if kind is last:
                _free_all(heap, [*blocks.values(), *settled])
                del under_way[chunk, number]
    return heap.num_bytes


def _build(heap: Heap, sizes: Sequence[int]) -> None:
    for block in [heap.allocate(num_bytes) for num_bytes in sizes]:
        heap.free(block)
    _free_all(heap, heap.settled)


def _free_all(heap: Heap, blocks: list[tuple[int, int]]) -> None:
    for block in blocks:
        heap.free(block)
    blocks.clear()
