"""The runs of this folder and of this machine, read from their files. Nothing here changes a run.

    path = find_run("gpt")  # a run directory, a run id or its beginning, or a job: its newest run
    run = read_run(path)    # running, finished, failed, stopped or vanished; how far it is

A run is alive while its launcher holds the lock of its directory. No process is looked up by name,
and no clock of one host is compared with that of another: `started` is of the launcher's clock,
`seconds` of rank 0's alone.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any

from zrun.runs.run_lock import LockHolder, held_here, is_held, last_holder
from zrun.runs.rundir import is_run
from zrun_core.errors import ExitCode, JobError
from zrun_core.spine.events import Event

ROOT = Path("runs")
_STOPPED = {ExitCode.STOPPED, ExitCode.INTERRUPTED, ExitCode.TERMINATED}
_HEAD_BYTES = 1 << 18  # of a record: its `start` is among the first events
_BLOCK_BYTES = 1 << 16  # of a record: read at once ...
_TAIL_BYTES = 1 << 22  # ... and at most, to find the newest step
_NUM_SHOWN = 5
_NAME = re.compile(r"^name: *[\"']?([A-Za-z0-9._-]+)", re.MULTILINE)  # of a job


class RunStatus(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    VANISHED = "vanished"  # its launcher was killed: it could not say how it ended


@dataclass(frozen=True)
class RunSummary:
    """A run, as its files tell of it.

    Attributes:
        holder: its launcher, the last one if there were several; None: not known.
        exit_code: of the launcher; None while it runs, or if it is not known.
        headline: the failure, or who stopped it, in one line; empty while it runs, and if it
            reached its end.
        started: unix seconds, by the launcher's clock.
        seconds: of training up to the newest event, by the clock of rank 0's host; with those
            before the checkpoint that the run went on from, where it tells them.
        step: the newest that ended, or that the run went on from.
        loss: of the newest step; None: it tells none.
        left_s: seconds until its last step, if steps, evaluations and saves take as long as so far;
            None where it does not run, or nobody knows.
    """

    path: Path
    job: str
    state: RunStatus
    holder: LockHolder | None
    exit_code: int | None
    headline: str
    started: float
    seconds: float | None
    step: int | None
    total_steps: int | None
    hosts: tuple[str, ...]
    ranks: int | None
    loss: float | None = None
    left_s: float | None = None

    @property
    def run_id(self) -> str:
        return self.path.name

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        holder = self.holder
        return {
            "run": self.run_id,
            "job": self.job,
            "path": str(self.path),
            "state": self.state,
            "exit_code": self.exit_code,
            "headline": self.headline or None,
            "step": self.step,
            "total_steps": self.total_steps,
            "loss": self.loss,
            "left_s": self.left_s,
            "started": self.started,
            "seconds": self.seconds,
            "ranks": self.ranks,
            "hosts": list(self.hosts),
            "launcher": {"host": holder.host, "pid": holder.pid} if holder is not None else None,
        }


def run_dirs(root: Path = ROOT) -> list[Path]:
    """Return the run directories below `root` and of this user's launchers here, newest first."""
    candidates = [*sorted(root.absolute().glob("*/*")), *held_here()]
    paths = dict.fromkeys(path for path in candidates if is_run(path))
    return sorted(paths, key=lambda path: (_start_of(path), path.name), reverse=True)


def list_runs(since: float | None, root: Path = ROOT) -> tuple[list[RunSummary], int]:
    """Return the runs that go on, and those that started lately, newest first.

    Args:
        since: unix seconds from which on a run started lately; None: all did.

    Returns:
        The runs, and the number of others.
    """
    paths = run_dirs(root)
    wanted = paths
    if since is not None:
        wanted = [path for path in paths if _start_of(path) >= since or is_held(path)]
    return [read_run(path) for path in wanted], len(paths) - len(wanted)


def find_run(text: str, root: Path = ROOT, running: bool = False) -> Path:
    """Return the run directory that `text` names.

    Args:
        text: a run directory, a run id or its beginning, or a job: its newest run.
        running: of a job's runs, prefer the one that goes on.

    Raises:
        JobError: there is none, or more than one.
    """
    # Unlike Path's, this expanduser takes a user who does not exist for a name.
    path = Path(os.path.expanduser(text)).absolute()
    if is_run(path):
        return path
    if "/" in text:
        raise JobError(f"{text} is no run directory{_below(path)}")
    paths = run_dirs(root)
    here = [path for path in paths if _is_below(path, root)]
    elsewhere = [path for path in paths if path not in here]
    for candidates in (here, elsewhere):
        found = _find_among(text, candidates, running)
        if found is not None:
            return found
    raise JobError(
        f"no run and no job is called {text!r}{_nearest(text, paths)}; zrun ps --all lists the "
        f"runs of ./{root}"
    )


def _find_among(text: str, paths: list[Path], running: bool) -> Path | None:
    """Return the one of `paths`, newest first, that `text` names: by its id, job, or beginning.

    Raises:
        JobError: it names more than one.
    """
    exact = [path for path in paths if path.name == text]
    if exact:
        return _only(text, exact, "give its path")
    of_job = [path for path in paths if job_name(path) == text]
    if of_job:
        alive = [path for path in of_job if is_held(path)] if running else []
        return _only(text, alive, "name one") if alive else of_job[0]
    starting = [path for path in paths if text and path.name.startswith(text)]
    if starting:
        return _only(text, starting, "write more of it")
    return None


def is_script(path: Path) -> bool:
    """Return whether a run is one of `zrun run`."""
    return "script" in _written_job(path)


def may_save(path: Path) -> bool:
    """Return whether the job of a run saves; also true where that cannot be read."""
    job = _written_job(path)
    if not job or "script" in job:
        return True
    return job.get("checkpoint") is not None


def checkpoints_of(path: Path) -> Path:
    """Return the folder in which the run at `path` saves: `checkpoint.dir`, or its own."""
    from zrun_core.spine.spec import resolve_checkpoint_folder

    match _written_job(path).get("checkpoint"):
        case {"dir": str(chosen)}:
            return resolve_checkpoint_folder(chosen, path)
    return resolve_checkpoint_folder(None, path)


def _written_job(path: Path) -> dict[str, Any]:
    """Return the job of a run as its directory has it; empty where that cannot be read."""
    from zrun.job.document import Document

    with suppress(OSError, JobError, UnicodeDecodeError):
        text = (path / "job.yaml").read_text(encoding="utf-8")
        job = Document.parse(text, "job.yaml", {}).value
        if isinstance(job, dict):
            return job
    return {}


def reference(path: Path, root: Path = ROOT) -> str:
    """Return the name of a run in a command typed here: its id, or its path if it is elsewhere."""
    name = path.name if _is_below(path, root) else str(path)
    return shlex.quote(name)


def _is_below(path: Path, root: Path) -> bool:
    return path.parent.parent == root.absolute()


def _only(text: str, paths: list[Path], advice: str) -> Path:
    if len(paths) == 1:
        return paths[0]
    names = "".join(f"\n  {path.name}  {job_name(path)}  {path}" for path in paths[:_NUM_SHOWN])
    more = f"\n  and {len(paths) - _NUM_SHOWN} more" if len(paths) > _NUM_SHOWN else ""
    raise JobError(f"{text!r} may be any of {len(paths)} runs: {advice}{names}{more}")


def _nearest(text: str, paths: list[Path]) -> str:
    jobs = dict.fromkeys(job_name(path) for path in paths)
    found = get_close_matches(text, [*jobs, *(path.name for path in paths)], n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _below(path: Path) -> str:
    if not os.path.isdir(path):
        return ": no such folder, or no permission to read it"
    runs = sorted(each for each in path.glob("*") if is_run(each))
    return f"; name one of its runs, such as {runs[-1]}" if runs else ""


def job_name(path: Path) -> str:
    """Return the name of the job of a run."""
    with suppress(OSError), (path / "job.yaml").open(encoding="utf-8", errors="replace") as file:
        match = _NAME.search(file.read(_HEAD_BYTES))
        if match is not None:
            return match[1]
    return path.parent.name


def read_run(path: Path) -> RunSummary:
    """Read what the files of a run say now."""
    path = path.absolute()
    running = is_held(path)  # first: a launcher that ends meanwhile has written the rest
    holder = last_holder(path)
    events = _EventLog(path / "events.jsonl", holder.events if holder is not None else 0)
    start = events.start
    step = events.newest("step") or _resumed(start)
    report = read_json(path / "failure.json")
    code = None if running else _exit_code(path, events, report)
    ranks = read_json(path / "plan.json").get("ranks") or []
    loss = step.get("loss")
    return RunSummary(
        path=path,
        job=job_name(path),
        state=RunStatus.RUNNING if running else state_of(code),
        holder=holder,
        exit_code=code,
        headline="" if running else headline(report),
        started=_start_of(path),
        seconds=_seconds(start, events.newest(None)),
        step=step.get("step"),
        total_steps=start.get("total_steps"),
        hosts=tuple(dict.fromkeys(place["host"] for place in ranks)),
        ranks=len(ranks) or start.get("world_size"),
        loss=loss if isinstance(loss, float) and math.isfinite(loss) else None,
        left_s=_left(start, step) if running else None,
    )


def _resumed(start: Event) -> Event:
    """Return what a launch went on from; empty if it was the first."""
    return start.get("resumed") or {}


def _seconds(start: Event, last: Event) -> float | None:
    if not start or not last:
        return None
    before = _resumed(start).get("seconds") or 0.0
    return float(before + max(0.0, last["time"] - start["time"]))


def _left(start: Event, step: Event) -> float | None:
    """Return the seconds that the steps to come take, if they take as long as those of `start`."""
    total = start.get("total_steps")
    if total is None or "time" not in step:
        return None
    done = step["step"] - (_resumed(start).get("step") or 0)
    if done <= 0:
        return None
    return float((total - step["step"]) * max(0.0, step["time"] - start["time"]) / done)


def state_of(code: int | None) -> RunStatus:
    """Return how a launcher has ended, from its exit code; None: it could not tell one."""
    if code is None:
        return RunStatus.VANISHED
    if code in _STOPPED:
        return RunStatus.STOPPED
    return RunStatus.FAILED if code else RunStatus.FINISHED


def _exit_code(path: Path, events: _EventLog, report: dict[str, Any]) -> int | None:
    """Return the exit code of the launcher; None: it is not known.

    A launcher that was killed has not recorded it; its run may still have told of a failure, or
    have reached its end.
    """
    failure_code = report.get("exit_code", 1) if report else None
    code = read_json(path / "exit.json").get("exit_code", failure_code)
    if code is not None:
        return int(code)
    return ExitCode.OK if events.newest("end") else None


def headline(report: dict[str, Any]) -> str:
    """Return the content of failure.json in one line; empty where there is none."""
    message = str(report.get("message") or "").strip().partition("\n")[0]
    is_of_rank = report.get("kind") not in (None, "hang") and report.get("rank") is not None
    return f"rank {report['rank']}: {message}" if is_of_rank else message


def _start_of(path: Path) -> float:
    """Return when the last launcher of a run took it, in unix seconds of its clock."""
    holder = last_holder(path)
    if holder is not None and holder.time:
        return holder.time
    with suppress(OSError):
        return (path / "events.jsonl").stat().st_mtime
    return 0.0


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if there is none, or half of one."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class _EventLog:
    """The record of one launcher, of which only the beginning and the end are read."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._offset = offset
        starts = (event for event in parse_events(self._head()) if event.get("type") == "start")
        self.start = next(starts, {})
        self._tail: list[Event] | None = None

    def newest(self, kind: str | None) -> Event:
        """Return the last event of rank 0 with this type, any for None; {} if there is none."""
        if self._tail is None:
            self._tail = [event for event in self._backwards() if event.get("rank") == 0]
        return next((event for event in self._tail if kind in (None, event.get("type"))), {})

    def _head(self) -> Iterator[bytes]:
        """Read the first lines."""
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            while file.tell() < self._offset + _HEAD_BYTES:
                line = file.readline(_HEAD_BYTES)
                if not line:
                    return
                yield line

    def _backwards(self) -> Iterator[Event]:
        """Read events from the last one backwards, up to and including a step.

        A block begins in the middle of a line. The end of that line is the `rest`, which the next
        block completes:

            ...{"type": "st | ep", ...} newline {...} newline
            next block      | this block: `rest` is what comes before its first newline
        """
        with suppress(OSError), self._path.open("rb") as file:
            position = file.seek(0, 2)
            lowest = max(self._offset, position - _TAIL_BYTES)
            rest = b""
            while position > lowest:
                end = position
                position = max(lowest, end - _BLOCK_BYTES)
                file.seek(position)
                lines = file.read(end - position) + rest
                if position > self._offset:
                    rest, _, lines = lines.partition(b"\n")
                for event in parse_events(reversed(lines.split(b"\n"))):
                    yield event
                    if event.get("type") == "step":
                        return


def parse_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """Parse the events in these lines; other lines are skipped."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("time"), int | float):
                yield event
