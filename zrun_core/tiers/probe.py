"""What a disk can do for states that live on it. Without torch: agents ask it of their hosts."""

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
        folder: an existing one.
        num_bytes: at most so many are written and read, to measure rates.
    """
    path = Path(folder)
    filesystem = file_system(path)
    is_memory = filesystem in IN_MEMORY
    try:
        status = os.statvfs(path)
        free_bytes = status.f_bavail * status.f_frsize
        file = open_nameless(path)
        try:
            num_blocks = max(1, min(num_bytes, free_bytes) // _BLOCK_BYTES)
            reserve(file, num_blocks * _BLOCK_BYTES)
            direct = goes_past_the_cache(file)
            write_rate, read_rate = _rates(file, num_blocks)
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

        def write() -> None:
            for number in range(num_blocks):
                write_pages(file, memory, number * _BLOCK_BYTES)
            os.fsync(file)

        def read() -> None:
            for number in range(num_blocks):
                read_pages(file, memory, number * _BLOCK_BYTES)

        write_s = _timed(write)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # where the cache was not passed
        read_s = _timed(read)
    num_bytes = num_blocks * _BLOCK_BYTES
    return num_bytes / write_s, num_bytes / read_s


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
