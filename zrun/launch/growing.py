"""A file that another process writes, as it grows. A restart may put another in its place."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class Growing:
    """What is added to the file at `path` from `offset` on; it need not exist yet."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self._offset = path, offset
        self._inode: int | None = None
        self._rest = b""  # the beginning of a line

    @classmethod
    def from_now_on(cls, path: Path) -> Growing:
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
