"""Errors that a user can act on, each with the exit code of the contract.

A `ZrunError` says what is wrong, where, and what to do next, in one or a few lines. It is caught
once, at the edge of a process (the CLI, a worker), printed without a traceback, and its `exit_code`
becomes the process's. Anything else that escapes is a bug of ours or an exception of the user's own
code.
"""

from __future__ import annotations

import re
from enum import IntEnum

# Messages of gloo, NCCL and sockets when another rank went away.
PEER_IS_GONE = re.compile(
    r"connection (closed|reset|refused|was (broken|aborted))|broken pipe"
    r"|socket (was )?closed|pair closure"
    r"|timed out waiting|(recv|send)value failed|ncclRemoteError|remote process (exited|closed)"
    r"|caught collective operation timeout|NCCL communicator was aborted",
    re.IGNORECASE,
)

# Python's message when the kernel gives a process no more threads.
_NO_THREAD = "can't start new thread"


class ExitCode(IntEnum):
    """The exit status of a zrun process."""

    OK = 0
    USAGE = 2  # bad command line, job file or host file
    PREFLIGHT = 3  # a check before the start failed, or the job does not fit
    RENDEZVOUS = 4  # not every rank arrived in time
    WORKER = 5  # a worker failed
    HANG = 6  # no progress, or a host was lost
    NUMERIC = 7  # the numbers went wrong
    SAVE = 8  # a checkpoint was not saved
    CHECKPOINT = 9  # no checkpoint, or none that can be believed
    DIVERGED = 10  # replicas that must be equal are not
    DIFFERS = 11  # a job trains something else than a plain loop
    STOPPED = 75  # stopped on request, resumable
    INTERRUPTED = 130  # SIGINT before saving
    TERMINATED = 143  # SIGTERM before saving


class ZrunError(Exception):
    """Base of every error that is shown to a user as text; `exit_code` is the exit status."""

    exit_code: ExitCode = ExitCode.WORKER


class JobError(ZrunError):
    """The command line, the job file or an argument of the library is wrong.

    Attributes:
        problem: the message without the key of the job that it may begin with. A loop of the
            user's own has no job, and says its own argument instead.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, problem: str, *, key: str = "") -> None:
        super().__init__(f"{key}: {problem}" if key else problem)
        self.problem = problem


class PreflightError(ZrunError):
    """The job is well formed, but this machine cannot run it as asked."""

    exit_code = ExitCode.PREFLIGHT


class RendezvousError(ZrunError):
    """Not every rank arrived in time."""

    exit_code = ExitCode.RENDEZVOUS


class UserCodeError(ZrunError):
    """The user's code raised, or returned something unusable; the message ends with a traceback."""

    exit_code = ExitCode.WORKER


class PeerError(ZrunError):
    """Another rank failed, and says why itself."""

    exit_code = ExitCode.WORKER


class HangError(ZrunError):
    """Ranks wait for each other."""

    exit_code = ExitCode.HANG


class NumericError(ZrunError):
    """The numbers went wrong: every step overflows, or the loss is not finite."""

    exit_code = ExitCode.NUMERIC


class SaveError(ZrunError):
    """A checkpoint was not saved; the one before it stays what it was."""

    exit_code = ExitCode.SAVE


class CheckpointError(ZrunError):
    """There is no checkpoint, or it is damaged, or it does not fit."""

    exit_code = ExitCode.CHECKPOINT


class DivergedError(ZrunError):
    """Ranks hold different values of what must be equal."""

    exit_code = ExitCode.DIVERGED


class DiffersError(ZrunError):
    """A model trains something else than a plain one."""

    exit_code = ExitCode.DIFFERS


class OutOfMemoryError(ZrunError):
    """A rank ran out of memory."""

    exit_code = ExitCode.WORKER


class OffloadError(ZrunError):
    """States that live elsewhere than on the device cannot be moved: a full or broken disk."""

    exit_code = ExitCode.WORKER


class StoppedError(ZrunError):
    """The run ends because a signal asked for it, between two steps."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def lack_of_threads(error: BaseException) -> PreflightError | None:
    """Return the error to raise if `error` is that no thread could be started; None if not."""
    if not isinstance(error, RuntimeError) or _NO_THREAD not in str(error):
        return None
    return PreflightError(
        "no thread could be started: this user, or this control group, has as many processes and "
        "threads as it may (ulimit -u, pids.max): end some, or raise the limit"
    )
