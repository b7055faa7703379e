"""Run a trial of a job, and have it compared with a plain loop, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

from zrun.estimate.gate import SWITCH
from zrun.hosts.backend import HostOptions, find_backend
from zrun.job.environment import worker_environment
from zrun.job.load import LoadedJob, load_job
from zrun.launch.launch_request import LaunchRequest
from zrun.launch.session import launch
from zrun.system.signals import stop_signals, stoppable
from zrun.watch.ui import Ui
from zrun_core.errors import ExitCode, JobError, StoppedError, ZrunError

WORKER = "zrun_core.verification.worker"
_SHOWN_LINES = 12  # of a comparison that failed


class TrialFailedError(ZrunError):
    """A trial did not train to its end; what it was has been said."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the trial ended with exit code {code}")
        self.exit_code = ExitCode(code)


@dataclass(frozen=True)
class Found:
    """The verdict of a comparison: see `zrun_core/verification/verdict.py`.

    Attributes:
        agrees: the run is what a plain loop makes.
        difference: the first one, in words; "" where it agrees.
        fields: all that was told.
    """

    agrees: bool
    difference: str
    fields: Mapping[str, Any]

    @property
    def worst(self) -> float:
        """The largest relative difference of what agrees."""
        worst: Mapping[str, float] = self.fields["worst"]
        return max(worst.values())


class Runner:
    """Runs trials of one job in a folder that goes in the end."""

    def __init__(
        self, path: Path, overrides: Sequence[str], folder: Path, worker: str = WORKER
    ) -> None:
        """
        Args:
            worker: module whose `main` runs a rank.
        """
        self._worker = worker
        self._path = path
        self._overrides = list(overrides)
        self._folder = folder
        self._count = 0

    def load(self, keys: Sequence[str]) -> LoadedJob:
        """Return the job of a trial with these keys on top."""
        return load_job(self._path, [*self._overrides, *keys])

    def train(self, keys: Sequence[str]) -> Path:
        """Train a trial, recorded. Returns its run directory.

        Raises:
            TrialFailedError: it did not come to its end.
        """
        loaded = self.load(keys)
        job_dir = self._path.absolute().parent
        backend = find_backend(loaded.config, HostOptions(), os.environ, job_dir, gethostname())
        self._count += 1
        run_dir = self._folder / f"run-{self._count}"
        request = LaunchRequest(
            loaded=loaded,
            backend=backend,
            environment=worker_environment(loaded.config, os.environ),
            run_dir=run_dir,
            fresh=False,
            force=False,
            ui=Ui.none,
            dry_run=False,
            worker=self._worker,
            resume_command="",
        )
        handlers = {number: signal.getsignal(number) for number in stop_signals()}
        try:
            code = launch(request, None)
        finally:  # it leaves them ignored, as the last one of a process may
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if code in (ExitCode.STOPPED, ExitCode.INTERRUPTED, ExitCode.TERMINATED):
            how = ExitCode.TERMINATED if code == ExitCode.TERMINATED else ExitCode.INTERRUPTED
            raise StoppedError("stopped while a trial ran", how)
        if code != ExitCode.OK:
            raise TrialFailedError(code)
        return run_dir

    def compare(self, run_dirs: Sequence[Path]) -> Found:
        """Compare runs with a plain loop.

        Raises:
            JobError: nothing can be said of this job, or the plain loop cannot run it.
        """
        job = self.load([]).config
        environment = os.environ | worker_environment(job, os.environ)
        words = [sys.executable, "-P", "-m", "zrun_core.verification", *map(str, run_dirs)]
        with stoppable(lambda: "while a run was compared"):
            ran = subprocess.run(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        try:
            answer = json.loads(ran.stdout)
        except ValueError:
            last = "\n".join(ran.stderr.splitlines()[-_SHOWN_LINES:])
            raise JobError(
                f"the plain loop ended with status {ran.returncode} before it could be compared: "
                "it holds the whole model on one rank, once for each data-parallel rank; make the "
                f"model smaller by its args, or write --slots with fewer ranks\n{last}"
            ) from None
        if "error" in answer:
            raise JobError(f"in the plain loop: {answer['error']}")
        if answer["why_not"]:
            raise JobError(answer["why_not"])
        difference = answer["difference"]
        return Found(answer["agrees"], difference["text"] if difference else "", answer)


def recorded_until(run_dir: Path) -> int:
    """Return the last step that a trial has recorded."""
    return max(int(path.name.removeprefix("step-")) for path in run_dir.glob("record/*/step-*"))


@contextmanager
def trial_folder() -> Iterator[Path]:
    """Make a folder for trials, which goes unless one of them fails."""
    folder = Path(tempfile.mkdtemp(prefix="zrun-verify-"))
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "off"  # no forecast beside a trial
    try:
        yield folder
    except TrialFailedError:  # its message names the log of a rank
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        if before is None:
            os.environ.pop(SWITCH, None)
        else:
            os.environ[SWITCH] = before
