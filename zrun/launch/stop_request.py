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
from zrun_core.spine.flight_page import read_first_progress
from zrun_core.spine.sections.guards import LimitsConfig

_CLEANING_S = 30.0  # that a launcher may take for the rest, once the workers had their time
_LOOK_S = 1.0  # between two looks at whether it saves


def launcher_of(run: RunSummary, what: str = "stop") -> Process:
    """Return the launcher of a running run.

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
            f"run {run.run_id} belongs to a launcher on {holder.host} (process {holder.pid}): "
            f"{what} it there, with ssh {holder.host} zrun {what} {run.path}"
        )
    process = holder.process
    if process is None:
        raise PreflightError(
            f"run {run.run_id} belongs to process {holder.pid}, which cannot be seen from here: "
            f"{what} it in the container that it was started in"
        )
    return process


def stop(run: RunSummary, now: bool, timeout_s: float | None = None) -> None:
    """Signal the launcher of a running run, and wait until it has exited.

    Args:
        now: end the workers at once; else they finish the step, and save.
        timeout_s: seconds to wait; None: as long as the launcher itself does, and half a minute
            more.

    Raises:
        PreflightError: the launcher cannot be reached from here.
        JobError: it belongs to another user.
        HangError: it still runs when the time is over.
    """
    process = launcher_of(run)
    number = STOP_NOW if now else signal.SIGTERM
    with signalled(run, process, number) as descriptor:
        start = time.monotonic()
        if descriptor is None or wait_for_exit(descriptor, run.path, timeout_s, saves=not now):
            return
    refuse_stopped(run, process)
    waited_s = time.monotonic() - start
    advice = f"wait with a longer --timeout, or zrun stop {run.run_id} --now"
    if now:
        advice = f"look at {run.path}/logs"
    raise HangError(
        f"run {run.run_id} was told to stop and still runs after {waited_s:.0f} s "
        f"(process {process.pid}): {advice}"
    )


@contextmanager
def signalled(run: RunSummary, process: Process, number: int) -> Iterator[int | None]:
    """Send a signal to the launcher. Yields its pidfd; None if it has just ended.

    Raises:
        JobError: it belongs to another user.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        is_alive = process.alive()  # else the descriptor may be of a later process
        try:
            if is_alive:
                signal.pidfd_send_signal(descriptor, number)
        except PermissionError:
            raise JobError(
                f"run {run.run_id} (process {process.pid}) belongs to another user"
            ) from None
        except ProcessLookupError:
            is_alive = False
        yield descriptor if is_alive else None
    finally:
        os.close(descriptor)


def refuse_stopped(run: RunSummary, process: Process) -> None:
    """Refuse a launcher that is stopped, and so obeys no request for now.

    Raises:
        HangError: it is.
    """
    if process.state in ("T", "t"):
        raise HangError(
            f"run {run.run_id}: process {process.pid} is suspended by a signal or a debugger, and "
            f"cannot react: kill -CONT {process.pid} lets it continue"
        )


def limits_of(path: Path) -> LimitsConfig:
    """Return the limits of the job of a run; the usual ones if they cannot be read."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        spec = json.loads((path / "spec.json").read_bytes())
        return LimitsConfig.model_validate(spec["job"].get("limits", {}))
    return LimitsConfig()


def is_saving(path: Path) -> bool:
    """Return whether rank 0 is saving, by its flight recorder if that is on this disk."""
    state = read_first_progress(path / "board")
    return state is not None and state.phase == "save"


def wait_for_exit(
    descriptor: int, path: Path, timeout_s: float | None, *, saves: bool = True
) -> bool:
    """Return whether a launcher exits in time.

    Args:
        descriptor: its pidfd.
        timeout_s: seconds to wait; None: as long as the launcher itself waits for its workers.
        saves: the launcher may save first, which takes a time of its own.
    """
    if timeout_s is not None:
        return _exits(descriptor, timeout_s)
    deadline = StopDeadline(time.monotonic(), limits_of(path), _CLEANING_S)
    while not deadline.is_over(time.monotonic(), saves=saves and is_saving(path)):
        if _exits(descriptor, _LOOK_S):
            return True
    return False


def _exits(descriptor: int, patience_s: float) -> bool:
    """Return whether the process of a pidfd exits in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(patience_s * 1000))
