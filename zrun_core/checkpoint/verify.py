"""Comparing every byte of a checkpoint with its digests: in threads, or beside a training."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

from zrun_core.checkpoint.digest import digest_of_range, opened
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.manifest_parts import FileInfo
from zrun_core.checkpoint.step_index import StepIndex, open_index
from zrun_core.errors import CheckpointError
from zrun_core.spine.direct_io import past_the_cache

_BLOCK = 4 * 2**20
_ALIGNMENT = 4096


def check_size(folder: Path, info: FileInfo) -> None:
    """Compare the size of a file with the manifest.

    Raises:
        CheckpointError: the file is missing, not a regular file, or of another size.
    """
    try:
        with opened(folder, info.name) as file:
            num_bytes = os.fstat(file).st_size
    except OSError as error:
        raise CheckpointError(f"{folder / info.name} cannot be read: {error.strerror}") from None
    if num_bytes != info.num_bytes:
        raise CheckpointError(f"{folder / info.name} has {num_bytes} bytes, not {info.num_bytes}")


class _FileRange(NamedTuple):
    """A part of a file that has a digest: its header, a fragment, or its record."""

    file: str
    name: str
    offset: int
    num_bytes: int
    digest: str


def _ranges(info: FileInfo, index: StepIndex) -> list[_FileRange]:
    """Return the parts of a file, in its order.

    Raises:
        CheckpointError: its record is damaged.
    """
    content = index.content(info.name)
    found = [_FileRange(info.name, "its header", 0, info.header_bytes, content.header_digest)]
    found += [
        _FileRange(info.name, each.key, each.offset, each.num_bytes, each.digest)
        for each in content.fragments
    ]
    if info.record_bytes:
        offset = info.num_bytes - info.record_bytes
        found.append(_FileRange(info.name, "its record", offset, info.record_bytes, info.digest))
    return found


def _damage(folder: Path, part: _FileRange) -> str:
    return f"{folder / part.file} is damaged: the checksum of {part.name} is wrong"


def verify(folder: Path, manifest: Manifest, threads: int | None = None) -> list[str]:
    """Read the files of a step and return what is wrong with them.

    Memory is constant: a block per thread, and the fragments of a file.

    Args:
        threads: that read; None: one for each processor, but at most 8.

    Returns:
        The problems; none: every byte is as saved.
    """
    local = threading.local()

    def look(part: _FileRange) -> str | None:
        buffer: memoryview | None = getattr(local, "buffer", None)
        if buffer is None:
            buffer = local.buffer = memoryview(bytearray(_BLOCK))
        path = folder / part.file
        try:
            with opened(folder, part.file) as file:
                found = digest_of_range(file, path, part.offset, part.num_bytes, buffer)
        except CheckpointError as error:
            return str(error)
        return None if found == part.digest else _damage(folder, part)

    index = open_index(folder, manifest)
    problems: list[str] = []
    threads = threads or min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="zrun-verify") as pool:
        for info in manifest.files:
            try:
                check_size(folder, info)
                parts = _ranges(info, index)
            except CheckpointError as error:
                problems.append(str(error))
            else:
                problems += filter(None, pool.map(look, parts))
    return problems


def read_back(folder: Path, manifest: Manifest) -> list[str]:
    """Return what is wrong with the files of a step, as `verify`, but as the disk has them.

    One thread reads past the page cache: that takes as long, and a fifth of the processor's time.
    """
    index = open_index(folder, manifest)
    problems: list[str] = []
    block = memoryview(mmap.mmap(-1, _BLOCK))
    for info in manifest.files:
        try:
            check_size(folder, info)
            parts = _ranges(info, index)
            with opened(folder, info.name) as file:
                digests = _digests(file, folder / info.name, parts, block)
                for part, found in zip(parts, digests, strict=True):
                    if found != part.digest:
                        problems.append(_damage(folder, part))
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _digests(
    file: int, path: Path, parts: Sequence[_FileRange], block: memoryview
) -> Iterator[str]:
    """Yield the digests of parts of a file, in the order of the file.

    The parts come one after the other in the file; `block`, memory to read to, is aligned to a
    page.

    Raises:
        CheckpointError: the file ends before, or the disk fails.
    """
    past_the_cache(file, True)
    start = filled = 0  # the range of the file that is in the block
    for part in parts:
        running = xxhash.xxh3_128()
        at = part.offset
        stop = part.offset + part.num_bytes
        while at < stop:
            if not start <= at < start + filled:
                start = at - at % _ALIGNMENT
                filled = _read_block(file, path, start, block)
                if at >= start + filled:
                    raise CheckpointError(f"{path} ends at byte {start + filled}")
            piece = block[at - start : min(filled, stop - start)]
            running.update(piece)
            at += len(piece)
        yield running.hexdigest()


def _read_block(file: int, path: Path, offset: int, block: memoryview) -> int:
    """Read from `offset` on, as much as fits; return how many bytes."""
    try:
        try:
            return os.preadv(file, [block], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            past_the_cache(file, False)  # this file system says only now that it cannot
            return os.preadv(file, [block], offset)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read at byte {offset}: {error.strerror}") from None
