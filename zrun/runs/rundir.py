"""The run directory: all files of one run, in `runs/<name>/<run id>/`, for its owner only.

    with RunDir.claim(name="gpt", chosen=None) as rundir:
        rundir.write_job(...)

A lock on the directory is held for the life of the launcher, however it ends.

    job.yaml       the job as it runs, with the origin of each value
    plan.json      each rank's host and device
    events.jsonl   everything that the run told, over all launches that went on with it
    checkpoints/   the steps, unless the job names another folder
    profile/       traces of `profile` and `zrun profile`
    trackers.json  how far the trackers of `log.to` have come; their own files are beside it
    logs/          of the ranks, the agents, and a launcher that left its terminal
    failures/      notes of dying workers
    launch.json    the command, without secrets, and where the record of this launch begins
    report.html    what came of it, with curves
    failure.json   why the run did not reach its end
    exit.json      the launcher's exit code
    attempts/<n>/  files of earlier launches
"""

from __future__ import annotations

import json
import os
import secrets
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from zrun.runs.run_lock import LOCK, RunLock, last_holder
from zrun_core.checkpoint.folder_lock import PATIENCE_S, InUseError, held
from zrun_core.checkpoint.names import before_name, belongs_to_steps
from zrun_core.errors import ExitCode, JobError, SaveError, StoppedError, ZrunError
from zrun_core.spine.folders import make_private
from zrun_core.spine.spec import LaunchPlan

LOG = "launcher.log"
PAGE = "report.html"
LAUNCH = "launch.json"


class EarlierRun(Enum):
    """The fate of an earlier run in the directory."""

    REFUSE = "nothing is written over it"
    CONTINUE = "its record and its checkpoints stay, the rest of it moves to attempts/<n>"
    START_OVER = "all of it moves to attempts/<n>"


# Trackers go on with what they have kept here.
_OF_TRACKERS = {"trackers.json", "metrics.csv", "metrics.prom", "tensorboard", "wandb"}
_KEPT = {
    EarlierRun.CONTINUE: {"events.jsonl", "checkpoints", "profile", *_OF_TRACKERS},
    EarlierRun.START_OVER: set[str](),
}


class RunDir:
    """A run directory that this process holds.

    Attributes:
        exit_code: of the launcher, once it is known. Others read it in `exit.json`.
    """

    def __init__(self, path: Path, lock: RunLock) -> None:
        self.path = path
        self.run_id = path.name
        self.exit_code: int | None = None
        self._lock = lock
        self._keeps_lock = False
        self._has_failure = False
        self._events = _open(self.events, os.O_APPEND)
        lock.starts_at(os.fstat(self._events).st_size)

    @classmethod
    def claim(
        cls,
        name: str,
        chosen: Path | None,
        root: Path = Path("runs"),
        earlier: EarlierRun = EarlierRun.REFUSE,
        lock: RunLock | None = None,
    ) -> Self:
        """Make the run directory and lock it: `chosen`, or a new one below `root`.

        Args:
            chosen: --run-dir; None: a new directory.
            earlier: the fate of a run that is there.
            lock: on the directory, if this process has held it since an earlier attempt.

        Raises:
            JobError: another launcher holds it, it has files in it, or it cannot be made.
        """
        path = (chosen if chosen is not None else root / name / _new_id()).absolute()
        with _in_words(path):
            make_private(path)
            if not (path / LOCK).exists() and not is_run(path):
                _refuse_files(path)  # before anything is written there: it may be any folder
        lock = lock or lock_run(path)
        try:
            with _in_words(path):
                if earlier is not EarlierRun.REFUSE and is_run(path):
                    _move_attempt(path, _KEPT[earlier])
                else:
                    _refuse_files(path)
                path.chmod(0o700)
                for folder in ("logs", "failures"):
                    (path / folder).mkdir(mode=0o700)
                return cls(path, lock)
        except BaseException:
            lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        code = _exit_code(error) if error is not None else self.exit_code
        with suppress(OSError):
            if error is not None and not self._has_failure:
                self.write_failure(_failure(error))
            if code is not None:
                write_exit(self.path, code)
        os.close(self._events)
        if not self._keeps_lock:
            self._lock.close()

    def keep_lock(self) -> RunLock:
        """Return the lock, which stays held when this object is closed."""
        self._keeps_lock = True
        return self._lock

    @property
    def first_event(self) -> int:
        """Return where in `events.jsonl` the record of this launcher begins, in bytes."""
        return self._lock.holder.events

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank}.log"

    def failure(self, rank: int) -> Path:
        """Return the file in which a worker says why it ends."""
        return self.path / "failures" / f"rank-{rank}.json"

    def write_job(self, text: str) -> None:
        self._write("job.yaml", text)

    def write_plan(self, plan: LaunchPlan) -> None:
        self._write("plan.json", plan.model_dump_json(indent=1) + "\n")

    def write_failure(self, report: dict[str, Any]) -> None:
        self._has_failure = True
        write_failure(self.path, report)

    def write_launch(self, command: str) -> None:
        """Record the command of this launch, which must be without secrets."""
        told = {"command": command, "time": time.time(), "first_event": self.first_event}
        self._write(LAUNCH, json.dumps(told) + "\n")

    def write_page(self, text: str) -> Path:
        """Write `report.html`, all of it or nothing.

        Raises:
            OSError: the disk is full, or gone.
        """
        return write_page(self.path / PAGE, text)

    def append(self, lines: Sequence[bytes]) -> None:
        """Add events to `events.jsonl`, unbuffered: others read along.

        Raises:
            ZrunError: the disk is full, or gone.
        """
        try:
            _write_all(self._events, b"".join(line + b"\n" for line in lines))
        except OSError as error:
            raise ZrunError(
                f"{self.events}: {error.strerror}; the run cannot be recorded"
            ) from None

    def _write(self, name: str, text: str) -> None:
        _write(self.path / name, text)


def write_page(page: Path, text: str) -> Path:
    """Write a page beside the files of a run, for its owner only, all of it or nothing.

    Raises:
        OSError: the disk is full, or gone.
    """
    part = page.with_name(f".{page.name}.{os.getpid()}.part")
    try:
        _write(part, text)
        part.replace(page)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return page


def write_failure(run_dir: Path, report: dict[str, Any]) -> None:
    """Record why a run did not reach its end."""
    _write(run_dir / "failure.json", json.dumps(report, indent=1) + "\n")


def write_exit(run_dir: Path, code: int | None) -> None:
    """Record the exit code of a launcher, after everything else; None: it is not known."""
    _write(run_dir / "exit.json", json.dumps({"exit_code": code, "time": time.time()}) + "\n")


def _write(path: Path, text: str) -> None:
    file = _open(path, os.O_TRUNC)
    try:
        _write_all(file, text.encode())
    finally:
        os.close(file)


def _open(path: Path, how: int) -> int:
    """Open a file of the run directory for writing, for its owner only. It may be no link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | how, 0o600)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _new_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Turn an error of the system into one about the choice of the directory."""
    try:
        yield
    except OSError as error:
        raise JobError(
            f"run directory {path}: {error.strerror}: choose another with --run-dir"
        ) from None


def lock_run(path: Path) -> RunLock:
    """Lock a run directory for the life of this process.

    Raises:
        JobError: it is held already, or cannot be locked.
    """
    with _in_words(path):
        try:
            return RunLock(path)
        except BlockingIOError:
            holder = last_holder(path) or "process that is just starting"
            raise JobError(
                f"run directory {path} is in use by the zrun {holder}: wait for it, stop it with "
                "zrun stop, or choose another with --run-dir"
            ) from None


def _exit_code(error: BaseException) -> int:
    """Return the exit code of a process that `error` ends."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return int(getattr(error, "exit_code", 1))


def _failure(error: BaseException) -> dict[str, Any]:
    """Return the content of failure.json for an error of the launcher itself."""
    if isinstance(error, StoppedError | KeyboardInterrupt):
        kind = "stopped"
    elif isinstance(error, ZrunError):
        kind = "zrun"
    else:
        kind = "bug"
    found = {
        "exit_code": int(_exit_code(error)),
        "kind": kind,
        "type": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "time": time.time(),
    }
    if kind == "bug":
        found["traceback"] = "".join(traceback.format_exception(error))
    return found


def is_run(path: Path) -> bool:
    """Return whether `path` is the directory of a run that was started once."""
    # Unlike Path.is_file, False where this user may not look.
    return os.path.isfile(path / "events.jsonl")


def _move_attempt(path: Path, kept: set[str]) -> None:
    """Move the files of an earlier launch, but for those in `kept`, to attempts/<n>.

    Raises:
        JobError: a process saves there.
        OSError: something cannot be moved.
    """
    attempts = path / "attempts"
    checkpoints = path / "checkpoints"
    attempts.mkdir(mode=0o700, exist_ok=True)
    numbers = [int(entry.name) for entry in attempts.iterdir() if entry.name.isdigit()]
    target = attempts / str(1 + max(numbers, default=0))
    target.mkdir(mode=0o700)
    is_moved = checkpoints.name not in kept and checkpoints.is_dir()
    try:
        # Ranks of a launcher that was killed, or that torchrun started, hold no lock but this one.
        with held(checkpoints, PATIENCE_S) if is_moved else nullcontext():
            for entry in sorted(path.iterdir()):
                if entry.name not in kept | {LOCK, "attempts"}:
                    entry.rename(target / entry.name)
    except InUseError as error:
        target.rmdir()
        raise JobError(
            f"run directory {path}: {error.holder} saves there: wait for it, or choose another "
            "with --run-dir"
        ) from None


def set_checkpoints_aside(folder: Path, run_id: str) -> None:
    """Move the steps of a folder into a folder of it, so that another run can use it.

    Raises:
        JobError: a process saves there, or they cannot be moved.
    """
    try:
        with held(folder):
            target = folder / before_name(run_id)
            target.mkdir(mode=0o700)
            for entry in sorted(folder.iterdir()):
                if belongs_to_steps(entry.name):
                    entry.rename(target / entry.name)
    except InUseError as error:
        raise JobError(
            f"checkpoint.dir: {folder} is in use by {error.holder}: wait for it, stop it, or name "
            "another folder"
        ) from None
    except SaveError as error:
        raise JobError(f"checkpoint.dir: {error}") from None
    except OSError as error:
        raise JobError(f"checkpoint.dir: {folder}: {error.strerror}: name another folder") from None


def _refuse_files(path: Path) -> None:
    """Refuse a directory with files: nothing is written over an earlier run, or among other files.

    Raises:
        JobError: the directory has files.
    """
    names = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
    if "events.jsonl" in names:
        raise JobError(
            f"run directory {path} holds an earlier run: continue it with --resume auto, start "
            "over with --fresh, or choose another with --run-dir"
        )
    if names:
        raise JobError(
            f"run directory {path} is not empty (it holds {names[0]}): choose another with "
            "--run-dir"
        )
