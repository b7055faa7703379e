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
_READ_BYTES = 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_HIGHEST_DESCRIPTOR = 1 << 30


class DetachedLauncher:
    """The launcher's side: it tells the process that waits for it where its log is."""

    def __init__(self, pipe: int) -> None:
        self._pipe: int | None = pipe  # None: the run directory has been told

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

    def switch_to_log(self, rundir: RunDir) -> None:
        """Write to the log of the run directory from now on.

        To be called again when a restart has moved that away.

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
        place = json.dumps({"path": str(rundir.path), "events": rundir.first_event})
        with suppress(OSError):  # the other process has exited
            os.write(self._pipe, place.encode() + b"\n")
        os.close(self._pipe)
        self._pipe = None


def _wait(launcher: int, pipe: int) -> NoReturn:
    """Show what the launcher writes until a step is done, then exit; else exit with its code.

    Args:
        launcher: its process, to which signals are passed on meanwhile.
        pipe: on which it tells the run directory.
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
                if told.endswith(b"\n"):
                    run = _WatchedRun(**json.loads(told))
                    name = Path(run.path).name
                    notify(f"run {name}: waiting for its first step; until then Ctrl-C ends it")
            if run is not None:
                run.show_log()
            if ended:
                code = os.waitstatus_to_exitcode(status)
                sys.exit(code if code >= 0 else 128 - code)
            if run is not None and run.has_made_step():
                break
            time.sleep(_TURN_S)
    print(_farewell(Path(run.path), launcher), flush=True)
    sys.exit(0)


class _WatchedRun:
    """A run directory, as the waiting process follows it."""

    def __init__(self, path: str, events: int) -> None:
        self.path = path
        self._events = FileTail(Path(path) / "events.jsonl", events)
        self._log = FileTail(Path(path) / LOG)

    def show_log(self) -> None:
        """Copy what is new in the log to stderr."""
        data = self._log.read()
        with suppress(OSError):  # the terminal is gone
            sys.stderr.buffer.write(data)
            sys.stderr.flush()

    def has_made_step(self) -> bool:
        """Return whether a step is done, or the run has ended: there may be none left to make."""
        kinds = [json.loads(line).get("type") for line in self._events.lines()]
        return "step" in kinds or "end" in kinds


def _farewell(path: Path, launcher: int) -> str:
    run = reference(path)
    return (
        f"run {path.name} is training in the background: process {launcher}\n"
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
