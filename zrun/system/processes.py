"""Processes of this host, told apart from later ones with the same number, and ended by session.

A worker leads a session of its own, so that the loader processes and shells that it starts end with
it. No process is looked up by name.
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
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_PARENT = 1  # fields of `_stat`
_SESSION = 3
_shown: list[mmap.mmap] = []  # where the kernel reads the command line of this process


@dataclass(frozen=True)
class Process:
    """A process that exists or existed.

    Attributes:
        started: clock ticks from boot to its start.
    """

    pid: int
    started: int

    @classmethod
    def find(cls, pid: int) -> Process | None:
        """Return the process that has this number now; None: there is none."""
        stat = _stat(pid)
        return cls(pid, int(stat[19])) if stat else None

    def alive(self) -> bool:
        """Return whether it still runs: not ended, not a zombie, its number not given to another.

        Its first thread may be a zombie while others still end: until they have, its children are
        its own, and have not been adopted.
        """
        stat = self._now()
        if stat is None:
            return False
        is_zombie = stat[0] in "ZX"
        num_threads = int(stat[17])
        return not is_zombie or num_threads > 1

    def catches(self, number: int) -> bool:
        """Return whether it handles this signal; else the signal ends it, or is ignored."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(errors="replace")
        except OSError:
            return False
        caught = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        mask = int(next(caught, "0"), 16)
        return self.alive() and bool(mask >> (number - 1) & 1)

    @property
    def state(self) -> str | None:
        """Return the kernel's letter for its state (R, S, D, T, Z, ...); None once it has ended."""
        stat = self._now()
        return stat[0] if stat is not None else None

    def _now(self) -> list[str] | None:
        """Return its `_stat`; None once it has ended."""
        stat = _stat(self.pid)
        return stat if stat is not None and int(stat[19]) == self.started else None


def session_of(leader: Process) -> list[Process]:
    """Return the living processes of the session that `leader` started, itself included.

    The kernel gives no process the number of a session that still has members. So if a process has
    the leader's number and another start time, the whole session has ended.
    """
    now = Process.find(leader.pid)
    if now is not None and now != leader:
        return []
    return _living(_SESSION, leader.pid)


def children_of(pid: int) -> list[Process]:
    """Return the living direct children of `pid`."""
    return _living(_PARENT, pid)


def _living(field: int, number: int) -> list[Process]:
    """Return the living processes of which a field of `_stat` has this number."""
    found: list[Process] = []
    for process in _all():
        stat = _stat(process.pid)
        if stat is not None and int(stat[field]) == number and process.alive():
            found.append(process)
    return found


def send(processes: list[Process], number: int) -> None:
    """Send a signal to each, through a descriptor that cannot become that of another process."""
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
    """Wait until the processes have ended. Returns those that still live after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while True:
        left = [process for process in processes if process.alive()]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.01)


def allow_files() -> None:
    """Let this process open as many files as it may."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def end_children(patience_s: float) -> None:
    """Kill the children of this process, and theirs.

    Those become its children once their parents have ended, if it adopts orphans.
    """
    while True:
        children = children_of(os.getpid())
        if not children:
            return
        send(children, signal.SIGKILL)
        if wait_gone(children, patience_s):
            return  # the kernel does not let go of them, as in uninterruptible sleep


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none can escape."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: signal.Signals) -> None:
    """Be sent `number` when the parent's thread that started this process ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def show(args: list[str]) -> None:
    """Have `ps` show `args` for this process, and /proc/<pid>/environ its environment.

    A fork shows those of its parent. A kernel without CONFIG_CHECKPOINT_RESTORE goes on to do so.
    The kernel reads both from memory that prctl(2), PR_SET_MM_MAP, names:

        memory   | args, each with \\0 | NAME=value, each with \\0 |
                 ^ arg_start           ^ arg_end = env_start        ^ env_end
    """
    line = b"".join(os.fsencode(each) + b"\0" for each in args)
    environ = b"".join(name + b"=" + value + b"\0" for name, value in os.environb.items())
    memory = mmap.mmap(-1, len(line) + len(environ), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(line + environ)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    stat = ["", "", "", *fields]  # counted as in proc(5)
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
    size = ctypes.c_ulong(ctypes.sizeof(layout))
    failed = libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(layout), size, 0)
    if not failed:
        _shown.append(memory)


class _MemoryMap(ctypes.Structure):
    """The kernel's `prctl_mm_map`, see prctl(2)."""

    _fields_ = (
        ("start_code", ctypes.c_uint64),
        ("end_code", ctypes.c_uint64),
        ("start_data", ctypes.c_uint64),
        ("end_data", ctypes.c_uint64),
        ("start_brk", ctypes.c_uint64),
        ("brk", ctypes.c_uint64),
        ("start_stack", ctypes.c_uint64),
        ("arg_start", ctypes.c_uint64),
        ("arg_end", ctypes.c_uint64),
        ("env_start", ctypes.c_uint64),
        ("env_end", ctypes.c_uint64),
        ("auxv", ctypes.c_void_p),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_int32),
    )


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _all() -> list[Process]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = [Process.find(pid) for pid in pids]
    return [process for process in found if process is not None]


def _stat(pid: int) -> list[str] | None:
    """Read the fields of /proc/<pid>/stat from the third on; None: there is no such process.

    0 state, 1 parent, 2 group, 3 session, 17 threads, 19 start time.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return text.rpartition(")")[2].split()  # the second field is a name that may hold anything
