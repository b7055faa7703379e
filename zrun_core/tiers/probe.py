"""Probe a disk for states that are to live on it. Without torch: agents do it on their hosts."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zrun_core.spine.direct_io import (
    file_system,
    goes_past_the_cache,
    open_nameless,
    read_pages,
    reserve,
    write_pages,
)

_BLOCK_BYTES = 8 << 20
_SHARE = 16  # of the free space, for a look: several jobs may look at a time
_LONGEST_S = 1.0  # of either measurement, on a disk that is slow
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")  # "disks" that are made of memory


@dataclass(frozen=True)
class DiskFacts:
    """A folder, and the disk under it.

    Attributes:
        error: why no file can be made, written or read there; None: it can.
        filesystem: type of the file system; "" if it cannot be told.
        is_memory: the file system lies in memory: what is put there saves none.
        direct: reads and writes pass the page cache.
        free_bytes: that this user may take.
        read_rate, write_rate: bytes per second, of one thread; 0: not measured.
    """

    folder: str
    error: str | None = None
    filesystem: str = ""
    is_memory: bool = False
    direct: bool = False
    free_bytes: int = 0
    read_rate: float = 0.0
    write_rate: float = 0.0


def probe_disk(folder: str, num_bytes: int = 64 << 20) -> DiskFacts:
    """Return the facts of the disk under `folder`. Nothing is left there.

    Args:
        num_bytes: at most so many are written and read, to measure rates. Where little is free,
            a page alone is: rates are not measured.
    """
    path = Path(folder)
    filesystem = file_system(path)
    is_memory = filesystem in IN_MEMORY
    try:
        status = os.statvfs(path)
        free_bytes = status.f_bavail * status.f_frsize
        file = open_nameless(path)
        try:
            num_blocks = min(num_bytes, free_bytes // _SHARE) // _BLOCK_BYTES
            reserve(file, num_blocks * _BLOCK_BYTES or mmap.PAGESIZE)
            direct = goes_past_the_cache(file)
            write_rate, read_rate = _rates(file, num_blocks) if num_blocks else (0.0, 0.0)
        finally:
            os.close(file)
    except OSError as error:
        reason = error.strerror or str(error)
        return DiskFacts(folder, reason, filesystem, is_memory)
    return DiskFacts(folder, None, filesystem, is_memory, direct, free_bytes, read_rate, write_rate)


def _rates(file: int, num_blocks: int) -> tuple[float, float]:
    """Return the bytes per second that are written, and read, in large blocks."""
    with mmap.mmap(-1, _BLOCK_BYTES) as block, memoryview(block) as memory:
        block.write(os.urandom(_BLOCK_BYTES))  # a disk may compress
        start = time.perf_counter()
        num_written = _moved(lambda offset: write_pages(file, memory, offset), num_blocks)
        os.fsync(file)
        written_at = time.perf_counter()
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # where the cache was not passed
        num_read = _moved(lambda offset: read_pages(file, memory, offset), num_written)
        read_s = time.perf_counter() - written_at
    write_rate = num_written * _BLOCK_BYTES / (written_at - start)
    return write_rate, num_read * _BLOCK_BYTES / read_s


def _moved(move: Callable[[int], object], num_blocks: int) -> int:
    """Move blocks by their offsets; return how many they were until the time was over."""
    stop = time.perf_counter() + _LONGEST_S
    for number in range(num_blocks):
        move(number * _BLOCK_BYTES)
        if time.perf_counter() > stop:
            return number + 1
    return num_blocks
