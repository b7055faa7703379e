"""Note of a rank's failure, `failures/rank-N.json`: the launcher tells from it why a run failed."""

from __future__ import annotations

import sys
from pathlib import Path

from zrun_core.errors import (
    ExitCode,
    OutOfMemoryError,
    PeerError,
    UserCodeError,
    ZrunError,
    lack_of_threads,
)
from zrun_core.spine import tracebacks
from zrun_core.spine.failure_files import TOLD_CHARS, write_note
from zrun_core.spine.held_memory import HeldMemory
from zrun_core.train.trainer import Trainer
from zrun_core.user_code import user

_KINDS: dict[type[BaseException], str] = {UserCodeError: "user", PeerError: "peer"}


def report(
    error: BaseException, run_dir: Path, rank: int, phase: str, trainer: Trainer | None
) -> ExitCode:
    """Write the note of a failure, and print it to the rank's log.

    Args:
        trainer: None: it failed before there was one.

    Returns:
        The exit code of the process.
    """
    error = in_users_terms(error, phase)
    cause: BaseException | None = None  # in the user's code, with a traceback of its own
    if isinstance(error, ZrunError):
        kind = _KINDS.get(type(error), "zrun")
        code = error.exit_code
        text = str(error)
        cause = error.__cause__
    else:
        kind = "bug"
        code = ExitCode.WORKER
        text = tracebacks.full_traceback(error, TOLD_CHARS)
    held: HeldMemory | None = None
    if isinstance(error, OutOfMemoryError) and trainer is not None:
        held = trainer.memory.explain(error, rank)
    if held is not None:
        text = "\n".join([f"{text}. What holds most:", *held.lines()])
    write_note(
        run_dir,
        rank,
        step=0 if trainer is None else trainer.progress.steps,
        phase=phase,
        kind=kind,
        type=type(error).__name__,
        message=_in_a_line(error),
        traceback=text,
        whole_traceback=None if cause is None else tracebacks.full_traceback(cause, TOLD_CHARS),
        held=None if held is None else held.to_json(),
        exit_code=int(code),
    )
    if cause is not None:
        print(tracebacks.full_traceback(cause), end="\n\n", file=sys.stderr)
        if kind == "user":  # its traceback was printed just now
            text = text.splitlines()[0]
    print(text, file=sys.stderr, flush=True)
    return code


def _in_a_line(error: BaseException) -> str:
    """Return what went wrong, without the place: of the user's exception, its last line."""
    if not isinstance(error, ZrunError):
        return f"{type(error).__name__}: {tracebacks.first_line(error)}"
    first, *rest = str(error).splitlines()
    if rest and isinstance(error, UserCodeError):
        return f"{first}: {rest[-1].strip()}"
    return first


def in_users_terms(error: BaseException, phase: str) -> BaseException:
    """Return the `ZrunError` of an exception that is no bug of the runtime; else the exception."""
    if isinstance(error, ZrunError):
        return error
    told: ZrunError | None
    if user.is_out_of_memory(error):
        place = tracebacks.raised_at(error)
        where = f" at {place}" if place is not None else ""
        why = tracebacks.first_line(error)
        told = OutOfMemoryError(f"{phase} failed{where}: out of memory: {why}")
    elif user.is_loaders_end(error):
        told = UserCodeError(f"{phase} failed: {user.LOADERS_END}\n{tracebacks.first_line(error)}")
    elif isinstance(error, KeyboardInterrupt):  # no signal raises one here: the user's code did
        told = UserCodeError(f"{phase} failed\n{tracebacks.user_traceback(error)}")
    else:
        told = lack_of_threads(error)
    if told is None:
        return error
    told.__cause__ = error
    return told
