"""The trackers of a launch, as its launcher sees them: a process that it never waits for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from zrun_core.spine.events import Event

_END_S = 20.0  # that trackers get for what they have not been fed


class TrackerProcess:
    """Feeds trackers from the record of a run, beside the launcher: see `zrun/trackers/main.py`."""

    def __init__(
        self,
        kinds: Sequence[str],
        folder: Path,
        *,
        project: str,
        config: Mapping[str, Any],
        args: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Start it.

        Args:
            kinds: of `KINDS`.
            project, config, args: as of `Feed`.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "zrun.trackers.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the launcher, which says when all is over
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._rest = b""
        self._is_missed = False
        asked = {"kinds": list(kinds), "folder": str(folder), "project": project}
        self._say(json.dumps(asked | {"config": config, "args": args}))

    def turn(self, emit: Callable[[Event], None]) -> None:
        """Pass on what there is to say about trackers."""
        for text in self._heard():
            emit({"type": "warning", "time": time.time(), "rank": 0, "message": text})
        if self._process.poll() is not None and not self._is_missed:
            self._is_missed = True
            text = f"log.to: the process of the trackers ended ({self._process.returncode})"
            emit({"type": "warning", "time": time.time(), "rank": 0, "message": text})

    def end(self, state: str) -> list[str]:
        """End the trackers, and wait a while for them; return what there is to say.

        Args:
            state: "finished" or "failed".
        """
        self._say(state)
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            late = f"log.to: the trackers did not end within {_END_S:.0f} s, and were ended"
            return [*self._heard(), f"{late}; zrun train --resume goes on where they were"]
        return self._heard()

    def _say(self, line: str) -> None:
        with suppress(OSError):  # it has ended: `turn` tells
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _heard(self) -> list[str]:
        """Return the lines that it has said since the last call."""
        assert self._process.stdout is not None
        with suppress(OSError):
            self._rest += self._process.stdout.read() or b""
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode(errors="replace") for line in lines]
