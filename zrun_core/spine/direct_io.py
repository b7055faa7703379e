"""Files that pass the page cache: their space taken at once, whole pages to and from memory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from zrun_core.sizes import format_size

_MOUNTS = Path("/proc/self/mountinfo")
_PAGE_BYTES = 4096  # on whose borders direct reads and writes begin and end
# Of a file system or kernel that has no files without a name.
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


def open_nameless(folder: Path) -> int:
    """Return the descriptor of a new file without a name.

    It is gone with the last process that has it open, however that ends.

    Raises:
        OSError: there is no such folder, or no file can be made in it.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS or not folder.is_dir():
            raise
    path = folder / f".zrun-{secrets.token_hex(8)}"
    file = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.unlink(path)
    except BaseException:
        os.close(file)
        raise
    return file


def reserve(file: int, num_bytes: int, start: int = 0) -> None:
    """Take the space of a file, so that a full disk shows before any byte is written.

    Args:
        file: descriptor.
        start: where the file ends so far.

    Raises:
        OSError: there is not enough of it. Then none is taken.
    """
    if num_bytes == 0:
        return
    try:
        os.posix_fallocate(file, start, num_bytes)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # this file system cannot
            return
        os.ftruncate(file, start)
        raise


def past_the_cache(file: int, wanted: bool) -> None:
    """Switch direct reads and writes on or off, where the file system has them.

    They are twice as fast as through the page cache, which stays for what is read again.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT
    if wanted:
        flags |= os.O_DIRECT
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
    except OSError as error:
        if error.errno != errno.EINVAL:  # this file system has no such thing
            raise


def goes_past_the_cache(file: int) -> bool:
    """Switch direct reads and writes on if they work; return whether they do.

    Some file systems refuse them only when they are used, so a page of zeros is written to the
    beginning, and read.
    """
    past_the_cache(file, True)
    if not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
        return False
    with mmap.mmap(-1, _PAGE_BYTES) as page, memoryview(page) as memory:
        try:
            write_pages(file, memory, 0)
            read_pages(file, memory, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            past_the_cache(file, False)
            return False
    return True


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


def write_pages(file: int, memory: memoryview, offset: int) -> None:
    """Write whole pages of memory to a page of the file, however many calls that takes.

    Raises:
        OSError: the disk is full, or fails.
    """
    _move_pages(os.pwritev, file, memory, offset, "the disk takes no more bytes")


def read_pages(file: int, memory: memoryview, offset: int) -> None:
    """Fill whole pages of memory from a page of the file, however many calls that takes.

    Raises:
        OSError: the file ends before, or the disk fails.
    """
    _move_pages(os.preadv, file, memory, offset, "the file ends too soon")


def _move_pages(
    call: Callable[[int, list[memoryview], int], int],
    file: int,
    memory: memoryview,
    offset: int,
    nothing_moved: str,
) -> None:
    done = 0
    while done < len(memory):
        count = call(file, [memory[done:]], offset + done)
        # The next call begins on the border of a page too, as direct ones have to.
        count -= count % _PAGE_BYTES
        if count == 0:
            raise OSError(errno.EIO, nothing_moved)
        done += count


def free_space(folder: Path) -> str:
    """Return how much a disk has left for this user, in words."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return "unknown"
    return format_size(status.f_bavail * status.f_frsize)


def file_system(folder: Path) -> str:
    """Return the type of the file system that a folder lies on, as in /proc/mounts; "" unknown."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        real = folder.resolve(strict=True)
    except OSError:
        return ""
    found = ""
    longest = -1
    for line in lines:
        before, _, after = line.partition(" - ")
        mounted_at = Path(_unescaped(before.split(" ")[4]))
        length = len(mounted_at.parts)
        # Of two on one folder the later one is seen.
        if length >= longest and real.is_relative_to(mounted_at):
            found = after.split(" ")[0]
            longest = length
    return found


def _unescaped(path: str) -> str:
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(escape, character)
    return path
