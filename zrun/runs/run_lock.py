"""The lock of a run directory: held by its launcher for as long as that lives, however it ends.

The file says who holds it, or held it last:

    {"host": "n1", "boot": "c935...", "pid": 4711, "started": 8123, "time": 1795.., "events": 0}

`boot` tells machines apart better than a host name, `started` one process from a later one with the same number.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from zrun.system.processes import Process

LOCK = ".lock"
_LONGEST = 4096  # bytes of the record
_TRIES, _PAUSE_S = 5, 0.01  # whoever only looks (`is_held`) has the lock for some microseconds


@dataclass(frozen=True)
class LockHolder:
    """A launcher.

    Attributes:
        boot: the kernel's name for this run of its machine; empty: not known.
        started: clock ticks from that boot to the start of the process; 0: not known.
        time: unix seconds at which it took the lock, by its own clock.
        events: bytes that `events.jsonl` had before it.
    """

    host: str
    pid: int
    boot: str = ""
    started: int = 0
    time: float = 0.0
    events: int = 0

    @classmethod
    def me(cls) -> Self:
        process = Process.find(os.getpid())
        started = process.started if process is not None else 0
        return cls(socket.gethostname(), os.getpid(), _boot(), started, time.time())

    @property
    def is_here(self) -> bool:
        """It is, or was, a process of this machine."""
        return self.boot == _boot() if self.boot else self.host in ("", socket.gethostname())

    @property
    def process(self) -> Process | None:
        """The living process; None if it ended, or belongs to another machine."""
        found = Process.find(self.pid) if self.is_here else None
        if found is None or self.started not in (0, found.started) or not found.alive():
            return None
        return found

    def __str__(self) -> str:
        return f"process {self.pid}" + ("" if self.is_here else f" on {self.host}")


class RunLock:
    """A lock that this process holds."""

    def __init__(self, folder: Path) -> None:
        """Take it.

        Raises:
            BlockingIOError: another process has it.
            OSError: the file cannot be made.
        """
        self.holder = LockHolder.me()
        self._file = os.open(
            folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            _take(self._file)
            self._write()
        except BaseException:
            os.close(self._file)
            raise

    def starts_at(self, num_bytes: int) -> None:
        """The record of events had so many bytes before this launcher's."""
        self.holder = replace(self.holder, events=num_bytes)
        self._write()

    def _write(self) -> None:
        record = json.dumps(asdict(self.holder)).encode()
        os.pwrite(self._file, record, 0)  # over the earlier one: a reader never finds nothing
        os.ftruncate(self._file, len(record))

    def close(self) -> None:
        os.close(self._file)


def _take(file: int) -> None:
    for attempt in range(_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt == _TRIES - 1:
                raise
            time.sleep(_PAUSE_S)


def last_holder(folder: Path) -> LockHolder | None:
    """Who holds the lock or held it last; None where no launcher ever was, or the file is damaged."""
    try:
        with (folder / LOCK).open("rb") as lock:
            record = json.loads(lock.read(_LONGEST))
        if isinstance(record, int):  # what earlier versions wrote: the number alone
            return LockHolder("", record)
        fields = {name: kind(record[name]) for name, kind in _FIELDS.items()}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return LockHolder(**fields)


_FIELDS = {"host": str, "pid": int, "boot": str, "started": int, "time": float, "events": int}


def is_held(folder: Path) -> bool:
    """Whether a launcher holds the run directory: its ranks may be saving."""
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no run directory of a launcher
        return False
    return False


@contextmanager
def ownerless(folder: Path) -> Iterator[bool]:
    """Whether no launcher holds the run directory; nobody can take it inside. To be left at once."""
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except OSError:
        is_free = False
    try:
        yield is_free
    finally:
        os.close(file)


def held_here() -> list[Path]:
    """The folders whose lock a process of this machine holds, wherever they are: those of this user's launchers."""
    folders: dict[Path, None] = {}
    for pid in _lockers():
        with suppress(OSError):  # it ended, or belongs to another user
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = Path(os.readlink(descriptor))
                    if target.name == LOCK and target.is_absolute():
                        folders[target.parent] = None
    return list(folders)


def _lockers() -> set[int]:
    """The processes that hold a lock by flock, as the kernel lists them."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return set()
    fields = [line.split() for line in lines if " FLOCK " in line and "->" not in line]
    return {
        int(each[4]) for each in fields if len(each) > 4 and each[4].isdigit() and each[4] != "0"
    }


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
