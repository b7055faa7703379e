"""Reads every byte of a checkpoint and compares digests, in threads."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zrun_core.checkpoint.digest import digest_of_range, opened
from zrun_core.checkpoint.manifest import FileInfo, Fragment, Manifest
from zrun_core.errors import CheckpointError

_BLOCK = 4 * 2**20


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
        offset, num_bytes = (0, info.header_bytes) if piece is None else (piece.offset, piece.num_bytes)
        expected, name = (info.header_digest, "its header") if piece is None else (piece.digest, piece.key)
        try:
            with opened(folder, info.name) as file:
                found = digest_of_range(file, folder / info.name, offset, num_bytes, buffer)
        except CheckpointError as error:
            return str(error)
        return None if found == expected else f"{folder / info.name} is damaged: the digest of {name} does not fit"

    problems: list[str] = []
    jobs: list[tuple[FileInfo, Fragment | None]] = []
    for info in manifest.files:
        try:
            check_size(folder, info)
            jobs += [(info, None), *((info, fragment) for fragment in manifest.of_file(info.name))]
        except CheckpointError as error:
            problems.append(str(error))
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1), thread_name_prefix="zrun-verify") as pool:
        problems += filter(None, pool.map(look, *zip(*jobs, strict=True))) if jobs else []
    return problems
