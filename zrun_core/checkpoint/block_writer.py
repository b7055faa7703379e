"""Writes a new file in large blocks, past the page cache where the file system allows that.

One thread takes digests of the pieces and copies them into aligned blocks while others write the blocks before: the
disk is always busy, and what is held beside the pieces is constant.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from zrun_core.errors import SaveError
from zrun_core.sizes import format_size

Bytes = NDArray[np.uint8]
_BLOCK = 8 * 2**20
_BLOCKS = 3  # two on their way to the disk, one being filled
_COPY = 2**20  # the digest leaves these in the cache for the copy
_ALIGNMENT = 4096


def write_file(path: Path, num_bytes: int, pieces: Iterable[Bytes]) -> list[str]:
    """Create `path` (0600) with the bytes of `pieces`, `num_bytes` in all, and wait until they are on the disk.

    Returns:
        The digest of each piece.

    Raises:
        SaveError: the file exists, or the disk is full, read-only or fails. Nothing is left of the file.
    """
    try:
        with _created(path, num_bytes) as file:
            digests = _stream(file, num_bytes, pieces)
            os.fsync(file)
    except OSError as error:
        raise save_error(path, error, num_bytes) from error
    return digests


def save_error(path: Path, error: OSError, num_bytes: int | None = None) -> SaveError:
    """What a user reads when `path`, of `num_bytes`, could not be written."""
    text = f"cannot save {path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = f"{format_size(num_bytes)} needed, " if num_bytes is not None else ""
        return SaveError(f"{text} ({needed}{_free(path.parent)} free); free some space, or keep fewer checkpoints")
    return SaveError(f"{text}; the checkpoint before it is kept")


def _free(folder: Path) -> str:
    try:
        status = os.statvfs(folder)
    except OSError:
        return "unknown"
    return format_size(status.f_bavail * status.f_frsize)


@contextmanager
def _created(path: Path, num_bytes: int) -> Iterator[int]:
    """A descriptor of a new file with its space reserved; it is removed again if the block raises."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags, 0o600)
    try:
        try:
            if num_bytes:
                os.posix_fallocate(file, 0, num_bytes)  # a full disk shows here, before any byte is written
            yield file
        finally:
            os.close(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _stream(file: int, num_bytes: int, pieces: Iterable[Bytes]) -> list[str]:
    _past_the_cache(file, True)
    blocks = [np.frombuffer(mmap.mmap(-1, _BLOCK), dtype=np.uint8) for _ in range(_BLOCKS)]
    digests: list[str] = []
    pending: deque[Future[None]] = deque()
    offset, filled = 0, 0  # of the block that is being filled; bytes in it
    # Leaving the pool waits for its threads, also after an error: none writes to a descriptor that is closed.
    with ThreadPoolExecutor(_BLOCKS - 1, thread_name_prefix="zrun-write") as pool:
        for piece in pieces:
            running = xxhash.xxh3_128()
            done = 0
            while done < len(piece):
                part = piece[done : done + min(_COPY, _BLOCK - filled)]
                running.update(part.data)
                np.copyto(blocks[0][filled : filled + len(part)], part)
                done, filled = done + len(part), filled + len(part)
                if filled == _BLOCK:
                    pending.append(pool.submit(write_all, file, blocks[0].data, offset))
                    blocks.append(blocks.pop(0))
                    offset, filled = offset + _BLOCK, 0
                    if len(pending) == _BLOCKS:
                        pending.popleft().result()
            digests.append(running.hexdigest())
        if offset + filled != num_bytes:
            raise ValueError(f"{offset + filled} bytes to write into a file of {num_bytes}")
        whole = filled - filled % _ALIGNMENT
        pending.append(pool.submit(write_all, file, blocks[0][:whole].data, offset))
        for write in pending:
            write.result()
    _past_the_cache(file, False)
    write_all(file, blocks[0][whole:filled].data, offset + whole)
    return digests


def _past_the_cache(file: int, wanted: bool) -> None:
    """Direct writes: twice as fast as through the page cache, which stays for what is read again."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # this file system has no such thing
            raise


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write all of `data`, however many calls that takes.

    Raises:
        OSError: the disk is full, or fails.
    """
    done = 0
    while done < len(data):
        count = os.pwrite(file, data[done:], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the disk takes no more bytes")
        done += count
