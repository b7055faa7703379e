"""Tokenised files as one memory-mapped file, made once, by the first rank of a machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zrun_core.data.tokenizer import Tokenizer
from zrun_core.errors import JobError
from zrun_core.spine.folders import make_private


@dataclass(frozen=True)
class PackedTokens:
    """Tokens on disk, opened anew in every process that the object is sent to."""

    path: Path
    dtype: str

    def open(self) -> NDArray[np.integer]:
        """Return the tokens, [tokens], mapped from the file."""
        if self.path.stat().st_size == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=self.dtype)
        return np.memmap(self.path, dtype=self.dtype, mode="r")


def pack(
    files: Sequence[Path], tokenizer: Tokenizer, limit_bytes: int | None, cache_dir: str | None
) -> PackedTokens:
    """Return the tokens of files, one after the other, from the cache if they are there.

    Other ranks of the machine wait while one writes the cache.

    Args:
        files: in their order.
        limit_bytes: of text; None: all of it.
        cache_dir: folder for the tokens; None: the user's cache folder.

    Raises:
        JobError: a file cannot be read, or there is no folder to write to.
    """
    folder = _cache_folder(cache_dir)
    dtype = _smallest_dtype(tokenizer.vocab_size)
    packed = PackedTokens(folder / f"{_identity(files, tokenizer, limit_bytes)}.{dtype}", dtype)
    if packed.path.exists():
        return packed
    with _locked(packed.path.with_suffix(".lock")):
        if not packed.path.exists():
            _write(packed, files, tokenizer, limit_bytes)
    return packed


def _write(
    packed: PackedTokens, files: Sequence[Path], tokenizer: Tokenizer, limit_bytes: int | None
) -> None:
    # Complete or not there: a name of its own until every byte is on disk, then renamed.
    with tempfile.NamedTemporaryFile(
        dir=packed.path.parent, prefix=f"{packed.path.stem}.", delete=False
    ) as out:
        try:
            left = limit_bytes
            for file in files:
                if left == 0:
                    break
                text = _read(file)[:left]
                if left is not None:
                    left -= len(text)
                out.write(tokenizer.encode(text).astype(packed.dtype, copy=False).data)
            out.flush()
            os.fsync(out.fileno())
            os.replace(out.name, packed.path)
        except BaseException:
            os.unlink(out.name)
            raise


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise JobError(f"data: cannot read {file}: {error.strerror}") from None


def _identity(files: Sequence[Path], tokenizer: Tokenizer, limit_bytes: int | None) -> str:
    """Return the name of the cache file.

    A file is identified by its path, size and times; the change time cannot be set back by hand.
    """
    digest = hashlib.sha256(f"{tokenizer.identity} {limit_bytes}\n".encode())
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise JobError(f"data: cannot read {file}: {error.strerror}") from None
        digest.update(
            f"{file} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n".encode()
        )
    return digest.hexdigest()[:32]


def _smallest_dtype(vocab_size: int) -> str:
    if vocab_size <= 2**8:
        return "uint8"
    if vocab_size <= 2**16:
        return "uint16"
    return "uint32"


def _cache_folder(asked: str | None) -> Path:
    """Return `asked`, else the user's cache folder, else the user's own temporary folder."""
    if asked is not None:
        folder = Path(asked).expanduser()
        if not _is_usable(folder):
            raise JobError(f"cache_dir: cannot write to {folder}: name another folder")
        return folder
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zrun"
    temporary = Path(tempfile.gettempdir()) / f"zrun-{os.getuid()}"
    if _is_usable(home):
        return home
    # Anybody can make a folder of this name: what lies in it counts only if it is ours.
    if _is_usable(temporary) and temporary.stat().st_uid == os.getuid():
        return temporary
    raise JobError(f"cache_dir: cannot write to {home} nor to {temporary}: name a folder")


def _is_usable(folder: Path) -> bool:
    """Return whether the folder can be written; it is made if need be."""
    try:
        make_private(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; it stays, or two processes could hold one lock each."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
