"""Memory for flat units: buffers whose address never changes, and rings of constant size.

[Note: constant addresses]
Autograd saves views of parameters (a linear layer keeps `weight.t()`), and such a view must find
the parameter's values when backward reaches it, although the unit was resharded and gathered again
in between. So an unsharded unit has one storage for life, a `Window`. On Linux CPUs the window is a
range of addresses, and gathering *moves pages* into it from a `PagePool`; resharding moves them
back. mremap moves page-table entries: about 10 us for 10 MiB, no copy, no page fault.

    window of a unit on rank 0 of 2             pool
    | shard 0 | unreadable   |                  | page | page | page | page |
    | shard 0 | page | page  |                  |             | page | page |   acquire
    | shard 0 | shard 1      |                                                  all-gather fills it
    | shard 0 | unreadable   |                  | page | page | page | page |   release

The rank's own shard lies in the window permanently, so a gather neither copies it nor holds it
twice, and resident memory is the shards plus the pool. Of a model of 30 units of 64 MiB on 4 ranks,
of which two are unsharded at a time, that is 30 * 16 MiB of shards and 2 * 48 MiB of pool: 576 MiB
instead of 1920.

Shards and pool lie in huge pages as far as these fit between the borders of shards: other ranks
read a shard nearly twice as fast from those. Elsewhere (CUDA) the window is a storage that is
resized to zero and back, which the caching allocator makes cheap.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict

import torch

from zrun_core.memory.layout import PAGE_BYTES, whole_pages

_HUGE_PAGE_BYTES = 2 << 20
# Constants of Linux's mman.h.
_PROT_NONE = 0
_PROT_RW = mmap.PROT_READ | mmap.PROT_WRITE
_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_MOVE = 1 | 2 | 4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP (Linux 5.7)
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MAP_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return the C library, with the types of what is called here."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p
    size = ctypes.c_size_t
    flags = ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, flags, flags, flags, ctypes.c_long]
    libc.mremap.restype = address
    libc.mremap.argtypes = [address, size, size, flags, address]
    libc.munmap.argtypes = [address, size]
    libc.mprotect.argtypes = [address, size, flags]
    libc.madvise.argtypes = [address, size, flags]
    return libc


def _check(failed: bool, what: str) -> None:
    if failed:
        number = ctypes.get_errno()
        raise MemoryError(f"{what}: {os.strerror(number)} (errno {number})")


class Region:
    """A range of addresses, unmapped when the last tensor over it is gone."""

    def __init__(self, num_bytes: int, *, huge: bool = True, protected: bool = False) -> None:
        """Reserve addresses.

        Args:
            num_bytes: rounded up to whole pages.
            huge: let it lie in huge pages as far as these fit.
            protected: it is unreadable, and counts towards no limit, until `unprotect`.

        Raises:
            MemoryError: the system does not reserve so much.
        """
        self.num_bytes = whole_pages(num_bytes)
        # Aligned to huge pages, so that moving whole huge pages moves one entry each.
        self._mapped_bytes = self.num_bytes + _HUGE_PAGE_BYTES
        self._base: int | None = None
        access = _PROT_NONE if protected else _PROT_RW
        base = _libc().mmap(None, self._mapped_bytes, access, _RESERVE, -1, 0)
        _check(base == _MAP_FAILED, f"cannot reserve {num_bytes} bytes of memory")
        self._base = base
        self.address = _round_up(base, _HUGE_PAGE_BYTES)
        if huge:
            self.advise_huge(0, self.num_bytes)  # best effort
        # Loader processes have no use for it, and would keep every page that changes alive a second
        # time.
        _libc().madvise(self.address, self.num_bytes, _MADV_DONTFORK)

    def advise_huge(self, offset: int, num_bytes: int) -> None:
        """Have a range of pages lie in huge ones as far as these fit, if the system has them."""
        _libc().madvise(self.address + offset, num_bytes, _MADV_HUGEPAGE)

    def protect(self, offset: int, num_bytes: int) -> None:
        """Make a range unreadable.

        Use of a unit that is not unsharded stops at once instead of computing on zeros.
        """
        _check(_libc().mprotect(self.address + offset, num_bytes, _PROT_NONE) != 0, "mprotect")

    def unprotect(self, offset: int, num_bytes: int) -> None:
        """Make a range readable and writable.

        Raises:
            MemoryError: this process may not have so much.
        """
        failed = _libc().mprotect(self.address + offset, num_bytes, _PROT_RW) != 0
        _check(failed, f"cannot have {num_bytes} bytes of memory")

    def tensor(self, num_bytes: int | None = None) -> torch.Tensor:
        """Return the first `num_bytes` of the region, or all of it, as uint8.

        The tensor, and every view of it, keeps the region alive.
        """
        count = self.num_bytes if num_bytes is None else num_bytes
        buffer = (ctypes.c_char * self.num_bytes).from_address(self.address)
        buffer._region = self  # type: ignore[attr-defined]
        return torch.frombuffer(buffer, dtype=torch.uint8, count=count)

    def __del__(self) -> None:
        if self._base is not None:
            _libc().munmap(self._base, self._mapped_bytes)


def _move_pages(source: int, target: int, num_bytes: int) -> None:
    """Move pages between addresses.

    One call cannot cross two mappings, so a range that is refused is moved by halves.
    """
    moved = _libc().mremap(source, num_bytes, num_bytes, _MOVE, target)
    if moved == target:
        return
    pages = num_bytes // PAGE_BYTES
    _check(pages <= 1, "mremap")
    half = pages // 2 * PAGE_BYTES
    _move_pages(source, target, half)
    _move_pages(source + half, target + half, num_bytes - half)


def _whole_huge_pages(start: int, stop: int) -> tuple[int, int]:
    """Return the whole huge pages in a range of addresses, which may be none, as a range."""
    first = _round_up(start, _HUGE_PAGE_BYTES)
    last = stop // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if first >= last:
        return start, start
    return first, last


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


class PagePool:
    """Pages that units take while they are unsharded.

    Its size is fixed until a unit needs more than was foreseen.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = 0
        self._regions: list[Region] = []
        self._free: list[tuple[int, int]] = []  # (address, bytes), sorted
        if num_bytes:
            self._grow(num_bytes)
        self._num_foreseen = len(self._regions)

    def shrink(self) -> None:
        """Give back what it has grown by, if everything is free."""
        is_idle = self.free_bytes == self.num_bytes
        if not is_idle or len(self._regions) == self._num_foreseen:
            return
        del self._regions[self._num_foreseen :]
        self._free = [(region.address, region.num_bytes) for region in self._regions]
        self.num_bytes = self.free_bytes

    def _grow(self, num_bytes: int) -> None:
        region = Region(num_bytes)
        self._regions.append(region)
        self.num_bytes += region.num_bytes
        self.give([(region.address, region.num_bytes)])

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    def take(self, huge_bytes: int, num_bytes: int) -> list[tuple[int, int]]:
        """Take pages, and grow if there are not enough.

        Huge pages are taken from the bottom and single ones from the top, so that in the long run
        each page of the pool serves one purpose: a huge one that was split stays split.

        Args:
            huge_bytes: in huge pages. The first extents are whole ones, if there are so many.

        Returns:
            Extents as (address, bytes), `huge_bytes` + `num_bytes` in total.
        """
        missing = huge_bytes + num_bytes - self.free_bytes
        if missing > 0:
            self._grow(missing)
        taken: list[tuple[int, int]] = []
        left: list[tuple[int, int]] = []
        for address, size in self._free:
            first, last = _whole_huge_pages(address, address + size)
            used = min(last - first, huge_bytes)
            if not used:
                left.append((address, size))
                continue
            taken.append((first, used))
            huge_bytes -= used
            before = (address, first - address)
            behind = (first + used, address + size - first - used)
            left += [extent for extent in (before, behind) if extent[1]]
        self._free = left
        num_bytes += huge_bytes  # for which there were no whole huge pages
        while num_bytes:
            address, size = self._free.pop()
            used = min(size, num_bytes)
            if used < size:
                self._free.append((address, size - used))
            taken.append((address + size - used, used))
            num_bytes -= used
        return taken

    def give(self, extents: list[tuple[int, int]]) -> None:
        """Take back extents, and join neighbours."""
        merged: list[tuple[int, int]] = []
        end = -1  # of the last one
        for address, size in sorted(self._free + extents):
            if address == end:
                start, length = merged.pop()
                merged.append((start, length + size))
            else:
                merged.append((address, size))
            end = address + size
        self._free = merged


class StorageMeter:
    """Count the bytes of resized storages that have memory.

    What was foreseen counts as taken, as that of a pool is.

    Attributes:
        num_bytes: the most at a time, and at least what was foreseen.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._foreseen = num_bytes
        self._held = 0

    def take(self, num_bytes: int) -> None:
        self._held += num_bytes
        self.num_bytes = max(self.num_bytes, self._held)

    def give(self, num_bytes: int) -> None:
        self._held -= num_bytes

    def shrink(self) -> None:
        """Forget what it has grown by, if everything was given back."""
        if not self._held:
            self.num_bytes = self._foreseen


class Window(ABC):
    """The flat buffer of one unsharded unit. See [Note: constant addresses].

    `full` and its storage live as long as the unit; its values come and go.

    Attributes:
        full: [padded_numel] in the unit's dtype.
        shard: [shard_numel], the rank's own slice, or a copy of it; always valid. Empty where the
            home of the shard is elsewhere: then the own slice of `full` comes and goes with the
            others.
    """

    full: torch.Tensor
    shard: torch.Tensor

    @abstractmethod
    def acquire(self) -> None:
        """Give memory to all of the buffer.

        The own slice holds the shard where it is one of memory, and else anything, as the rest
        does: the gather that follows brings it too.
        """

    @abstractmethod
    def release(self) -> None:
        """Free all but the shard."""


class ResidentWindow(Window):
    """A unit that is never resharded: the shard is a slice of it."""

    def __init__(self, full: torch.Tensor, own: tuple[int, int]) -> None:
        """Take `full` [padded_numel], of which `own` is the range of this rank."""
        self.full = full
        self.shard = full[own[0] : own[1]]

    def acquire(self) -> None:
        pass

    def release(self) -> None:
        pass


class PageWindow(Window):
    """A unit on a Linux CPU, whose pages move. See [Note: constant addresses]."""

    def __init__(
        self, numel: int, own: tuple[int, int], dtype: torch.dtype, pool: PagePool
    ) -> None:
        """Reserve addresses, with memory for the shard only.

        Args:
            numel: padded_numel of the unit.
            own: first and last + 1 element of this rank's shard, on borders of pages; (0, 0): it
                has no memory here.
            pool: where the other ranks' shards get their pages.
        """
        self._region = Region(numel * dtype.itemsize, huge=False)
        self._pool = pool
        self.full = self._region.tensor().view(dtype)
        self.shard = self.full[own[0] : own[1]]
        start = own[0] * dtype.itemsize
        stop = own[1] * dtype.itemsize
        # Huge pages lie between the borders of shards: across one they would be split by a move.
        first, last = _whole_huge_pages(start, stop)
        self._region.advise_huge(first, last - first)
        # The other ranks' shards, before and behind the own one: (offset, bytes).
        around = ((0, start), (stop, self._region.num_bytes))
        self._foreign = [(low, high - low) for low, high in around if low < high]
        # Of these the huge pages, and what is left before and behind those.
        self._huge: list[tuple[int, int]] = []
        self._single: list[tuple[int, int]] = []
        for offset, num_bytes in self._foreign:
            end = offset + num_bytes
            first, last = _whole_huge_pages(offset, end)
            self._huge.append((first, last - first))
            self._single += [(offset, first - offset), (last, end - last)]
        self._huge_bytes = sum(num_bytes for _, num_bytes in self._huge)
        self._single_bytes = sum(num_bytes for _, num_bytes in self._single)
        self._held: list[tuple[int, int, int]] = []  # (pool address, window address, bytes)
        for offset, num_bytes in self._foreign:
            self._region.protect(offset, num_bytes)

    def acquire(self) -> None:
        extents = self._pool.take(self._huge_bytes, self._single_bytes)
        for offset, num_bytes in (*self._huge, *self._single):
            target = self._region.address + offset
            while num_bytes:
                source, size = extents.pop(0)
                used = min(size, num_bytes)
                if used < size:
                    extents.insert(0, (source + used, size - used))
                _move_pages(source, target, used)
                self._held.append((source, target, used))
                target += used
                num_bytes -= used

    def release(self) -> None:
        for source, target, num_bytes in self._held:
            _move_pages(target, source, num_bytes)
        for offset, num_bytes in self._foreign:
            self._region.protect(offset, num_bytes)
        self._pool.give([(source, num_bytes) for source, _, num_bytes in self._held])
        self._held = []


class StorageWindow(Window):
    """A unit whose storage is resized: any device, any platform. The shard is a copy of its own."""

    def __init__(
        self,
        numel: int,
        own: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        meter: StorageMeter,
    ) -> None:
        """Allocate the shard.

        Args:
            numel: padded_numel of the unit.
            own: first and last + 1 element of this rank's shard; (0, 0): it has no memory here.
            meter: counts the bytes that have memory.
        """
        self._meter = meter
        self.full = torch.empty(numel, dtype=dtype, device=device)
        self.shard = torch.zeros(own[1] - own[0], dtype=dtype, device=device)  # padding too
        self._num_bytes = self.full.untyped_storage().nbytes()
        self.full.untyped_storage().resize_(0)

    def acquire(self) -> None:
        self._meter.take(self._num_bytes)
        self.full.untyped_storage().resize_(self._num_bytes)

    def release(self) -> None:
        self.full.untyped_storage().resize_(0)
        self._meter.give(self._num_bytes)


@functools.cache
def can_move_pages() -> bool:
    """Return whether this system moves pages as `PageWindow` needs it."""
    if not sys.platform.startswith("linux") or mmap.PAGESIZE != PAGE_BYTES:
        return False
    source = Region(PAGE_BYTES, huge=False)
    target = Region(PAGE_BYTES, huge=False)
    ctypes.memset(source.address, 1, PAGE_BYTES)
    try:
        _move_pages(source.address, target.address, PAGE_BYTES)
    except MemoryError:
        return False
    return ctypes.string_at(target.address, 1) == b"\1"


def flat_buffer(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a permanent buffer of zeros, [numel], in whole pages.

    On a Linux CPU it lies in huge pages outside the heap, which it therefore does not fragment.

    Args:
        numel: elements.
    """
    num_bytes = numel * dtype.itemsize
    if _takes_regions(device) and numel:
        return Region(num_bytes).tensor().view(dtype)[:numel]
    padded = torch.zeros(whole_pages(num_bytes) // dtype.itemsize, dtype=dtype, device=device)
    return padded[:numel]


def byte_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a permanent buffer of zeros, [num_bytes] uint8, like `flat_buffer`: no larger."""
    if _takes_regions(device) and num_bytes:
        return Region(num_bytes).tensor(num_bytes)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _takes_regions(device: torch.device) -> bool:
    return device.type == "cpu" and sys.platform.startswith("linux")


class Ring:
    """Scratch of constant size for reductions: first fit over one flat buffer.

    `take` returns None when the ring is full: the caller waits for something in flight, gives it
    back, and asks again; with nothing in flight it asks with `grow=True`.

        |xxxx|    |xx|          |       take 3: the first gap that is wide enough
        |xxxx|xxx |xx|          |
    """

    def __init__(self, num_bytes: int, device: torch.device, alignment: int = 256) -> None:
        """Allocate it.

        Args:
            alignment: bytes; what is taken begins on multiples of it.
        """
        self.device = device
        self.num_bytes = 0
        self._alignment = alignment
        self._arenas: list[tuple[torch.Tensor, OrderedDict[int, int]]] = []
        if num_bytes:
            self._add(num_bytes)

    def _add(self, num_bytes: int) -> None:
        self._arenas.append((flat_buffer(num_bytes, torch.uint8, self.device), OrderedDict()))
        self.num_bytes += num_bytes

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the memory itself."""
        return [arena for arena, _ in self._arenas]

    def take(self, numel: int, dtype: torch.dtype, *, grow: bool = False) -> torch.Tensor | None:
        """Return [numel] of undefined values, or None if there is no room now.

        Args:
            numel: elements.
            grow: allocate more if there is no room.
        """
        if not numel:
            return torch.empty(0, dtype=dtype, device=self.device)
        need = _round_up(numel * dtype.itemsize, self._alignment)
        for arena, used in self._arenas:
            cursor = 0
            for start in sorted(used):
                if start - cursor >= need:
                    break
                cursor = start + used[start]
            if cursor + need <= arena.numel():
                used[cursor] = need
                return arena[cursor : cursor + numel * dtype.itemsize].view(dtype)
        if not grow:
            return None
        self._add(need)
        return self.take(numel, dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Give back what `take` returned."""
        if not tensor.numel():
            return
        for arena, used in self._arenas:
            offset = tensor.data_ptr() - arena.data_ptr()
            if 0 <= offset < arena.numel():
                del used[offset]
                return
        raise AssertionError("not from this ring")
