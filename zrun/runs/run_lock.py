"""The lock of a run directory: held by its launcher for the life of that process.

The file names its holder, or the last one:

    {"host": "n1", "boot": "c935...", "pid": 4711, "started": 8123, "time": 1795.., "events": 0}

`boot` tells machines apart better than a host name does, and `started` tells a process from a later
one with the same number.
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
_NUM_TRIES = 5  # a process that only looks (`is_held`) has the lock for some microseconds
_PAUSE_S = 0.01


@dataclass(frozen=True)
class LockHolder:
    """A launcher that holds or held a lock.

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
        """Return whether it is, or was, a process of this machine."""
        if self.boot:
            return self.boot == _boot()
        return self.host in ("", socket.gethostname())

    @property
    def process(self) -> Process | None:
        """Return the living process; None if it ended, or belongs to another machine."""
        if not self.is_here:
            return None
        found = Process.find(self.pid)
        if found is None or not found.alive():
            return None
        is_another = self.started not in (0, found.started)
        return None if is_another else found

    def __str__(self) -> str:
        if self.is_here:
            return f"process {self.pid}"
        return f"process {self.pid} on {self.host}"


class RunLock:
    """A lock that this process holds."""

    def __init__(self, folder: Path) -> None:
        """Take the lock of a run directory.

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
        """Record how many bytes of events there were before this launcher's."""
        self.holder = replace(self.holder, events=num_bytes)
        self._write()

    def _write(self) -> None:
        record = json.dumps(asdict(self.holder)).encode()
        os.pwrite(self._file, record, 0)  # over the earlier one: a reader never finds nothing
        os.ftruncate(self._file, len(record))

    def close(self) -> None:
        os.close(self._file)


def _take(file: int) -> None:
    for attempt in range(_NUM_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt == _NUM_TRIES - 1:
                raise
            time.sleep(_PAUSE_S)


def last_holder(folder: Path) -> LockHolder | None:
    """Return the launcher that holds the lock or held it last.

    None: there never was one, or the file is damaged.
    """
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
    """Return whether a launcher holds the run directory: its ranks may be saving."""
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
    """Yield whether no launcher holds the run directory; none can take it inside.

    To be left at once: a launcher that starts waits some milliseconds only.
    """
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
    """Return the run directories of this user's launchers on this machine, wherever they are."""
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
    """Return the processes that hold a lock by flock, as the kernel lists them."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return set()
    pids: set[int] = set()
    for line in lines:
        fields = line.split()
        is_waiting = "->" in fields
        if is_waiting or "FLOCK" not in fields or len(fields) < 5:
            continue
        if fields[4].isdigit() and fields[4] != "0":  # 0: of another pid namespace
            pids.add(int(fields[4]))
    return pids


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
