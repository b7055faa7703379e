"""What a launcher and the agent of a host say to each other.

Down the agent's stdin go length-prefixed JSON objects: questions such as `{"ask": "facts"}`, one `Start`, then perhaps
`{"stop": "finish"}`; its end is the end of the launcher, and of the workers. Up its stdout come JSON lines: `hello`, an
`answer` to each question, then `started`, `event`, `exit`, `hang` and `done`.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

Frame = dict[str, Any]

GRACE_S = 5.0  # that an agent leaves workers between SIGTERM and SIGKILL

_LENGTH = struct.Struct(">I")
_LARGEST = 16 << 20  # a plan for thousands of ranks takes about 1 MiB


class Stop(StrEnum):
    """How workers are asked to end, from the gentlest on."""

    FINISH = "finish"  # the step, save if the job does, and leave together
    NOW = "now"  # with a moment to clean up
    KILL = "kill"


@dataclass(frozen=True)
class Start:
    """All that an agent needs. Values of `env` may be secrets: they travel here, and are never written to disk."""

    spec: dict[str, Any]  # a RunSpec as JSON; the agent adds its own telemetry socket
    host: str  # which of the plan's hosts this agent is
    env: dict[str, str]
    module: str  # run as `python -u -m <module> <spec.json>`

    def pack(self) -> bytes:
        return pack(asdict(self))


def pack(frame: Frame) -> bytes:
    body = json.dumps(frame).encode()
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Cuts a stream of bytes back into frames."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes.

        Raises:
            ValueError: the stream is not one of frames.
        """
        self._buffer += data
        frames: list[Frame] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > _LARGEST:
                raise ValueError(f"a frame of {length} bytes: this is not a launcher's stream")
            if len(self._buffer) < _LENGTH.size + length:
                break
            frames.append(json.loads(self._buffer[_LENGTH.size : _LENGTH.size + length]))
            self._buffer = self._buffer[_LENGTH.size + length :]
        return frames


class Lines:
    """Cuts a stream of bytes into frames of one line each; a line that is not a JSON object is skipped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Frame]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        frames = []
        for line in lines:
            try:
                frame = json.loads(line)
            except ValueError:
                continue
            if isinstance(frame, dict):
                frames.append(frame)
        return frames
