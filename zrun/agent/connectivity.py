"""Connections between hosts: do they reach each other, and how fast?

Every agent listens at one address, at a port that the kernel chooses and that stands for those of a
run, and connects to the others'. The listener sends a mark, so that an address which leads to
another machine is noticed. Then the visitor leaves, or says what is to be measured:

    visitor                       listener
            <-- mark --
    b"e"    --> anything -->      sends it back: a round trip
    b"s"    --> a stream -->      counts it until its end, and sends the number of bytes
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

_PATIENCE_S = 3.0
_ECHO = b"e"
_SINK = b"s"
_CHUNK = 1 << 20
_STREAMS = 4  # one stream alone does not fill a fast link
_STREAM_S = 1.0
_PINGS = 100
_COUNT = struct.Struct(">Q")
_WRONG_MACHINE = "another machine or program answers at that address"


def listen(address: str) -> socket.socket:
    """Return a socket that listens at `address`, at a port of the kernel's choice, nowhere else."""
    return socket.create_server((address, 0), family=_family(address), backlog=4096)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class Listener:
    """A listener at one address, never at all of them, that sends a mark to every visitor."""

    def __init__(self, address: str, mark: str) -> None:
        self._server = listen(address)
        self.port = int(self._server.getsockname()[1])
        self._mark = mark.encode()
        threading.Thread(target=self._serve, name="listener", daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                visitor, _ = self._server.accept()
                threading.Thread(
                    target=self._receive, args=(visitor,), name="visitor", daemon=True
                ).start()

    def _receive(self, visitor: socket.socket) -> None:
        with visitor, suppress(OSError):
            visitor.settimeout(_PATIENCE_S + _STREAM_S)  # a silent visitor does not stay
            visitor.sendall(self._mark)
            purpose = visitor.recv(1)
            if purpose == _ECHO:
                while data := visitor.recv(64):
                    visitor.sendall(data)
            elif purpose == _SINK:
                buffer = bytearray(_CHUNK)
                total = 0
                while count := visitor.recv_into(buffer):
                    total += count
                visitor.sendall(_COUNT.pack(total))

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def connect(
    peers: Mapping[str, tuple[str, int]], mark: str, patience_s: float = _PATIENCE_S
) -> dict[str, str]:
    """Connect to all peers at once.

    Args:
        peers: addresses and ports, by name.
        mark: what each of them sends.
        patience_s: seconds for all of them together.

    Returns:
        What went wrong, by peer.
    """
    failed: dict[str, str] = {}
    deadline = time.monotonic() + patience_s
    with selectors.DefaultSelector() as selector:
        for name, (address, port) in peers.items():
            connection = socket.socket(_family(address))
            connection.setblocking(False)
            status = _begin_to_connect(connection, address, port)
            if status not in (0, errno.EINPROGRESS):
                failed[name] = os.strerror(status)
                connection.close()
                continue
            visit = _Visit(name, connection, mark.encode())
            selector.register(connection, selectors.EVENT_READ, visit)
        while selector.get_map():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            for key, _ in selector.select(left_s):
                if key.data.read():
                    continue
                if key.data.problem:
                    failed[key.data.name] = key.data.problem
                selector.unregister(key.fileobj)
                key.data.connection.close()
        for key in list(selector.get_map().values()):
            failed[key.data.name] = f"no answer within {patience_s:g} s"
            key.data.connection.close()
    return failed


def _begin_to_connect(connection: socket.socket, address: str, port: int) -> int:
    """Return an error number; 0 or EINPROGRESS if all is well."""
    try:
        return connection.connect_ex((address, port))
    except OSError as error:  # socket.gaierror, for what is no address
        if error.errno is not None and error.errno > 0:
            return error.errno
        return errno.EINVAL


class _Visit:
    """A connection to a peer that is to send its mark.

    Attributes:
        problem: "" if it has sent it.
    """

    def __init__(self, name: str, connection: socket.socket, mark: bytes) -> None:
        self.name = name
        self.connection = connection
        self.problem = ""
        self._mark = mark
        self._heard = b""

    def read(self) -> bool:
        """Read what has come, and return whether there must be more."""
        try:
            # One byte more than the mark: it would be another program's.
            data = self.connection.recv(len(self._mark) + 1 - len(self._heard))
        except OSError as error:
            self.problem = error.strerror or str(error)
            return False
        self._heard += data
        if self._heard == self._mark:
            return False
        if data and self._mark.startswith(self._heard):
            return True
        self.problem = _WRONG_MACHINE
        return False


def link_rates(address: str, port: int, mark: str, stream_s: float = _STREAM_S) -> dict[str, float]:
    """Measure the way to a listener.

    Args:
        mark: what the listener sends.
        stream_s: seconds for which data is sent.

    Returns:
        The round trip of a small message, and the bytes per second that arrive.

    Raises:
        OSError: it does not answer, or no longer.
    """
    from concurrent.futures import ThreadPoolExecutor  # late: the agent is there sooner without it

    times = []
    with _visit(address, port, mark, _ECHO) as connection:
        for _ in range(_PINGS):
            start = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.perf_counter() - start)
    with ThreadPoolExecutor(_STREAMS) as pool:
        start = time.perf_counter()
        streams = [
            pool.submit(_send_stream, address, port, mark, stream_s) for _ in range(_STREAMS)
        ]
        num_bytes = sum(stream.result() for stream in streams)
        taken_s = time.perf_counter() - start
    return {"bytes_per_s": num_bytes / taken_s, "round_trip_s": sorted(times)[_PINGS // 2]}


def _send_stream(address: str, port: int, mark: str, stream_s: float) -> int:
    """Send for a while, and return how many bytes have arrived."""
    chunk = bytes(_CHUNK)
    until = time.monotonic() + stream_s
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
        raise OSError(errno.EHOSTUNREACH, _WRONG_MACHINE)
    connection.sendall(purpose)
    return connection
