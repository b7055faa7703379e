"""A launcher that outlives its terminal: `zrun train --detach`.

    detached = DetachedLauncher.begin(ui)        # forks: the process that was called stays in here, until a step is done
    ...
    detached.switch_to_log(rundir)           # its terminal is given up for <run dir>/launcher.log

What goes wrong before the run directory is there is told on the terminal, as without `--detach`; what comes after it is
in the log, and shown by the waiting process for as long as that waits.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self

from zrun.runs.listing import reference
from zrun.runs.rundir import LOG, RunDir
from zrun.system.output import notify
from zrun.system.tail_file import FileTail
from zrun.watch.ui import Ui
from zrun_core.errors import JobError, ZrunError

_TURN_S = 0.05
_READ_BYTES = 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_HIGHEST_DESCRIPTOR = 1 << 30


class DetachedLauncher:
    """What the launcher owes to the process that waits for it."""

    def __init__(self, told: int) -> None:
        self._told: int | None = told

    @classmethod
    def begin(cls, ui: Ui) -> Self:
        """Go on in a process with a session of its own.

        Returns only there. The process that was called waits until the first step is done or the launcher has ended,
        and exits. To be called before anything is started that belongs to this process.

        Raises:
            JobError: there will be no terminal for `ui`.
        """
        if ui is Ui.live:
            raise JobError(
                "--ui live draws on a terminal, and --detach leaves it: take plain, json or none"
            )
        heard, told = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        launcher = os.fork()
        if launcher != 0:
            os.close(told)
            _wait(launcher, heard)
        os.setsid()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        # Locks and pipes of the shell that called would stay open for days.
        os.closerange(3, told)
        os.closerange(told + 1, _HIGHEST_DESCRIPTOR)
        return cls(told)

    def switch_to_log(self, rundir: RunDir) -> None:
        """Write to the log of the run directory from now on. To be called again when a restart has moved it away.

        Raises:
            ZrunError: it cannot be made.
        """
        try:
            log = os.open(
                rundir.path / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise ZrunError(f"{rundir.path / LOG}: {error.strerror}") from None
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        if self._told is None:
            return
        with suppress(OSError):  # nobody waits any more
            os.write(
                self._told,
                json.dumps({"path": str(rundir.path), "events": rundir.first_event}).encode()
                + b"\n",
            )
        os.close(self._told)
        self._told = None


def _wait(launcher: int, heard: int) -> NoReturn:
    """Pass signals on, show what the launcher writes, and exit once a step is done, or with the launcher's code."""
    os.set_blocking(heard, False)
    told, place = b"", None
    with _passed_on(launcher):
        while True:
            ended, status = os.waitpid(
                launcher, os.WNOHANG
            )  # before its files are read: nothing comes after
            if place is None:
                with suppress(BlockingIOError):
                    told += os.read(heard, _READ_BYTES)
                if told.endswith(b"\n"):
                    place = _Place(**json.loads(told))
                    notify(
                        f"run {Path(place.path).name}: waiting for its first step; until then Ctrl-C ends it"
                    )
            if place is not None:
                place.show_log()
            if ended:
                code = os.waitstatus_to_exitcode(status)
                sys.exit(code if code >= 0 else 128 - code)
            if place is not None and place.has_made_a_step():
                break
            time.sleep(_TURN_S)
    print(_farewell(Path(place.path), launcher), flush=True)
    sys.exit(0)


class _Place:
    """The run directory, as the waiting process follows it."""

    def __init__(self, path: str, events: int) -> None:
        self.path = path
        self._events = FileTail(Path(path) / "events.jsonl", events)
        self._log = FileTail(Path(path) / LOG)

    def show_log(self) -> None:
        """Copy what is new to stderr."""
        data = self._log.read()
        with suppress(OSError):  # the terminal is gone
            sys.stderr.buffer.write(data)
            sys.stderr.flush()

    def has_made_a_step(self) -> bool:
        """Whether rank 0 has said so; a run that goes on after its last step has none to make."""
        return any(json.loads(line).get("type") in ("step", "end") for line in self._events.lines())


def _farewell(path: Path, launcher: int) -> str:
    run = reference(path)
    return (
        f"run {path.name} trains, and goes on without this terminal: process {launcher}\n"
        f"  in {path}\n"
        f"  follow it: zrun logs {run} -r launcher -f\n"
        f"  stop it:   zrun stop {run}\n"
        f"  see it:    zrun ps"
    )


@contextmanager
def _passed_on(launcher: int) -> Iterator[None]:
    """Hand what asks this process to end to the launcher: it is not on its own yet.

    A closing terminal ends this process only.
    """

    descriptor = os.pidfd_open(launcher)

    def pass_on(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)

    before = [signal.signal(number, pass_on) for number in _SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler)
        os.close(descriptor)
