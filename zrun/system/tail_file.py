"""Files that another process writes: what is new in them, and their last lines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from zrun_core.spine.printable import printable
from zrun_core.spine.tracebacks import FATAL

KEPT_LINES = 50  # of a log, in a report
_LONGEST = 1 << 14  # bytes of a line that are shown
_CRASH_LINES = 300
_BLOCK_BYTES = 1 << 18  # that are read at a time
_TAIL_BYTES = 1 << 20  # a progress bar that was drawn for minutes is one line of them
_CUT = b" ... (line cut here)"


class FileTail:
    """The end of a file, read as it grows. A restart may put another file in its place."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        """Read the file at `path`, which need not exist yet, from `offset` on."""
        self._path = path
        self._offset = offset
        self._inode: int | None = None
        self._rest = b""  # the beginning of a line

    @classmethod
    def from_now_on(cls, path: Path) -> FileTail:
        """Read what is added to a file later; all of a file that takes its place."""
        tail = cls(path)
        with suppress(FileNotFoundError):
            found = path.stat()
            tail._offset = found.st_size
            tail._inode = found.st_ino
        return tail

    def read(self) -> bytes:
        """Return what is new."""
        return b"".join(self._blocks())

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that are new, without their ends. A block of the file is held at a time.

        Who stops before the last line may miss what is in the same block.
        """
        for block in self._blocks():
            *lines, self._rest = (self._rest + block).split(b"\n")
            yield from lines

    def _blocks(self) -> Iterator[bytes]:
        """Yield what is in the file by now and was not read before."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:  # moved away, with the attempt
            return
        with file:
            found = os.fstat(file.fileno())
            if self._inode not in (None, found.st_ino):
                self._offset = 0
                self._rest = b""
            self._inode = found.st_ino
            file.seek(self._offset)
            while self._offset < found.st_size:
                block = file.read(min(_BLOCK_BYTES, found.st_size - self._offset))
                if not block:
                    return
                self._offset += len(block)
                yield block


class LineSplitter:
    """Splits a stream into lines.

    Of a long line the beginning stays, of one that was overwritten the last state.
    """

    def __init__(self) -> None:
        self._line = b""
        self._is_cut = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take in `data`; yield the lines that it completes."""
        *complete, rest = data.split(b"\n")
        for end in complete:
            self._add(end)
            yield self.rest()
        self._add(rest)

    @property
    def pending(self) -> bytes:
        """Return what has come of the current line, which goes on."""
        return self._line

    def rest(self) -> bytes:
        """Return what has come of the current line, and begin another."""
        line = self._line
        if self._is_cut:
            line += _CUT
        self._clear()
        return line

    def _clear(self) -> None:
        self._line = b""
        self._is_cut = False

    def _add(self, data: bytes) -> None:
        visible = data.rstrip(b"\r")
        if b"\r" in visible:  # a progress bar overwrites its line: the last state stays
            self._clear()
            data = visible.rpartition(b"\r")[2]
        self._line += data[: _LONGEST + 1 - len(self._line)]
        if len(self._line) > _LONGEST:
            self._line = self._line[:_LONGEST]
            self._is_cut = True


def as_text(line: bytes) -> str:
    """Return a line as text that does a terminal no harm; if overwritten, its last state."""
    last = line.decode(errors="backslashreplace").rstrip("\r").rpartition("\r")[2]
    return printable(last).replace("\n", "^J")


def end_of_text(path: Path, num_bytes: int) -> str:
    """Return the end of a file as it is, at most so much; nothing if it does not exist."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read(num_bytes).decode(errors="replace")
    except OSError:
        return ""


def last_lines(log: Path, count: int = KEPT_LINES) -> list[str]:
    """Return the last lines of a log as a terminal would have left them, for a report.

    Args:
        log: there are no lines if it does not exist.
        count: number of lines; more if they are what `faulthandler` wrote of a crash.
    """
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = [as_text(line) for line in file.read().removesuffix(b"\n").split(b"\n")]
    except OSError:
        return []
    if lines == [""]:
        return []
    crashes = [number for number, line in enumerate(lines) if line.startswith(FATAL)]
    if crashes:
        count = min(max(count, len(lines) - crashes[-1]), _CRASH_LINES)
    return lines[-count:]
