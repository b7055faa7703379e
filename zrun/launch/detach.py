"""A launcher that outlives its terminal: `zrun train --detach`.

    detached = DetachedLauncher.begin(ui)   # forks: the caller waits in here until a step is done
    ...
    detached.switch_to_log(rundir)          # from the terminal to <run dir>/launcher.log

    zrun train --detach
      |
      +- fork --> launcher, in a session of its own
      |              |
      waits          | "run directory" over a pipe, then launcher.log and events.jsonl
      | <------------+
      exits after the first step, or with the launcher

Errors before the run directory exists are printed on the terminal, as without `--detach`; later
ones are in the log, which the waiting process shows for as long as it waits.
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
_STARTED = b"s"
_READ_BYTES = 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_HIGHEST_DESCRIPTOR = 1 << 30


class DetachedLauncher:
    """The launcher's side: it tells the process that waits for it where its log is."""

    def __init__(self, pipe: int) -> None:
        self._pipe: int | None = pipe  # None: all has been told
        self._has_told = False  # the run directory

    @classmethod
    def begin(cls, ui: Ui) -> Self:
        """Go on in a process with a session of its own. Returns only there.

        The process that was called waits until the first step is done or the launcher has ended,
        and exits. To be called before anything is started that belongs to this process.

        Raises:
            JobError: there will be no terminal for `ui`.
        """
        if ui is Ui.live:
            raise JobError(
                "--ui live needs the terminal, which --detach leaves: choose plain, json or none"
            )
        read_end, write_end = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        launcher = os.fork()
        if launcher != 0:
            os.close(write_end)
            _wait(launcher, read_end)
        os.setsid()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        # Locks and pipes of the shell that called would stay open for days.
        os.closerange(3, write_end)
        os.closerange(write_end + 1, _HIGHEST_DESCRIPTOR)
        return cls(write_end)

    def switch_to_log(self, rundir: RunDir, *, is_script: bool = False) -> None:
        """Write to the log of the run directory from now on.

        To be called again when a restart has moved that away.

        Args:
            is_script: the run makes no steps: the process that waits does so for `has_started`.

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
        if self._pipe is None:
            return
        if self._has_told:
            return
        self._has_told = True
        place = {
            "path": str(rundir.path),
            "events": rundir.first_event,
            "is_script": is_script,
        }
        with suppress(OSError):  # the other process has exited
            os.write(self._pipe, json.dumps(place).encode() + b"\n")
        if not is_script:
            os.close(self._pipe)
            self._pipe = None

    def has_started(self) -> None:
        """Say that the ranks of a script have been started, unless that was said."""
        if self._pipe is None:
            return
        with suppress(OSError):  # the other process has exited
            os.write(self._pipe, _STARTED)
        os.close(self._pipe)
        self._pipe = None


def _wait(launcher: int, pipe: int) -> NoReturn:
    """Show what the launcher writes until a step is done, then exit; else exit with its code.

    Signals are passed on to the launcher meanwhile; it tells the run directory on `pipe`.
    """
    os.set_blocking(pipe, False)
    told = b""
    run: _WatchedRun | None = None
    with _passed_on(launcher):
        while True:
            # Asked before its files are read: nothing comes after its end.
            ended, status = os.waitpid(launcher, os.WNOHANG)
            if run is None:
                with suppress(BlockingIOError):
                    told += os.read(pipe, _READ_BYTES)
                line, newline, rest = told.partition(b"\n")
                if newline:
                    run = _WatchedRun(**json.loads(line), pipe=pipe, has_started=bool(rest))
                    name = Path(run.path).name
                    notify(f"run {name}: waiting for {run.awaited}; until then Ctrl-C ends it")
            if run is not None:
                run.show_log()
            if ended:
                code = os.waitstatus_to_exitcode(status)
                sys.exit(code if code >= 0 else 128 - code)
            if run is not None and run.is_under_way():
                break
            time.sleep(_TURN_S)
    print(_farewell(run, launcher), flush=True)
    sys.exit(0)


class _WatchedRun:
    """A run directory, as the waiting process follows it."""

    def __init__(
        self, path: str, events: int, is_script: bool, pipe: int, has_started: bool
    ) -> None:
        self.path = path
        self.awaited = "its ranks to start" if is_script else "its first step"
        self.does = "is running" if is_script else "is training"
        self._is_script = is_script
        self._pipe = pipe
        self._has_started = has_started
        self._events = FileTail(Path(path) / "events.jsonl", events)  # from this launch on
        self._log = FileTail(Path(path) / LOG)

    def show_log(self) -> None:
        """Copy what is new in the log to stderr."""
        data = self._log.read()
        with suppress(OSError):  # the terminal is gone
            sys.stderr.buffer.write(data)
            sys.stderr.flush()

    def is_under_way(self) -> bool:
        """Return whether a step is done, or the run has ended: there may be none left to make."""
        if self._is_script:
            with suppress(BlockingIOError):
                if os.read(self._pipe, 1) == _STARTED:
                    self._has_started = True
            return self._has_started
        kinds = [json.loads(line).get("type") for line in self._events.lines()]
        return "step" in kinds or "end" in kinds


def _farewell(watched: _WatchedRun, launcher: int) -> str:
    path = Path(watched.path)
    run = reference(path)
    return (
        f"run {path.name} {watched.does} in the background: process {launcher}\n"
        f"  in {path}\n"
        f"  follow it: zrun logs {run} -r launcher -f\n"
        f"  stop it:   zrun stop {run}\n"
        f"  see it:    zrun ps"
    )


@contextmanager
def _passed_on(launcher: int) -> Iterator[None]:
    """Pass on what asks this process to end: until a step is done the launcher ends with it.

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
