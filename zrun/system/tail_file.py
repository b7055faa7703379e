"""A file that another process writes, as it grows. A restart may put another in its place."""

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
_TAIL_BYTES = 1 << 20  # a progress bar that was drawn for minutes is one line of them
_CUT = b" ... (line cut here)"


class FileTail:
    """What is added to the file at `path` from `offset` on; it need not exist yet."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self._offset = path, offset
        self._inode: int | None = None
        self._rest = b""  # the beginning of a line

    @classmethod
    def from_now_on(cls, path: Path) -> FileTail:
        """What is added to a file later; all of the one that takes its place."""
        growing = cls(path)
        with suppress(FileNotFoundError):
            found = path.stat()
            growing._offset, growing._inode = found.st_size, found.st_ino
        return growing

    def read(self) -> bytes:
        """What is new."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if self._inode not in (None, inode):
                    self._offset, self._rest = 0, b""
                self._inode = inode
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:  # moved away, with the attempt
            return b""
        self._offset += len(data)
        return data

    def lines(self) -> list[bytes]:
        """The lines that are new, without their ends."""
        data = self.read()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


class LineSplitter:
    """Cuts a stream into lines: a long one keeps its beginning, an overwritten one its last state."""

    def __init__(self) -> None:
        self._line = b""
        self._is_cut = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        *complete, rest = data.split(b"\n")
        for end in complete:
            self._add(end)
            yield self.rest()
        self._add(rest)

    @property
    def pending(self) -> bytes:
        """What has come of the current line, which goes on."""
        return self._line

    def rest(self) -> bytes:
        """What has come of the current line, which ends with this."""
        line = self._line + (_CUT if self._is_cut else b"")
        self._line, self._is_cut = b"", False
        return line

    def _add(self, data: bytes) -> None:
        if b"\r" in data.rstrip(
            b"\r"
        ):  # a progress bar overwrites its line: what came before is gone
            self._line, self._is_cut = b"", False
            data = data.rstrip(b"\r").rpartition(b"\r")[2]
        self._line += data[: _LONGEST + 1 - len(self._line)]
        if len(self._line) > _LONGEST:
            self._line, self._is_cut = self._line[:_LONGEST], True


def as_text(line: bytes) -> str:
    """Return a line as text that does a terminal no harm, in its last state where it was overwritten."""
    last = line.decode(errors="backslashreplace").rstrip("\r").rpartition("\r")[2]
    return printable(last).replace("\n", "^J")


def last_lines(log: Path, count: int = KEPT_LINES) -> list[str]:
    """Return the end of a file as a terminal would have left it; nothing where there is none."""
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
