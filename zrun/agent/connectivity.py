"""Whether hosts reach each other, and how fast: every agent opens a door at one address, and knocks at the others'.

A port that the kernel chooses stands for those that a run will choose. Whoever knocks is sent a mark: it tells when an
address leads to another machine. Then the visitor leaves, or says what is to be measured.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import statistics
import struct
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

_PATIENCE_S = 3.0
_ECHO, _SINK = b"e", b"s"
_CHUNK = 1 << 20
_STREAMS = 4  # one stream alone does not fill a fast link
_STREAM_S = 1.0
_PINGS = 100
_COUNT = struct.Struct(">Q")


class Listener:
    """A listener at one address, never at all of them, that hands a mark to everyone who knocks."""

    def __init__(self, address: str, mark: str) -> None:
        self._server = socket.create_server((address, 0), family=_family(address), backlog=1024)
        self.port = int(self._server.getsockname()[1])
        self._mark = mark.encode()
        threading.Thread(target=self._serve, name="door", daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                visitor, _ = self._server.accept()
                threading.Thread(
                    target=self._receive, args=(visitor,), name="visitor", daemon=True
                ).start()

    def _receive(self, visitor: socket.socket) -> None:
        with visitor, suppress(OSError):
            visitor.settimeout(_PATIENCE_S + _STREAM_S)  # whoever only sits there does not stay
            visitor.sendall(self._mark)
            what = visitor.recv(1)
            if what == _ECHO:
                while data := visitor.recv(64):
                    visitor.sendall(data)
            elif what == _SINK:
                buffer, total = bytearray(_CHUNK), 0
                while count := visitor.recv_into(buffer):
                    total += count
                visitor.sendall(_COUNT.pack(total))

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def connect(
    peers: Mapping[str, tuple[str, int]], mark: str, patience_s: float = _PATIENCE_S
) -> dict[str, str]:
    """Connect to all peers, name -> (address, port), at once. Returns what went wrong, by peer."""
    failed: dict[str, str] = {}
    heard: dict[str, bytes] = {}
    deadline = time.monotonic() + patience_s
    with selectors.DefaultSelector() as selector:
        for name, (address, port) in peers.items():
            connection = socket.socket(_family(address))
            connection.setblocking(False)
            try:
                status = connection.connect_ex((address, port))
            except OSError as error:  # socket.gaierror, for what is no address
                status = (
                    error.errno if error.errno is not None and error.errno > 0 else errno.EINVAL
                )
            if status not in (0, errno.EINPROGRESS):
                failed[name] = os.strerror(status)
                connection.close()
                continue
            heard[name] = b""
            selector.register(connection, selectors.EVENT_READ, (name, connection))
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                name, connection = key.data
                try:
                    data = connection.recv(len(mark) + 1 - len(heard[name]))
                    heard[name] += data
                    if (
                        data
                        and heard[name] != mark.encode()
                        and mark.encode().startswith(heard[name])
                    ):
                        continue  # so far, so good
                    if heard[name] != mark.encode():
                        failed[name] = "another machine or program answers at that address"
                except OSError as error:
                    failed[name] = error.strerror or str(error)
                selector.unregister(connection)
                connection.close()
        for key in list(selector.get_map().values()):
            name, connection = key.data
            failed[name] = f"no answer within {patience_s:g} s"
            connection.close()
    return failed


def link_rates(address: str, port: int, mark: str, stream_s: float = _STREAM_S) -> dict[str, float]:
    """The round trip of a small message, and the bytes per second that arrive at an open door.

    Raises:
        OSError: it does not answer, or no longer.
    """
    with _visit(address, port, mark, _ECHO) as connection:
        times = []
        for _ in range(_PINGS):
            start = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.perf_counter() - start)
    with ThreadPoolExecutor(_STREAMS) as pool:
        start = time.perf_counter()
        counts = list(
            pool.map(lambda _: _send_stream(address, port, mark, stream_s), range(_STREAMS))
        )
        taken = time.perf_counter() - start
    return {"bytes_per_s": sum(counts) / taken, "round_trip_s": statistics.median(times)}


def _send_stream(address: str, port: int, mark: str, stream_s: float) -> int:
    """Send for a while. Returns what has arrived."""
    chunk, until = bytes(_CHUNK), time.monotonic() + stream_s
    with _visit(address, port, mark, _SINK) as connection:
        while time.monotonic() < until:
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        return int(_COUNT.unpack(connection.recv(_COUNT.size, socket.MSG_WAITALL))[0])


def _visit(address: str, port: int, mark: str, purpose: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), _PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if connection.recv(len(mark), socket.MSG_WAITALL) != mark.encode():
        connection.close()
        raise OSError(errno.EHOSTUNREACH, "another machine or program answers at that address")
    connection.sendall(purpose)
    return connection
