"""Ask the launcher of a run for a profile, and wait until the traces are written.

The request lies in the run directory, and a signal tells the launcher to read it. From there it
goes the way of `zrun save`. The answer is in the run's record: a `profile` event of each rank that
was traced, or a warning that says why there is none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from zrun.launch.stop_request import launcher_of, refuse_stopped, signalled
from zrun.runs.listing import RunStatus, RunSummary, is_script, parse_events, read_run
from zrun.runs.run_lock import is_held
from zrun.system.tail_file import FileTail
from zrun_core.errors import HangError, JobError, PreflightError, SaveError
from zrun_core.spine.events import Event
from zrun_core.spine.profile_request import ProfileRequest
from zrun_core.spine.sections.profile import refuse_too_many, why_no_ranks
from zrun_core.spine.stop_signals import PROFILE

_TURN_S = 0.05


class NotProfiledError(JobError):
    """The run does not take the profile, and says why."""


class RunEndedError(SaveError):
    """The run ended before it was profiled."""

    def __init__(self, run: RunSummary) -> None:
        self.run = run
        message = f"not profiled: run {run.run_id} {run.state}"
        if run.step:
            message += f" after step {run.step}"
        if run.state is RunStatus.FAILED:
            message += f" (exit code {run.exit_code}): {run.headline}"
        super().__init__(message)


def check(run: RunSummary, steps: int, ranks: Sequence[int]) -> None:
    """Check that the run can be asked.

    Raises:
        JobError: it does not run, has no such ranks, or not so many steps.
        PreflightError: its launcher cannot be reached from here, or no rank trains yet.
    """
    if run.state is not RunStatus.RUNNING:
        raise JobError(
            f"run {run.run_id} is not running: it {run.state}; for the next run write "
            "profile: {steps: [10, 12]} in the job"
        )
    try:
        refuse_too_many(steps)
    except ValueError as error:
        raise JobError(f"--steps {steps}: {error}") from None
    if run.ranks is not None and (why := why_no_ranks(ranks, run.ranks)) is not None:
        raise JobError(f"--ranks: {why}; write --ranks 0")
    left = None if run.total_steps is None else run.total_steps - (run.step or 0)
    if left is not None and steps > left:
        raise JobError(
            f"--steps {steps}: run {run.run_id} is at step {run.step or 0} of {run.total_steps}: "
            f"ask for {left} or fewer"
        )
    if is_script(run.path):
        raise JobError(
            f"run {run.run_id} is of a script, which zrun cannot profile: call torch.profiler in it"
        )
    if run.seconds is None or not launcher_of(run, "profile").catches(PROFILE):
        raise PreflightError(
            f"run {run.run_id} has not started to train, so there is nothing to profile: try "
            "again later"
        )


def profile(run: RunSummary, steps: int, ranks: Sequence[int], timeout_s: float) -> list[Event]:
    """Ask a running run for a profile, and wait for it.

    Args:
        steps: number of the next steps, which are traced.

    Returns:
        The `profile` event of each rank, in their order.

    Raises:
        JobError: as `check`; it belongs to another user; or it does not take the profile.
        PreflightError: as `check`.
        RunEndedError: the run ended before.
        HangError: it has not been profiled after `timeout_s` seconds.
    """
    check(run, steps, ranks)
    record = FileTail.from_now_on(run.path / "events.jsonl")
    request = ProfileRequest.new(steps, tuple(ranks))
    _ask(run, request)
    found: dict[int, Event] = {}
    deadline = time.monotonic() + timeout_s
    while True:
        runs_on = is_held(run.path)  # asked first: nothing comes after
        for event in parse_events(record.lines()):
            match event.get("type"):
                case "profile" if event.get("request") == request.id:
                    found[event["rank"]] = event
                case "warning" if event.get("unprofiled") == request.id:
                    raise NotProfiledError(str(event["message"]))
                case "start":  # a restart: the attempt before took the request with it
                    _ask(run, request)
        if found.keys() >= set(ranks):
            return [found[rank] for rank in ranks]
        if not runs_on:
            raise RunEndedError(read_run(run.path))
        if time.monotonic() > deadline:
            refuse_stopped(run, launcher_of(run, "profile"))
            raise HangError(
                f"run {run.run_id} was not profiled within {timeout_s:g} s; it may still be: wait "
                f"with a longer --timeout, or look at {run.path}/profile"
            )
        time.sleep(_TURN_S)


def _ask(run: RunSummary, request: ProfileRequest) -> None:
    """Leave the request, and signal the launcher, unless the signal would end it.

    Raises:
        JobError: the request cannot be written.
    """
    process = launcher_of(run, "profile")
    if not process.catches(PROFILE):
        return
    try:
        request.write(run.path)
    except OSError as error:
        raise JobError(f"{run.path}/profile cannot be written: {error.strerror}") from None
    with signalled(run, process, PROFILE):
        pass
