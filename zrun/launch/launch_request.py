"""What is asked of a launcher, and what one attempt at it came to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from zrun.hosts.backend import Backend
from zrun.job.load import LoadedJob
from zrun.launch.detach import DetachedLauncher
from zrun.launch.failures import Failure, Hang, LostHost
from zrun.runs.run_lock import RunLock
from zrun.watch.ui import Ui
from zrun_core.spine.spec import ResumeSpec


@dataclass(frozen=True)
class LaunchRequest:
    """What was asked for, and what stays the same however often it is tried.

    Attributes:
        resume_command: that goes on from the run's last checkpoint.
        is_restart: it goes on, in the directory of the run that failed.
        origin: what the first attempt went on from.
        lock: on that directory: nobody else gets it in between, and the run counts as running.
    """

    loaded: LoadedJob
    backend: Backend
    environment: dict[str, str]
    run_dir: Path | None
    fresh: bool
    force: bool
    ui: Ui
    dry_run: bool
    worker: str
    resume_command: str
    detached: DetachedLauncher | None = None
    is_restart: bool = False
    lock: RunLock | None = None
    origin: ResumeSpec | None = None

    def once_more(self, outcome: AttemptResult) -> LaunchRequest:
        """The same, from what the run has saved; from where it began if that is nothing."""
        origin = self.origin if self.is_restart else outcome.origin
        return replace(
            self,
            run_dir=outcome.run_dir,
            fresh=False,
            is_restart=True,
            lock=outcome.lock,
            origin=origin,
        )


@dataclass(frozen=True)
class AttemptResult:
    code: int
    failure: Failure | Hang | LostHost | None = None
    run_dir: Path | None = None  # None: nothing was started
    committed: int = 0  # the newest step that was saved
    lock: RunLock | None = None  # on the run directory
    was_asked: bool = False  # to end, by a signal
    origin: ResumeSpec | None = None  # what it went on from
