"""Reads every byte of a checkpoint and compares digests: in threads, or beside a training that goes on."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from zrun_core.checkpoint.block_writer import past_the_cache
from zrun_core.checkpoint.digest import digest_of_range, opened
from zrun_core.checkpoint.manifest import FileInfo, Fragment, Manifest
from zrun_core.errors import CheckpointError

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


def verify(folder: Path, manifest: Manifest, threads: int | None = None) -> list[str]:
    """What is wrong with the files of a step, read whole. Nothing: an empty list.

    Memory is constant: a block per thread. `threads` is the number of processors if not given, but at most 8.
    """
    local = threading.local()

    def look(info: FileInfo, piece: Fragment | None) -> str | None:
        buffer: memoryview | None = getattr(local, "buffer", None)
        if buffer is None:
            buffer = local.buffer = memoryview(bytearray(_BLOCK))
        offset, num_bytes = (
            (0, info.header_bytes) if piece is None else (piece.offset, piece.num_bytes)
        )
        expected, name = (
            (info.header_digest, "its header") if piece is None else (piece.digest, piece.key)
        )
        try:
            with opened(folder, info.name) as file:
                found = digest_of_range(file, folder / info.name, offset, num_bytes, buffer)
        except CheckpointError as error:
            return str(error)
        return (
            None
            if found == expected
            else f"{folder / info.name} is damaged: the digest of {name} does not fit"
        )

    problems: list[str] = []
    jobs: list[tuple[FileInfo, Fragment | None]] = []
    for info in manifest.files:
        try:
            check_size(folder, info)
            jobs += [
                (info, None),
                *((info, fragment) for fragment in manifest.fragments_of(info.name)),
            ]
        except CheckpointError as error:
            problems.append(str(error))
    with ThreadPoolExecutor(
        threads or min(8, os.cpu_count() or 1), thread_name_prefix="zrun-verify"
    ) as pool:
        problems += filter(None, pool.map(look, *zip(*jobs, strict=True))) if jobs else []
    return problems


def read_back(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the files of a step, as `verify`, but as the disk has them, and in one thread.

    Past the page cache that takes as long, and a fifth of the processor's time.
    """
    problems: list[str] = []
    block = memoryview(mmap.mmap(-1, _BLOCK))
    for info in manifest.files:
        pieces = manifest.fragments_of(info.name)
        extents = [(0, info.header_bytes), *((piece.offset, piece.num_bytes) for piece in pieces)]
        expected = [
            ("its header", info.header_digest),
            *((piece.key, piece.digest) for piece in pieces),
        ]
        try:
            check_size(folder, info)
            with opened(folder, info.name) as file:
                digests = _digests(file, folder / info.name, extents, block)
                problems += [
                    f"{folder / info.name} is damaged: the digest of {key} does not fit"
                    for (key, right), found in zip(expected, digests, strict=True)
                    if found != right
                ]
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _digests(
    file: int, name: Path, extents: Sequence[tuple[int, int]], block: memoryview
) -> Iterator[str]:
    """The digests of ranges of a file, each its first byte and how many, in the order of the file.

    Raises:
        CheckpointError: the file ends before, or the disk fails. `name` is for the message.
    """
    past_the_cache(file, True)
    start = filled = 0  # what of the file is in the block
    for offset, num_bytes in extents:
        running, at, stop = xxhash.xxh3_128(), offset, offset + num_bytes
        while at < stop:
            if not start <= at < start + filled:
                start = at - at % _ALIGNMENT
                filled = _read_block(file, name, start, block)
                if at >= start + filled:
                    raise CheckpointError(f"{name} ends at byte {start + filled}")
            piece = block[at - start : min(filled, stop - start)]
            running.update(piece)
            at += len(piece)
        yield running.hexdigest()


def _read_block(file: int, name: Path, offset: int, block: memoryview) -> int:
    """Read what there is from `offset` on, as much as fits; returns how many bytes."""
    try:
        try:
            return os.preadv(file, [block], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            past_the_cache(file, False)  # this file system says only now that it cannot
            return os.preadv(file, [block], offset)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read at byte {offset}: {error.strerror}") from None
