"""The agent of this machine, as a child of the launcher."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self

from zrun.launch.frames import Frame, Lines, Start, Stop, pack

_READ_BYTES = 1 << 18
_PATIENCE_S = 10.0  # for an agent that was told to end; it gives its workers half of that


class LocalAgent:
    """An agent that is already there when it is told what to run.

    It must be created by the main thread: the kernel ends it with the thread that started it.
    """

    def __init__(self) -> None:
        # -P: a json.py or types.py in the working directory is not meant for the agent. A session of its own: ctrl-C
        # in the terminal reaches the launcher only.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "zrun.launch.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        self._lines = Lines()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._started = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, start: Start) -> None:
        """Run the workers."""
        self._started = True
        self._tell(start.pack())

    def stop(self, how: Stop) -> None:
        """Ask the workers to end."""
        self._tell(pack({"stop": how}))

    def frames(self, patience_s: float) -> list[Frame] | None:
        """What the agent said within `patience_s` seconds; None when it has ended."""
        if not self._selector.select(patience_s):
            return []
        data = os.read(self._output, _READ_BYTES)
        return self._lines.feed(data) if data else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the agent and, through it, every worker."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # the lifeline
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._selector.close()
        if not self._started:
            self._process.kill()  # it has nothing to clean up
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `frames` reports its end
            self._process.stdin.write(data)
