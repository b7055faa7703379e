"""The way up from an agent to its launcher, for frames and for the telemetry of workers.

    main thread, agent loop ---------- send ------> Uplink ---> stdout, to the launcher
    workers --- datagrams ---> TelemetryRelay ----^

The launcher may not listen for a while. What its pipe does not take waits here. From a MiB on
telemetry is no longer read, so that workers keep what they have to tell. No thread ever waits.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from zrun.agent.memory_fold import MemoryFold
from zrun.transport.frames import EVENT, Frame
from zrun.transport.nonblocking_writer import NonblockingWriter
from zrun_core.spine.events import Event, encode

_LARGEST_EVENT = 1 << 18
_EVENTS_PER_TURN = 256  # then the other descriptors are served


class Uplink:
    """The agent's end of the pipe to the launcher. Any thread may send."""

    def __init__(self, output: int, selector: selectors.BaseSelector) -> None:
        """Write to a pipe.

        Args:
            output: descriptor of the pipe.
            selector: whose entries have a callable as data; it says when the pipe takes more.
        """
        self.output = output
        self._writer = NonblockingWriter(output)
        self._selector = selector
        self._lock = threading.Lock()
        self._is_waiting = False  # for the pipe to take more

    @property
    def is_full(self) -> bool:
        """Return whether what can be left out should be."""
        return self._writer.is_full

    def send(self, frame: Frame) -> None:
        """Send one frame."""
        self.write(json.dumps(frame).encode() + b"\n")

    def send_events(self, events: Sequence[Event]) -> None:
        """Send events of this process."""
        self.write(b"".join(EVENT + encode(event) + b"}\n" for event in events))

    def write(self, data: bytes) -> None:
        """Send whole lines."""
        with self._lock:
            self._writer.put(data)
            if not self._writer.send() and not self._is_waiting:
                self._is_waiting = True
                self._selector.register(self.output, selectors.EVENT_WRITE, self._write_rest)

    def _write_rest(self, _: int) -> None:
        with self._lock:
            if self._writer.send():
                self._is_waiting = False
                self._selector.unregister(self.output)

    def flush(self) -> bool:
        """Write what fits, and return whether that was all."""
        return self._writer.send()

    def discard(self) -> None:
        """Let nothing reach the launcher from now on."""
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), self.output)


class TelemetryRelay:
    """Forwards every datagram of the workers' socket as an event.

    Attributes:
        fold: of what many ranks tell of their memory; None: each line goes up as it is.
    """

    def __init__(
        self, telemetry: socket.socket, uplink: Uplink, selector: selectors.BaseSelector
    ) -> None:
        """Begin to forward; see `Uplink` for the selector."""
        telemetry.setblocking(False)
        self._telemetry = telemetry
        self._uplink = uplink
        self._selector = selector
        self._datagram = memoryview(bytearray(_LARGEST_EVENT))
        self.fold: MemoryFold | None = None
        self.is_paused = False
        selector.register(telemetry, selectors.EVENT_READ, self._read)

    def _read(self, descriptor: int) -> None:
        if self._uplink.is_full:
            self.is_paused = True
            self._selector.unregister(descriptor)
        else:
            self._forward()

    def resume(self) -> None:
        """Read again, if the launcher has taken enough."""
        if self.is_paused and not self._uplink.is_full:
            self.is_paused = False
            self._selector.register(self._telemetry, selectors.EVENT_READ, self._read)

    def drain(self) -> None:
        """Forward all that workers have sent so far."""
        while self._forward() == _EVENTS_PER_TURN:
            pass

    def send_due(self) -> None:
        """Forward what has waited long enough for what other ranks tell of the same step."""
        if self.fold is not None:
            self._send(self.fold.due(time.monotonic()))

    def end_of(self, rank: int) -> None:
        """Forward all that workers have sent, before the end of this one is told."""
        self.drain()
        if self.fold is not None:
            self._send(self.fold.end_of(rank))

    def _forward(self) -> int:
        """Send a turn's worth of datagrams up, and return how many there were."""
        datagrams: list[bytes] = []
        with suppress(BlockingIOError):
            while len(datagrams) < _EVENTS_PER_TURN:
                size = self._telemetry.recv_into(self._datagram)
                datagrams.append(bytes(self._datagram[:size]))
        # A worker sends one line at a time; anything else would break the stream.
        self._send(self._folded(line for line in datagrams if b"\n" not in line))
        return len(datagrams)

    def _folded(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            if self.fold is None:
                yield line
            else:
                yield from self.fold.take(line, time.monotonic())

    def _send(self, lines: Iterable[bytes]) -> None:
        data = b"".join(EVENT + line + b"}\n" for line in lines)
        if data:
            self._uplink.write(data)
