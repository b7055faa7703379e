"""The protocol between a launcher and the agent of a host.

Down the agent's stdin go length-prefixed JSON objects; its end is the end of the launcher, and of
the workers:

    {"ask": "facts"}        what is the host like? See `zrun.agent.rpc_server`
    {"spec": ...}           what all hosts are to run; compressed, since it tells of every rank
    Start                   run the workers of this one
    {"stop": "finish"}      ask them to end: see `StopMode`
    {"save": true}          ask rank 0, where it runs, to save at the end of its step and to go on
    {"profile": "..."}      ask rank 0 in the same way for a profile, with the request in words (see
                            `zrun_core.spine.profile_request`) and the run's directory
    {"testify": true}       a rank hangs: what do those of this host do?
    {"beat": true}          the launcher is there
    {"hold": true}          it is about to stand still (ctrl-Z): its silence means nothing until its
                            next word
    {"exit": 5}             to an agent that another launcher started: how its process is to end

Up its stdout come JSON lines (`zrun.transport.frame_reader`), whose `frame` is:

    hello                   there is an agent: its pid, Python and zrun
    answer                  to a question
    started                 the workers are about to be forked
    event                   of a worker, lines of its output, or what its GPU's sensors say; of many
                            ranks, what they tell of their memory together (`transport.memories`)
    fault                   an error that the GPU of some of its ranks has reported
    board                   how far the ranks are, twice a second
    testimony               what they do while one hangs
    deaf                    it ends its workers, since it heard nothing for too long
    exit                    a worker ended: its status, note and last lines
    done                    all have, and nothing of them is left
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

Frame = dict[str, Any]

GRACE_S = 5.0  # that an agent leaves workers between SIGTERM and SIGKILL
BEAT_S = 3.0  # between two words of a launcher to the agents of other hosts
SILENCE_S = 15.0  # after which such an agent takes the launcher, or the way to it, for dead ...
ORPHAN_S = 120.0  # ... or after this, as long as its ranks go on: they reach the other hosts then
PROGRESS_S = 0.5  # between two reports of how far the ranks are

_LENGTH = struct.Struct(">I")
_LARGEST = 16 << 20
_LARGEST_UNPACKED = 256 << 20  # a plan for thousands of ranks takes some MiB
EVENT = b'{"frame":"event","event":'  # and what a worker has said, and a brace
_ZLIB = b"\x78"  # how its streams begin; JSON does not


class StopMode(StrEnum):
    """Ways in which workers are asked to end, from the gentlest on."""

    FINISH = "finish"  # the step, save if the job does, and leave together
    NOW = "now"  # with a moment to clean up
    KILL = "kill"


@dataclass(frozen=True)
class StartRequest:
    """All that an agent needs to run the workers of its host.

    Attributes:
        spec: a RunSpec as JSON; the agent adds its own telemetry socket.
        host: which of the plan's hosts this agent is.
        env: values may be secrets: they travel here, and are never written to disk.
        module: whose `main` runs a rank; its argument is the path of spec.json.
        store: where the ranks of several hosts meet, tcp://address:port; None: in a file.
        interface: of this host, that leads to the others; None: there are none.
        seat: the one rank that it runs, where each has an agent of its own; None: all of the host.
        is_remote: the launcher is elsewhere: its silence is its end, or that of the way to it.
    """

    spec: dict[str, Any]
    host: str
    env: dict[str, str]
    module: str
    store: str | None = None
    interface: str | None = None
    seat: int | None = None
    is_remote: bool = False

    def pack(self) -> bytes:
        return self.pack_spec() + self.pack_own()

    def pack_spec(self) -> bytes:
        """Pack what is the same for all hosts, and comes first."""
        return _with_length(zlib.compress(json.dumps({"spec": self.spec}).encode(), 1))

    def pack_own(self) -> bytes:
        return pack(
            {each.name: getattr(self, each.name) for each in fields(self) if each.name != "spec"}
        )


def pack(frame: Frame) -> bytes:
    return _with_length(json.dumps(frame).encode())


def _with_length(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Cuts a stream of bytes back into frames. A spec becomes part of the start that follows it."""

    def __init__(self) -> None:
        self._buffer = b""
        self._spec: Frame = {}

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes.

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
            frame = _unpack(self._buffer[_LENGTH.size : _LENGTH.size + length])
            if frame.keys() == {"spec"}:
                self._spec = frame
            else:
                frames.append(self._spec | frame if "module" in frame else frame)
            self._buffer = self._buffer[_LENGTH.size + length :]
        return frames


def _unpack(body: bytes) -> Frame:
    """Return the object in a frame.

    Raises:
        ValueError: it is something else.
    """
    if body.startswith(_ZLIB):
        try:
            body = zlib.decompressobj().decompress(body, _LARGEST_UNPACKED)
        except zlib.error as error:
            raise ValueError(f"{error}: this is not a launcher's stream") from None
    frame = json.loads(body)
    if not isinstance(frame, dict):
        raise ValueError("no object: this is not a launcher's stream")
    return frame
