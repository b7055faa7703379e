"""Writes a new file in large blocks, past the page cache where the file system allows that.

One thread takes digests of the pieces and copies them into aligned blocks while others write the
blocks before: the disk is always busy, and what is held beside the pieces is constant.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from zrun_core.errors import SaveError
from zrun_core.sizes import format_size
from zrun_core.spine.direct_io import free_space, past_the_cache, reserve, write_all

Bytes = NDArray[np.uint8]
_BLOCK = 4 * 2**20
_BLOCKS = 5  # four on their way to the disk, one being filled
HELD_BYTES = _BLOCKS * _BLOCK  # while a file is written
_COPY = 2**20  # the digest leaves these in the cache for the copy
_ALIGNMENT = 4096


def write_file(
    path: Path,
    num_bytes: int,
    pieces: Iterable[Bytes | Iterator[Bytes]],
    mode: int = 0o600,
    last: Callable[[Sequence[str]], Bytes] | None = None,
) -> list[str]:
    """Create a file, and wait until it is on the disk.

    Args:
        num_bytes: of all pieces; reserved before any byte is written.
        pieces: the content, each in memory, or in parts that come one after the other.
        mode: of the file, less the umask.
        last: makes one more piece of the digests of these.

    Returns:
        The digest of each piece, the last one too.

    Raises:
        SaveError: the file exists, or the disk is full, read-only or fails. Nothing is left of the
            file.
    """
    try:
        with _created(path, num_bytes, mode) as file:
            past_the_cache(file, True)
            # Leaving the pool waits for its threads, also after an error: none writes to a
            # descriptor that is closed.
            with ThreadPoolExecutor(_BLOCKS - 1, thread_name_prefix="zrun-write") as pool:
                blocks = _Blocks(file, pool)
                digests = list(map(blocks.add, pieces))  # keeps no piece while the next is made
                if last is not None:
                    digests.append(blocks.add(last(digests)))
                written = blocks.finish()
                if written != num_bytes:
                    raise ValueError(f"{written} bytes in a file of {num_bytes}")
            os.fsync(file)
    except OSError as error:
        raise save_error(path, error, num_bytes) from error
    return digests


def save_error(path: Path, error: OSError, num_bytes: int | None = None) -> SaveError:
    """Return the error that tells a user why a file could not be written.

    Args:
        num_bytes: that the file needs, if that is known.
    """
    text = f"cannot save {path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        space = f"{free_space(path.parent)} free"
        if num_bytes is not None:
            space = f"{format_size(num_bytes)} needed, {space}"
        return SaveError(f"{text} ({space}); free some space, or keep fewer checkpoints")
    return SaveError(f"{text}; the checkpoint before it is kept")


@contextmanager
def _created(path: Path, num_bytes: int, mode: int) -> Iterator[int]:
    """Yield the descriptor of a new file with its space reserved; remove it if the block raises."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags, mode)
    try:
        try:
            reserve(file, num_bytes)
            yield file
        finally:
            os.close(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


class _Blocks:
    """Gathers pieces into blocks, which threads of `pool` write from the beginning of `file` on."""

    def __init__(self, file: int, pool: ThreadPoolExecutor) -> None:
        self._file = file
        self._pool = pool
        self._blocks = deque(
            np.frombuffer(mmap.mmap(-1, _BLOCK), dtype=np.uint8) for _ in range(_BLOCKS)
        )
        self._pending: deque[Future[None]] = deque()
        self._offset = 0  # of the block that is being filled
        self._filled = 0  # bytes in it

    def add(self, piece: Bytes | Iterator[Bytes]) -> str:
        """Take the bytes of `piece`; return their digest."""
        running = xxhash.xxh3_128()
        for part in [piece] if isinstance(piece, np.ndarray) else piece:
            self._take(part, running)
        return running.hexdigest()

    def _take(self, piece: Bytes, running: xxhash.xxh3_128) -> None:
        done = 0
        while done < len(piece):
            part = piece[done : done + min(_COPY, _BLOCK - self._filled)]
            running.update(part.data)
            np.copyto(self._blocks[0][self._filled : self._filled + len(part)], part)
            done += len(part)
            self._filled += len(part)
            if self._filled == _BLOCK:
                self._send(_BLOCK)

    def _send(self, num_bytes: int) -> None:
        block = self._blocks[0][:num_bytes].data
        self._pending.append(self._pool.submit(_write_block, self._file, block, self._offset))
        self._blocks.rotate(-1)
        self._offset += num_bytes
        self._filled -= num_bytes
        if len(self._pending) == _BLOCKS:
            self._pending.popleft().result()

    def finish(self) -> int:
        """Write what is left, and wait for all; return how many bytes there were."""
        left = self._blocks[0]
        begin = self._filled - self._filled % _ALIGNMENT  # of the part that fills no page
        self._send(begin)
        for write in self._pending:
            write.result()
        past_the_cache(self._file, False)  # less than a page cannot go past it
        write_all(self._file, left[begin : begin + self._filled].data, self._offset)
        return self._offset + self._filled


def _write_block(file: int, block: memoryview, offset: int) -> None:
    try:
        write_all(file, block, offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        past_the_cache(file, False)  # refused only now, or after a write that ended within a page
        write_all(file, block, offset)
