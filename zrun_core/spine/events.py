"""Events of a run, a JSON object per line of `events.jsonl`, and their way from a worker to it.

`Emitter` belongs to a worker; it sends each event as one unix datagram to the agent of its host and
never waits: what the socket will not take now is kept and sent with the next event.
`docs/events.md` documents every field.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections import deque
from typing import Any, Literal

EventType = Literal[
    "start",
    "stage",
    "schedule",
    "step",
    "eval",
    "metrics",
    "save",
    "warning",
    "log",
    "output",
    "phase",
    "memory",
    "ranks",
    "peak",
    "profile",
    "gpus",
    "host",
    "pushes",
    "stop",
    "estimate",
    "end",
]
Event = dict[str, Any]

_BACKLOG_EVENTS = 100_000  # about 30 MB; a launcher that is away for longer loses the oldest
_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def encode(event: Event) -> bytes:
    """Return one line of strict JSON without the newline.

    Numbers that JSON lacks become the strings nan, inf and -inf.
    """
    try:
        return _ENCODE(event).encode()
    except ValueError:  # it has such numbers
        return _ENCODE(_finite(event)).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class Emitter:
    """Sends events of one rank to the agent's socket at `path`; with None they go nowhere."""

    def __init__(self, path: str | None, rank: int) -> None:
        self.rank = rank
        self._backlog: deque[bytes] = deque(maxlen=_BACKLOG_EVENTS)
        self._socket: socket.socket | None = None
        if path is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.connect(path)
            self._socket.setblocking(False)

    def emit(self, kind: EventType, **fields: Any) -> None:
        """Send one event, or keep it if the socket is full. Never blocks, never raises."""
        if self._socket is None:
            return
        self._backlog.append(
            encode({"type": kind, "time": time.time(), "rank": self.rank, **fields})
        )
        self._send()

    def _send(self) -> bool:
        assert self._socket is not None
        while self._backlog:
            try:
                self._socket.send(self._backlog[0])
            except OSError:
                return False
            self._backlog.popleft()
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Deliver what is left, for at most `timeout_s` seconds."""
        if self._socket is None:
            return
        deadline = time.monotonic() + timeout_s
        while not self._send() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._socket.close()
        self._socket = None
