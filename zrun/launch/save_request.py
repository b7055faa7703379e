"""Ask the launcher of a run for a save, and wait until the step is committed. The run trains on.

The request goes from the launcher to rank 0, which tells the other ranks in its step's message. The
answer is in the run's record: the `save` event of a step that came after the request.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from zrun.launch.stop_request import launcher_of, refuse_stopped, signalled
from zrun.runs.listing import (
    RunStatus,
    RunSummary,
    is_script,
    may_save,
    parse_events,
    read_run,
)
from zrun.runs.run_lock import is_held
from zrun.system.tail_file import FileTail
from zrun_core.errors import HangError, JobError, PreflightError, SaveError
from zrun_core.spine.stop_signals import SAVE

_TURN_S = 0.05


@dataclass(frozen=True)
class Saved:
    """A step that is committed.

    Attributes:
        path: its folder, on the host of rank 0.
        seconds: from the beginning of the save to its commit.
    """

    step: int
    path: str
    bytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return asdict(self)


class RunEndedError(SaveError):
    """The run ended before it had saved."""

    def __init__(self, run: RunSummary) -> None:
        self.run = run
        message = f"not saved: run {run.run_id} {run.state}"
        if run.step:
            message += f" after step {run.step}"
        message += " before it could save"
        if run.state is RunStatus.FAILED:
            message += f" (exit code {run.exit_code}): {run.headline}"
        super().__init__(message)


def check(run: RunSummary) -> None:
    """Check that the run can be asked.

    Raises:
        JobError: it does not run, or saves nothing.
        PreflightError: its launcher cannot be reached from here, or no rank trains yet.
    """
    if run.state is not RunStatus.RUNNING:
        raise JobError(
            f"run {run.run_id} is not running: it {run.state}; its saves: zrun ckpt ls {run.path}"
        )
    if not may_save(run.path):
        raise JobError(
            f"run {run.run_id} saves nothing: its job has no checkpoint section; for the next run "
            "write one, such as checkpoint: {every: 500}"
        )
    if run.seconds is None and is_script(run.path):
        raise JobError(
            f"run {run.run_id} is of a script that has not called zrun_core.init(): until it does, "
            "it cannot be asked to save"
        )
    if run.seconds is None or not launcher_of(run, "save").catches(SAVE):
        raise PreflightError(
            f"run {run.run_id} has not started to train, so there is nothing to save: try again "
            "later"
        )


def save(run: RunSummary, timeout_s: float) -> Saved:
    """Ask a running run for a save, and wait for it.

    Raises:
        JobError: as `check`; it belongs to another user.
        PreflightError: as `check`.
        SaveError: the step could not be saved, and the run trains on.
        RunEndedError: the run ended before.
        HangError: it has not saved after `timeout_s` seconds.
    """
    check(run)
    record = FileTail.from_now_on(run.path / "events.jsonl")
    newest = read_run(run.path).step or 0  # what is saved must be newer
    if is_script(run.path):
        newest = -1  # it may count otherwise: the next save is the answer
    _ask(run)
    deadline = time.monotonic() + timeout_s
    while True:
        runs_on = is_held(run.path)  # asked first: nothing comes after
        for event in parse_events(record.lines()):
            match event.get("type"):
                case "save" if event["step"] > newest:
                    return Saved(event["step"], event["path"], event["bytes"], event["seconds"])
                case "warning" if (event.get("unsaved") or 0) > newest:
                    raise SaveError(str(event["message"]))
                case "start":  # a restart: the attempt before took the request with it
                    newest = (event.get("resumed") or {}).get("step") or 0
                    _ask(run)
        if not runs_on:
            raise RunEndedError(read_run(run.path))
        if time.monotonic() > deadline:
            refuse_stopped(run, launcher_of(run, "save"))
            advice = f"wait with a longer --timeout, or look at {run.path}/logs"
            if is_script(run.path):
                advice = "its loop calls zrun_core.save where run.save_asked is true"
            raise HangError(
                f"run {run.run_id} has not saved within {timeout_s:g} s; it may still do so: "
                f"{advice}"
            )
        time.sleep(_TURN_S)


def _ask(run: RunSummary) -> None:
    """Signal the launcher, unless the signal would end it: earlier versions do not know it."""
    process = launcher_of(run, "save")
    if process.catches(SAVE):
        with signalled(run, process, SAVE):
            pass
