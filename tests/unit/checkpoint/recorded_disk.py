"""Records what a piece of code does to files, and says what a power loss after any of these
operations may leave.

The model is POSIX's: what was written counts after an fsync of the file, and what was named,
renamed or removed after an fsync of the directory. Until then, each of it may be on the disk or
not.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

Operation = tuple[str, tuple[Any, ...]]


class _Recorder:
    """Stands in for functions of `os`, which it calls and notes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[Operation] = []
        self._paths: dict[int, Path] = {}
        self._lock = threading.Lock()
        self._os = {name: getattr(os, name) for name in self.names}
        self._rmtree = shutil.rmtree

    names = ("open", "close", "pwrite", "posix_fallocate", "fsync", "rename", "replace", "mkdir")

    def note(self, name: str, *arguments: Any) -> None:
        with self._lock:
            self.log.append((name, arguments))

    def open(self, path: Any, flags: int, *rest: Any, **options: Any) -> int:
        file: int = self._os["open"](path, flags, *rest, **options)
        if isinstance(path, str | Path) and Path(path).is_relative_to(self.root):
            self._paths[file] = Path(path)
            if flags & os.O_CREAT:
                self.note("create", Path(path))
        return file

    def close(self, file: int) -> None:
        self._paths.pop(file, None)
        self._os["close"](file)

    def pwrite(self, file: int, data: Any, offset: int) -> int:
        content = bytes(data)
        count: int = self._os["pwrite"](file, data, offset)
        self.note("write", self._paths[file], offset, content[:count])
        return count

    def posix_fallocate(self, file: int, offset: int, count: int) -> None:
        self._os["posix_fallocate"](file, offset, count)
        self.note("write", self._paths[file], offset, bytes(count))

    def fsync(self, file: int) -> None:
        self._os["fsync"](file)
        if file in self._paths:  # not above the root
            self.note("sync", self._paths[file])

    def rename(self, source: Any, target: Any) -> None:
        self._os["rename"](source, target)
        self.note("rename", Path(source), Path(target))

    def replace(self, source: Any, target: Any) -> None:
        self._os["replace"](source, target)
        self.note("rename", Path(source), Path(target))

    def mkdir(self, path: Any, *rest: Any, **options: Any) -> None:
        self._os["mkdir"](path, *rest, **options)
        self.note("mkdir", Path(path))

    def rmtree(self, path: Any, *rest: Any, **options: Any) -> None:
        self._rmtree(path, *rest, **options)
        self.note("rmtree", Path(path))


@contextmanager
def recording(root: Path) -> Iterator[list[Operation]]:
    """What is done to files below `root`, in order."""
    recorder = _Recorder(root)
    with pytest.MonkeyPatch.context() as patch:
        for name in recorder.names:
            patch.setattr(os, name, getattr(recorder, name))
        patch.setattr(shutil, "rmtree", recorder.rmtree)
        yield recorder.log


@dataclass
class _File:
    written: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass
class _Folder:
    entries: dict[str, _File | _Folder] = field(default_factory=dict)  # as the processes see it
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[dict[str, _File | _Folder | None]] = field(
        default_factory=list
    )  # changes, None: removed

    def change(self, **entries: _File | _Folder | None) -> None:
        self.pending.append(entries)
        _apply(self.entries, entries)


def _apply(entries: dict[str, _File | _Folder], change: dict[str, _File | _Folder | None]) -> None:
    for name, item in change.items():
        if item is None:
            entries.pop(name, None)
        else:
            entries[name] = item


class Disk:
    """What the operations so far have made of a disk that was empty."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._top = _Folder()

    def _find(self, path: Path) -> Any:
        item: Any = self._top
        for name in path.relative_to(self._root).parts:
            item = item.entries[name]
        return item

    def do(self, operation: Operation) -> None:
        name, (path, *rest) = operation
        if name == "mkdir":
            self._find(path.parent).change(**{path.name: _Folder()})
        elif name == "create":
            self._find(path.parent).change(**{path.name: _File()})
        elif name == "rmtree":
            self._find(path.parent).change(**{path.name: None})
        elif name == "rename":
            moved = self._find(path)
            self._find(path.parent).change(**{path.name: None, rest[0].name: moved})
        elif name == "write":
            offset, content = rest
            file = self._find(path)
            file.written.extend(bytes(max(0, offset + len(content) - len(file.written))))
            file.written[offset : offset + len(content)] = content
        else:
            item = self._find(path)
            if isinstance(item, _File):
                item.durable = bytes(item.written)
            else:
                item.durable, item.pending = dict(item.entries), []

    def power_loss(self, target: Path, mode: str, chance: random.Random) -> None:
        """Write to `target` what may be left.

        Of what was not synced, "nothing", "names" only, "all", or "some".
        """
        self._leave(self._top, target, mode, chance)

    def _leave(self, folder: _Folder, target: Path, mode: str, chance: random.Random) -> None:
        target.mkdir()
        entries = dict(folder.durable)
        count = {"nothing": 0, "some": chance.randint(0, len(folder.pending))}.get(
            mode, len(folder.pending)
        )
        for change in folder.pending[:count]:
            _apply(entries, change)
        for name, item in entries.items():
            if isinstance(item, _Folder):
                self._leave(item, target / name, mode, chance)
            elif mode == "all" or (mode == "some" and chance.random() < 0.5):
                (target / name).write_bytes(item.written)
            else:
                (target / name).write_bytes(item.durable)
