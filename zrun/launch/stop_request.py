"""Ask the launcher of a run to end, and wait until it has."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zrun.runs.listing import RunSummary
from zrun.system.deadlines import StopDeadline
from zrun.system.processes import Process
from zrun.system.signals import STOP_NOW
from zrun_core.errors import HangError, JobError, PreflightError
from zrun_core.spine.config import LimitsConfig
from zrun_core.spine.flight_recorder import read_first_progress

_CLEANING_S = 30.0  # that a launcher may take for the rest, once the workers had their time
_LOOK_S = 1.0  # between two looks at whether it saves


def launcher_of(run: RunSummary, what: str = "stop") -> Process:
    """The process that a running run answers to.

    Args:
        what: the command of zrun that it is to obey.

    Raises:
        PreflightError: it is on another machine, or cannot be seen from here.
    """
    holder = run.holder
    if holder is None:
        raise PreflightError(
            f"run {run.run_id} is just starting, or its lock file is damaged: try again"
        )
    if not holder.is_here:
        raise PreflightError(
            f"run {run.run_id} belongs to a launcher on {holder.host} (process {holder.pid}): {what} it there, with "
            f"ssh {holder.host} zrun {what} {run.path}"
        )
    process = holder.process
    if process is None:
        raise PreflightError(
            f"run {run.run_id} belongs to process {holder.pid}, which cannot be seen from here: {what} it in the "
            "container that it was started in"
        )
    return process


def stop(run: RunSummary, now: bool, timeout_s: float | None = None) -> None:
    """Signal the launcher of a running run, and wait until it is gone.

    Args:
        now: end the workers at once; else they finish the step, and save.
        timeout_s: how long to wait; None: as long as the launcher itself does, and half a minute more.

    Raises:
        PreflightError: the launcher cannot be reached from here.
        JobError: it belongs to another user.
        HangError: it is still there when the time is over.
    """
    process = launcher_of(run)
    with signalled(run, process, STOP_NOW if now else signal.SIGTERM) as descriptor:
        start = time.monotonic()
        if descriptor is None or _ends(descriptor, run.path, timeout_s, saves=not now):
            return
    refuse_stopped(run, process)
    waited_s = time.monotonic() - start
    advice = (
        f"look at {run.path}/logs"
        if now
        else f"wait with a longer --timeout, or zrun stop {run.run_id} --now"
    )
    raise HangError(
        f"run {run.run_id} was told to stop and still runs after {waited_s:.0f} s (process {process.pid}): {advice}"
    )


@contextmanager
def signalled(run: RunSummary, process: Process, number: int) -> Iterator[int | None]:
    """Send a signal to the launcher; what is handed out is its pidfd, None if it has just ended.

    Raises:
        JobError: it belongs to another user.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        is_there = process.alive()  # else what the descriptor means now may be another process
        try:
            if is_there:
                signal.pidfd_send_signal(descriptor, number)
        except PermissionError:
            raise JobError(
                f"run {run.run_id} (process {process.pid}) belongs to another user"
            ) from None
        except ProcessLookupError:
            is_there = False
        yield descriptor if is_there else None
    finally:
        os.close(descriptor)


def refuse_stopped(run: RunSummary, process: Process) -> None:
    """Say so where a launcher obeys nobody for now.

    Raises:
        HangError: it stands still.
    """
    if process.state in ("T", "t"):
        raise HangError(
            f"run {run.run_id}: process {process.pid} is stopped by a signal or a debugger, and obeys once it goes on: "
            f"kill -CONT {process.pid}"
        )


def limits_of(path: Path) -> LimitsConfig:
    """Those of the job of a run, or the usual ones."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        return LimitsConfig.model_validate(
            json.loads((path / "spec.json").read_bytes())["job"].get("limits", {})
        )
    return LimitsConfig()


def is_saving(path: Path) -> bool:
    """Whether rank 0 says so on its board, where that is on this disk."""
    state = read_first_progress(path / "board")
    return state is not None and state.phase == "save"


def _ends(descriptor: int, path: Path, timeout_s: float | None, *, saves: bool = True) -> bool:
    """Whether the launcher that has this pidfd ends in time; `saves`: it may save first."""
    if timeout_s is not None:
        return _is_gone(descriptor, timeout_s)
    patience = StopDeadline(time.monotonic(), limits_of(path), _CLEANING_S)
    while not patience.is_over(time.monotonic(), saves=saves and is_saving(path)):
        if _is_gone(descriptor, _LOOK_S):
            return True
    return False


def _is_gone(descriptor: int, patience_s: float) -> bool:
    """Whether the process of a pidfd ends in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(patience_s * 1000))
