"""A script under `zrun run`: it joins the launcher's record, and hears of `zrun save`.

    launched = find_launch()     None under torchrun, where the script keeps a record of its own
    launched.board               the page of the flight recorder that the agent of this host reads
    launched.listen()            from here on `zrun save` is heard

Events go as those of a job do: a datagram to the agent of this host, from there to the launcher,
which writes `events.jsonl` and draws the panel.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from zrun_core.library.run_record import Record, Trackers, start_fields
from zrun_core.spine.events import Emitter, EventType
from zrun_core.spine.flight_page import host_file
from zrun_core.spine.script_files import SPEC
from zrun_core.spine.stop_signals import SAVE


@dataclass
class Launch:
    """The launch that this process is a rank of.

    Attributes:
        run_dir: of the launcher.
        telemetry: socket of this host's agent.
        name: of the run.
    """

    run_dir: Path
    telemetry: str
    name: str
    _is_asked: bool = False

    def board(self, first_rank: int) -> Path:
        """Return the file of the flight recorder of the host whose ranks begin with this one."""
        return host_file(self.run_dir, "board", first_rank)

    def listen(self) -> None:
        """Take note of `zrun save`, which signals rank 0. Only the main thread may listen."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(SAVE, self._note)

    def say_where_the_record_is(self, folder: Path) -> None:
        """Say that the folder that the script named for its record is not used."""
        print(
            f"zrun_core: zrun run keeps the record, in {self.run_dir}: "
            f"init(run_dir={str(folder)!r}) is not used",
            file=sys.stderr,
        )

    def take_request(self) -> bool:
        """Return whether a save was asked for since the last call."""
        is_asked, self._is_asked = self._is_asked, False
        return is_asked

    def _note(self, number: int, _: FrameType | None) -> None:
        self._is_asked = True


def find_launch() -> Launch | None:
    """Return the launch of `zrun run` that this process is a rank of; None: there is none."""
    path = os.environ.get(SPEC)
    if path is None:
        return None
    try:
        spec: dict[str, Any] = json.loads(Path(path).read_text())
        launch = Launch(Path(spec["run_dir"]), spec["telemetry"], spec["job"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # It is gone where a process outlives the run that it inherited the variable from.
    return launch if os.path.exists(launch.telemetry) else None


class LaunchedRecord(Record):
    """Sends the events of rank 0 to the launcher."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(None)
        self._launch = launch
        self._emitter = Emitter(launch.telemetry, 0)
        self._began = time.monotonic()
        self._pid = os.getpid()
        atexit.register(self._end)

    def __bool__(self) -> bool:
        return True

    def start(
        self, hosts: Sequence[str], device: torch.device, trackers: Trackers | None = None
    ) -> None:
        """Send the first event of the run, and begin the trackers that the script names."""
        launch = self._launch
        self.emit("start", **start_fields(launch.name, len(hosts), device))
        self._begin_trackers(launch.run_dir, launch.name, len(hosts), device, trackers)

    def emit(self, kind: EventType, **fields: Any) -> None:
        """Send one event."""
        self._emitter.emit(kind, **fields)
        self._feed_trackers(kind)

    def _end(self) -> None:
        """Say that the script ended; of an exception the launcher tells by itself."""
        if os.getpid() != self._pid:
            return
        has_failed = getattr(sys, "last_value", None) is not None
        if not has_failed:
            self.emit("end", reason="the script ended", total_s=time.monotonic() - self._began)
        self._end_trackers(has_failed=has_failed)
        self._emitter.close()
