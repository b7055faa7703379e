"""The request for a launch, and the result of one attempt at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zrun.hosts.backend import Backend
from zrun.job.load import LoadedJob
from zrun.launch.detach import DetachedLauncher
from zrun.launch.failures import Failure, Hang, LostHost
from zrun.runs.run_lock import RunLock
from zrun.watch.ui import Ui
from zrun_core.spine.spec import ResumeSpec, ScriptSpec


@dataclass(frozen=True)
class LaunchRequest:
    """A request for a launch; a restart changes its directory and the fields of restarts only.

    Attributes:
        run_dir: `--run-dir`, or that of the run that is started again; None: a new one.
        force: start even what does not fit by the estimate.
        worker: module whose `main` runs a rank.
        resume_command: that goes on from the run's last checkpoint.
        left_out: variables whose values were on the command line, and are in no file: the command
            that goes on takes them from the shell.
        command: by which it was started; empty: by none.
        is_restart: an earlier attempt has failed; the run goes on in its directory.
        lock: on that directory, held between attempts: no other launcher takes it meanwhile.
        origin: the checkpoint that the first attempt went on from.
        script: that the workers run; None: they train the job.
        restart: how often the run was started again.
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
    left_out: Sequence[str] = ()
    command: str = ""
    detached: DetachedLauncher | None = None
    is_restart: bool = False
    lock: RunLock | None = None
    origin: ResumeSpec | None = None
    script: ScriptSpec | None = None
    restart: int = 0

    @property
    def resume_in_words(self) -> str:
        """The command that goes on, with what has to be given again."""
        if not self.left_out:
            return self.resume_command
        names = ", ".join(self.left_out)
        return f"{self.resume_command} (export {names} first: values of secrets are kept nowhere)"

    def for_restart(self, result: AttemptResult) -> LaunchRequest:
        """Return the request for another attempt, after `result`.

        It goes on from what the run has saved; if that is nothing, from where it began.
        """
        origin = self.origin if self.is_restart else result.origin
        return replace(
            self,
            run_dir=result.run_dir,
            fresh=False,
            is_restart=True,
            lock=result.lock,
            origin=origin,
            restart=self.restart + 1,
        )


@dataclass(frozen=True)
class AttemptResult:
    """The end of one attempt."""

    code: int
    failure: Failure | Hang | LostHost | None = None
    run_dir: Path | None = None  # None: nothing was started
    committed: int = 0  # the newest step that was saved; 0: none
    lock: RunLock | None = None  # on the run directory
    was_asked: bool = False  # a signal has asked for the end
    origin: ResumeSpec | None = None  # the checkpoint that it went on from
