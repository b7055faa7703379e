"""Processes of this host, told apart from later ones with the same number, and ended by session.

A worker leads a session of its own, so that the loader processes and shells it starts end with it. Nothing is ever
looked up by name.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_shown: list[mmap.mmap] = []  # where the kernel reads the command line of this process


@dataclass(frozen=True)
class Process:
    """A process that existed: its number, and when it started in clock ticks since boot."""

    pid: int
    started: int

    @classmethod
    def find(cls, pid: int) -> Process | None:
        """The process that has this number now."""
        stat = _stat(pid)
        return cls(pid, int(stat[19])) if stat else None

    def alive(self) -> bool:
        """It still runs: not ended, not a zombie, and its number was not given to another.

        Its first thread may be a zombie while others still end: until they have, its children are
        its own, and nobody has adopted them.
        """
        stat = self._now()
        return stat is not None and (stat[0] not in "ZX" or int(stat[17]) > 1)

    def catches(self, number: int) -> bool:
        """Whether it has a handler for this signal; else it would end of it, or not hear of it."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(errors="replace")
        except OSError:
            return False
        mask = next(
            (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0"
        )
        return self.alive() and bool(int(mask, 16) >> (number - 1) & 1)

    @property
    def state(self) -> str | None:
        """The kernel's letter for what it does (R, S, D, T, Z, ...); None once it is gone."""
        stat = self._now()
        return stat[0] if stat is not None else None

    def _now(self) -> list[str] | None:
        """What `_stat` says of it; None once it is gone."""
        stat = _stat(self.pid)
        return stat if stat is not None and int(stat[19]) == self.started else None


def session_of(leader: Process) -> list[Process]:
    """The living processes of the session that `leader` started, itself included.

    The kernel keeps a number taken while a session bears it, so a process with the leader's number and another start
    time means that the whole session is gone and these are strangers.
    """
    now = Process.find(leader.pid)
    if now is not None and now != leader:
        return []
    return [
        process
        for process in _all()
        if (stat := _stat(process.pid)) and int(stat[3]) == leader.pid and process.alive()
    ]


def children_of(pid: int) -> list[Process]:
    """The living direct children of `pid`."""
    return [
        process
        for process in _all()
        if (stat := _stat(process.pid)) and int(stat[1]) == pid and process.alive()
    ]


def send(processes: list[Process], number: int) -> None:
    """Send one signal to each, through a descriptor that cannot come to mean another process."""
    for process in processes:
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:
            continue
        try:
            if process.alive():
                signal.pidfd_send_signal(descriptor, number)
        except OSError:
            pass  # it ended in between
        finally:
            os.close(descriptor)


def wait_gone(processes: list[Process], patience_s: float) -> list[Process]:
    """Those that still live after `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while (
        left := [process for process in processes if process.alive()]
    ) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def allow_files() -> None:
    """Let this process open as many files as it may."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most) if limit < most else (limit, most))


def end_children(patience_s: float) -> None:
    """Kill the children of this process, and theirs, which become children of whoever adopts orphans."""
    while children := children_of(os.getpid()):
        send(children, signal.SIGKILL)
        if wait_gone(children, patience_s):
            break  # in the kernel's hands


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none can escape."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: signal.Signals) -> None:
    """Be sent `number` when the parent's thread that started this process ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def show(args: list[str]) -> None:
    """Have `ps` show `args` for this process, and /proc/<pid>/environ its environment: a fork shows its parent's.

    A kernel without CONFIG_CHECKPOINT_RESTORE goes on to show those.
    """
    line = b"".join(os.fsencode(each) + b"\0" for each in args)
    environ = b"".join(name + b"=" + value + b"\0" for name, value in os.environb.items())
    memory = mmap.mmap(-1, len(line) + len(environ), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(line + environ)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    stat = [
        "",
        "",
        "",
        *Path("/proc/self/stat").read_text().rpartition(")")[2].split(),
    ]  # counted as in proc(5)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    layout = _MemoryMap(  # as it is, but for the last four
        *(int(stat[number]) for number in (26, 27, 45, 46, 47)),
        libc.sbrk(0),
        int(stat[28]),
        start,
        start + len(line),
        start + len(line),
        start + len(line) + len(environ),
        None,
        0,
        -1,
    )
    if (
        libc.prctl(
            _PR_SET_MM,
            _PR_SET_MM_MAP,
            ctypes.byref(layout),
            ctypes.c_ulong(ctypes.sizeof(layout)),
            0,
        )
        == 0
    ):
        _shown.append(memory)


class _MemoryMap(ctypes.Structure):
    """The kernel's `prctl_mm_map`, see prctl(2)."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")
        ),
        *(
            (name, ctypes.c_uint64)
            for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end")
        ),
        ("auxv", ctypes.c_void_p),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_int32),
    )


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _all() -> list[Process]:
    found = (
        Process.find(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()
    )
    return [process for process in found if process is not None]


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third on: 0 state, 1 parent, 2 group, 3 session, 17 threads,
    19 start time."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return text.rpartition(")")[2].split()  # the second field is a name that may hold anything
