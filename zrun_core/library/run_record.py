"""The run directory of a user's own loop, as `zrun ps` and `zrun logs` read it; rank 0 writes it.

.lock           held for as long as the process lives; says which one it is
job.yaml        the name
plan.json       which rank is where
events.jsonl    start, a step for each update, metrics, save, warning, end: docs/events.md
failure.json    the exception that ended the script, if one did
exit.json       the exit code
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from zrun_core.errors import JobError
from zrun_core.library.out_of_memory import ModelsHeld
from zrun_core.spine.events import Event, EventType, encode
from zrun_core.spine.folders import make_private
from zrun_core.spine.releases import own_release
from zrun_core.spine.tracker_process import TrackerProcess
from zrun_core.telemetry.recorder import checked_name

Trackers = dict[str, dict[str, Any]]  # their arguments, by name

_UNCAUGHT = 1  # Python's exit code of an exception


class Record:
    """Writes events to a run directory; without one, nothing.

    Attributes:
        models: that tell what holds memory, where the script ends for want of that.
    """

    def __init__(self, folder: Path | None) -> None:
        """Make the directory, or go on in it.

        Raises:
            JobError: another process writes there, it holds other files, or it cannot be made.
        """
        self._file = -1
        self._folder = folder
        self._trackers: TrackerProcess | None = None
        self.models: ModelsHeld | None = None
        if folder is None:
            return
        try:
            make_private(folder)
            if any(folder.iterdir()) and not (folder / "events.jsonl").exists():
                raise JobError(
                    f"init(run_dir={str(folder)!r}): there are other files in it: name a new folder"
                )
            flags = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(folder / ".lock", os.O_RDWR | flags, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = os.open(folder / "events.jsonl", os.O_WRONLY | os.O_APPEND | flags, 0o600)
        except BlockingIOError:
            raise JobError(
                f"init(run_dir={str(folder)!r}): another process writes there: name a new folder"
            ) from None
        except OSError as error:
            raise JobError(
                f"init(run_dir={str(folder)!r}): {error.strerror}: name another folder"
            ) from None
        for name in ("failure.json", "exit.json"):  # of an earlier process
            (folder / name).unlink(missing_ok=True)
        self._write_holder()
        self._pid = os.getpid()
        atexit.register(self._end)

    def __bool__(self) -> bool:
        return self._folder is not None

    def start(
        self, hosts: Sequence[str], device: torch.device, trackers: Trackers | None = None
    ) -> None:
        """Write the names and the first event of the run, and begin its trackers.

        Args:
            hosts: of the ranks.
            device: of this one.
            trackers: that read the record.
        """
        if self._folder is None:
            return
        name = self._folder.parent.name
        places = [
            {"rank": rank, "host": host, "device": str(device)} for rank, host in enumerate(hosts)
        ]
        self._write("job.yaml", f"name: {json.dumps(name)}\ncheckpoint: null\n")
        self._write("plan.json", json.dumps({"ranks": places}, indent=1))
        self.emit("start", **start_fields(name, len(hosts), device))
        self._begin_trackers(self._folder, name, len(hosts), device, trackers)

    def _begin_trackers(
        self,
        folder: Path,
        name: str,
        world_size: int,
        device: torch.device,
        trackers: Trackers | None,
    ) -> None:
        """Begin the trackers, if there are some.

        They read the `events.jsonl` of `folder`.
        """
        if not trackers:
            return
        config = {"script": sys.argv[0], "ranks": world_size, "device": str(device)}
        try:
            self._trackers = TrackerProcess(
                list(trackers), folder, project=name, config=config, args=trackers
            )
        except OSError as error:
            print(f"zrun_core: the trackers cannot be started: {error}", file=sys.stderr)

    def _feed_trackers(self, kind: EventType) -> None:
        if kind == "step" and self._trackers is not None:
            self._trackers.turn(self._pass_on)

    def _end_trackers(self, *, has_failed: bool) -> None:
        if self._trackers is not None:
            for note in self._trackers.end("failed" if has_failed else "finished"):
                print(f"zrun_core: {note}", file=sys.stderr)

    def emit(self, kind: EventType, **fields: Any) -> None:
        """Add one event at once. A full disk ends the record, and not the training."""
        if self._file < 0:
            return
        line = encode({"type": kind, "time": time.time(), "rank": 0, **fields}) + b"\n"
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(None, "the disk is full")
        except OSError as error:
            self._file = -1
            print(
                f"zrun_core: {self._folder}/events.jsonl ends here: {error.strerror}",
                file=sys.stderr,
            )
        self._feed_trackers(kind)

    def _pass_on(self, event: Event) -> None:
        """Say what there is to say of trackers."""
        print(f"zrun_core: {event['message']}", file=sys.stderr)
        self.emit("warning", message=event["message"])

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers of the user's own.

        Raises:
            JobError: a name is not one.
        """
        try:
            for name in values:
                checked_name(name)
        except ValueError as error:
            raise JobError(f"metric(): {error}") from None
        self.emit("metrics", step=step, hook="script", values=dict(values))

    def _write_holder(self) -> None:
        assert self._folder is not None
        boot = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "boot": boot,
            "started": 0,
            "time": time.time(),
            "events": os.fstat(self._file).st_size,
        }
        record = json.dumps(holder).encode()
        os.pwrite(self._lock, record, 0)
        os.ftruncate(self._lock, len(record))

    def _end(self) -> None:
        """Say how the script ended. Python calls it last, after the user's own code."""
        if self._file < 0 or os.getpid() != self._pid:
            return
        error: BaseException | None = getattr(sys, "last_value", None)
        if error is None:
            self.emit("end", reason="the script ended")
        else:
            held = None if self.models is None else self.models.at_end
            failure = {
                "rank": 0,
                "kind": "user",
                "message": f"{type(error).__name__}: {error}",
                "traceback": "".join(traceback.format_exception(error)),
                "held": None if held is None else held.to_json(),
                "exit_code": _UNCAUGHT,
                "time": time.time(),
            }
            self._write("failure.json", json.dumps(failure, indent=1))
        self._end_trackers(has_failed=error is not None)
        code = _UNCAUGHT if error is not None else 0
        self._write("exit.json", json.dumps({"exit_code": code, "time": time.time()}))

    def _write(self, name: str, text: str) -> None:
        assert self._folder is not None
        with (
            suppress(OSError),
            open(self._folder / name, "w", encoding="utf-8", opener=_private) as file,
        ):
            file.write(text + "\n")


def start_fields(name: str, world_size: int, device: torch.device) -> dict[str, Any]:
    """Return the fields of the `start` event of a script."""
    return {
        "job": name,
        "world_size": world_size,
        "device": str(device),
        "total_steps": None,
        "versions": {
            "zrun": own_release(),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
        "notes": [],
        "resumed": None,
    }


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
