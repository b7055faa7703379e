"""Signals to the workers of a host: to save, to profile, to finish, to end now, and what follows.

StopMode.FINISH   SIGUSR1 to each worker: it ends after its step; SIGTERM to a script
StopMode.NOW      SIGINT and SIGTERM, which a worker takes together for "now"; SIGKILL after 5 s
StopMode.KILL     SIGKILL
a worker failed   SIGTERM after 0.1 s, in which others may say why they fail too; SIGKILL after 5 s
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from zrun.system import processes
from zrun.system.processes import Process
from zrun.transport.frames import GRACE_S, StopMode
from zrun_core.spine.profile_request import ProfileRequest
from zrun_core.spine.stop_signals import PROFILE, SAVE

_REPORT_S = 0.1  # for the workers that fail together with the first one to say why


class WorkerSignals:
    """The processes that lead the workers' sessions, and how they were asked to end.

    Attributes:
        asked: how they were asked to end last; None: they were not. It holds for workers to come.
        finishing: the signal that asks them to finish.
    """

    def __init__(self) -> None:
        self.asked: StopMode | None = None
        self.finishing = signal.SIGUSR1
        self._leaders: dict[int, Process] = {}  # by rank
        self._terminate_at: float | None = None
        self._kill_at: float | None = None

    def add(self, pids: Mapping[int, int]) -> None:
        """Have these processes lead the sessions of ranks.

        Args:
            pids: by rank; several have one until the fork server has forked them.
        """
        found = {rank: Process.find(pid) for rank, pid in pids.items()}
        self._leaders |= {rank: leader for rank, leader in found.items() if leader is not None}
        if self.asked is not None:
            self.stop(self.asked)

    def leaders_of(self, ranks: Iterable[int]) -> dict[int, Process]:
        """Return the processes of those of the ranks that have one."""
        return {rank: self._leaders[rank] for rank in ranks if rank in self._leaders}

    @property
    def leaders(self) -> list[Process]:
        """Return the process of every rank, each once."""
        return list(dict.fromkeys(list(self._leaders.values())))

    def stop(self, how: StopMode) -> None:
        """Ask the workers to end: them alone, or all that they started too."""
        self.asked = how
        if how is StopMode.NOW and self._kill_at is None:
            self._kill_at = time.monotonic() + GRACE_S
        for leader in self.leaders:
            match how:
                case StopMode.FINISH:
                    processes.send([leader], self.finishing)
                case StopMode.NOW:
                    processes.send([leader], signal.SIGINT)
                    processes.send(processes.session_of(leader), signal.SIGTERM)
                case StopMode.KILL:
                    processes.send(processes.session_of(leader), signal.SIGKILL)

    def kill(self, rank: int) -> None:
        """End one worker, and what it started."""
        leader = self._leaders.get(rank)
        if leader is not None:
            processes.send(processes.session_of(leader), signal.SIGKILL)

    def stop_after_failure(self) -> None:
        """Have the other workers end soon, unless they are about to."""
        if self._kill_at is None:
            now = time.monotonic()
            self._terminate_at = now + _REPORT_S
            self._kill_at = now + GRACE_S

    def save(self) -> None:
        """Ask rank 0 to save, which tells the others.

        Two ranks would be told in different steps, and save twice.
        """
        if self.asked is None:
            processes.send([self._leaders[0]], SAVE)

    def profile(self, request: str, run_dir: Path) -> None:
        """Ask rank 0 for a profile, which tells the others."""
        if self.asked is None:
            with suppress(OSError, ValueError):  # as on a full disk: it says that it finds none
                ProfileRequest.parse(request).write(run_dir)
            processes.send([self._leaders[0]], PROFILE)

    def patience_s(self, most: float) -> float:
        """Return the seconds until the next signal is due, at most `most`."""
        for moment in (self._terminate_at, self._kill_at):
            if moment is not None:
                most = min(most, max(0.0, moment - time.monotonic()))
        return most

    def send_due(self) -> None:
        """Send the signals whose time has come."""
        now = time.monotonic()
        if self._terminate_at is not None and now >= self._terminate_at:
            self._terminate_at = None
            for leader in self.leaders:
                processes.send(processes.session_of(leader), signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self.stop(StopMode.KILL)

    def end_sessions(self) -> None:
        """Leave nothing of the workers behind: not their helpers, nor orphans of this process."""
        left = [process for leader in self.leaders for process in processes.session_of(leader)]
        processes.send(left, signal.SIGTERM)
        processes.send(processes.wait_gone(left, GRACE_S / 5), signal.SIGKILL)
        processes.end_children(GRACE_S)
