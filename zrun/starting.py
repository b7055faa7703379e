"""What the commands that start ranks share: their end by a signal, and what only they could do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from zrun_core.errors import JobError, StoppedError

if TYPE_CHECKING:
    from zrun.hosts.backend import Backend
    from zrun_core.spine.config import JobConfig


@contextmanager
def stopped_in_words() -> Iterator[None]:
    """Turn a stop by a signal into one line and the exit code."""
    try:
        yield
    except StoppedError as error:
        from zrun.system.output import say

        say(str(error), sys.stderr)
        raise typer.Exit(error.exit_code) from None


def refuse_joined(
    job: JobConfig, backend: Backend, dry_run: bool, detach: bool, command: str
) -> None:
    """Refuse what only the launcher that started this process could do.

    Args:
        backend: which says what started this process.
        command: that was called, as in "zrun train".

    Raises:
        JobError: one of these is asked for.
    """
    if job.restarts:
        asked = "restarts"
        again = ", with --resume auto" if command == "zrun train" else ""
        instead = f"leave it out, and let that launcher start all of them again{again}"
    elif detach:
        asked = "--detach"
        instead = "leave it out, and put that launcher in the background instead"
    elif dry_run:
        asked = "--dry-run"
        instead = f"call {command} --dry-run once, by itself"
    else:
        return
    raise JobError(f"{asked}: another launcher started this process ({backend.why}): {instead}")
