"""The agent's view of ranks that run a script of the user's own: whether they do anything at all.

Nothing tells how far a script is. Its rank works while it uses the CPU, it or what it has started,
or prints; else it waits, whatever for. Once all ranks have waited for too long, each of them is
asked for what torch's flight recorder says (`zrun_core.script.testimony`), and for its stacks.

A rank that waits for a GPU uses the CPU, since CUDA polls: what NCCL waits for there NCCL's own
watchdog ends.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zrun.agent.observer import Observer
from zrun.system import processes
from zrun.system.processes import Process
from zrun_core.spine.flight_page import RankProgress
from zrun_core.spine.flight_view import FlightRecorderView
from zrun_core.spine.script_files import ASK, status_file, waits_file

_WINDOW_S = 2.0  # over which the use of the CPU is measured
_BUSY = 0.05  # of a core: helper threads of libraries that poll use less
_ANSWER_S = 1.0  # that ranks get
_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class _Activity:
    """What a rank has done up to the last look.

    Attributes:
        at: when that was, on the monotonic clock.
        cpu_s: seconds of the CPU that it had used, with what it has started and waited for.
        printed: bytes of its log.
        count: of windows in which it did something.
    """

    at: float
    cpu_s: float
    printed: int
    count: int = 1
    is_busy: bool = True


class ScriptObserver(Observer):
    """Reads what the kernel knows of a host's ranks, and their logs."""

    def __init__(self, view: FlightRecorderView, run_dir: Path) -> None:
        super().__init__(view, run_dir)
        self._activities: dict[int, _Activity] = {}

    def status_of(self, rank: int, status: int) -> int:
        """Return that of the script, if native code has crashed behind the end of Python."""
        if status in _CRASHES:
            with suppress(OSError, ValueError):
                return int(status_file(self._run_dir, rank).read_text())
        return status

    def _state(self, rank: int) -> RankProgress:
        """Return the header of its page, with its activity for its progress."""
        state = super()._state(rank)
        if state.phase != "script":
            return state
        activity = self._look_at(rank, state.pid)
        return state._replace(waiting=not activity.is_busy, progress=activity.count)

    def _look_at(self, rank: int, pid: int) -> _Activity:
        now = time.monotonic()
        known = self._activities.get(rank)
        if known is not None and now - known.at < _WINDOW_S:
            return known
        printed = 0
        with suppress(OSError):
            printed = self._log(rank).stat().st_size
        cpu_s = _cpu_s(pid)
        if known is None:
            found = _Activity(now, cpu_s, printed)
        else:
            share = (cpu_s - known.cpu_s) / (now - known.at)
            is_busy = share > _BUSY or printed != known.printed
            count = known.count
            if is_busy:
                count += 1
            found = _Activity(now, cpu_s, printed, count, is_busy)
        self._activities[rank] = found
        return found

    def _does(self, rank: int, state: RankProgress) -> str:
        activity = self._activities.get(rank)
        return "runs" if activity is None or activity.is_busy else "is idle"

    def _ask(self, leaders: Mapping[int, Process], halted: list[int]) -> dict[int, dict[str, Any]]:
        able = {
            rank: leader
            for rank, leader in leaders.items()
            if rank not in halted and waits_file(self._run_dir, rank).exists()
        }
        for rank in able:
            with suppress(OSError):
                waits_file(self._run_dir, rank).write_text("")
        processes.send(list(able.values()), ASK)
        deadline = time.monotonic() + _ANSWER_S
        told: dict[int, dict[str, Any]] = {}
        while len(told) < len(able) and time.monotonic() < deadline:
            time.sleep(_ANSWER_S / 20)
            for rank in able.keys() - told.keys():
                with suppress(OSError, ValueError):  # not there yet, or half written
                    told[rank] = {"torch": json.loads(waits_file(self._run_dir, rank).read_text())}
        return told


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of the session that a process leads.

    Children that have ended count where their parent has waited for them.
    """
    leader = Process.find(pid)
    if leader is None:
        return 0.0
    ticks = 0
    for process in processes.session_of(leader):
        with suppress(OSError, IndexError, ValueError):
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            fields = stat.rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_PER_S
