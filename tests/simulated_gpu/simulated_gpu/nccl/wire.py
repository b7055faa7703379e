"""What connects the ranks of a simulated communicator: sockets between each two of them.

Within a host they are local ones. Over hosts they are TCP on the interface that zrun has named to
NCCL: a cut link is felt as NCCL feels it over a network, that is, by nothing that comes any more.

Nothing here knows torch. Kernels exchange bytes on threads of their own, and can be told to stop at
any time: a kernel of NCCL that waits for a rank which never comes ends only when it is aborted.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

_HEADER = struct.Struct("<24sq")  # operation, number of bytes
_POLL_S = 0.002  # between looks at whether the others are there
_CONNECT_S = 60.0  # for a rank of another host to answer
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_BUFFER = 1 << 21  # bytes that a socket takes without a receiver, if the system allows it


class Aborted(Exception):  # noqa: N818
    """The communicator was aborted while a kernel ran."""


class PeerLostError(Exception):
    """A rank's process has ended. NCCL tells so over a network, and hangs within a host.

    Attributes:
        peer: its place in the communicator.
    """

    def __init__(self, peer: int) -> None:
        super().__init__(f"rank {peer} of the communicator has ended")
        self.peer = peer


class MismatchError(Exception):
    """Two ranks meet with different operations, or sizes. NCCL hangs, or takes wrong bytes."""


class Wire:
    """The connections of one rank. One kernel uses it at a time."""

    def __init__(self, rank: int, size: int, peers: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self.size = size
        self._peers = dict(peers)
        self._abort = os.eventfd(0)
        self.is_aborted = False

    @classmethod
    def connect(
        cls, store: Any, name: str, rank: int, size: int, goes_on: Callable[[], bool]
    ) -> Wire:
        """Meet the other ranks of a communicator; return when all are there, however late.

        Args:
            store: torch's, which all of them share.
            goes_on: asked now and then; once it is false, this raises.

        Raises:
            Aborted: so it is.
        """
        here = socket.gethostname()
        store.set(f"{name}/{rank}/host", here)
        hosts = [_value(store, f"{name}/{peer}/host", goes_on) for peer in range(size)]
        with _listener(size, is_far=any(host != here for host in hosts)) as (listener, address):
            listener.setblocking(False)
            store.set(f"{name}/{rank}", address)
            peers: dict[int, socket.socket] = {}
            for peer in range(rank):
                connection = _connected(_value(store, f"{name}/{peer}", goes_on))
                connection.sendall(struct.pack("<q", rank))
                peers[peer] = connection
            while len(peers) < size - 1:
                _check(goes_on)
                if not select.select([listener], [], [], _POLL_S)[0]:
                    continue
                connection = listener.accept()[0]
                connection.setblocking(True)
                peers[struct.unpack("<q", _exactly(connection, 8))[0]] = connection
        for connection in peers.values():
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            if connection.family == socket.AF_INET:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(rank, size, peers)

    def abort(self) -> None:
        """End the kernel that runs, and every later one. From any thread."""
        self.is_aborted = True
        os.eventfd_write(self._abort, 1)

    def close(self) -> None:
        """Let go of the connections: no kernel runs any more."""
        for connection in self._peers.values():
            connection.close()

    def exchange(
        self,
        operation: str,
        outgoing: Mapping[int, memoryview],
        incoming: Mapping[int, memoryview],
        *,
        hangs_when_lost: bool,
    ) -> None:
        """Send to some ranks and receive from some, all at once.

        Args:
            operation: the same at both ends.
            outgoing: bytes for each receiver, by rank.
            incoming: where the bytes of each sender go, by rank.
            hangs_when_lost: a rank that has ended keeps this one waiting.

        Raises:
            Aborted: `abort` was called.
            PeerLostError: a rank has ended before it was through.
            MismatchError: a sender names another operation or size.
        """
        name = operation.encode()[:24]
        sends = {
            peer: [memoryview(_HEADER.pack(name, data.nbytes)), data]
            for peer, data in outgoing.items()
        }
        receipts = {
            peer: _Receipt(name.ljust(24, b"\0"), data, peer) for peer, data in incoming.items()
        }
        while sends or receipts:
            self._wait(sends, receipts)
            for peer in list(sends):
                self._guard(peer, hangs_when_lost, lambda p=peer: self._push(sends, p))
            for peer in list(receipts):
                if self._guard(peer, hangs_when_lost, receipts[peer].take, self._peers[peer]):
                    del receipts[peer]

    def _wait(self, sends: Mapping[int, Any], receipts: Mapping[int, Any]) -> None:
        poll = select.poll()
        poll.register(self._abort, select.POLLIN)
        for peer, connection in self._peers.items():
            events = select.POLLOUT if peer in sends else 0
            if peer in receipts:
                events |= select.POLLIN
            if events:
                poll.register(connection, events)
        poll.poll()
        if self.is_aborted:
            raise Aborted

    def _guard(self, peer: int, hangs: bool, action: Callable[..., bool], *args: Any) -> bool:
        """Return what `action` returns; false where it would block."""
        try:
            return action(*args)
        except BlockingIOError:
            return False
        except (EOFError, OSError):
            if not hangs:
                raise PeerLostError(peer) from None
            self.hang()
            return False

    def hang(self) -> None:
        """Wait until the communicator is aborted.

        Raises:
            Aborted: in the end.
        """
        select.select([self._abort], [], [])
        raise Aborted

    def _push(self, sends: dict[int, list[memoryview]], peer: int) -> bool:
        parts = sends[peer]
        while parts:
            count = self._peers[peer].sendmsg(parts[:2])
            while parts and count >= parts[0].nbytes:
                count -= parts.pop(0).nbytes
            if parts:
                parts[0] = parts[0][count:]
        del sends[peer]
        return True


class _Receipt:
    """A message on its way from one rank."""

    def __init__(self, operation: bytes, data: memoryview, peer: int) -> None:
        self._operation = operation
        self._data = data
        self._peer = peer
        self._header = bytearray(_HEADER.size)
        self._left = memoryview(self._header)
        self._has_header = False

    def take(self, connection: socket.socket) -> bool:
        """Take what is there; return whether it is all."""
        while True:
            while self._left.nbytes:
                count = connection.recv_into(self._left)
                if not count:
                    raise EOFError
                self._left = self._left[count:]
            if self._has_header:
                return True
            operation, num_bytes = _HEADER.unpack(self._header)
            if (operation, num_bytes) != (self._operation, self._data.nbytes):
                raise MismatchError(
                    f"{_text(self._operation)} of {self._data.nbytes} bytes meets "
                    f"{_text(operation)} of {num_bytes} bytes from rank {self._peer} of the "
                    "communicator"
                )
            self._has_header = True
            self._left = self._data


def _text(operation: bytes) -> str:
    return operation.rstrip(b"\0").decode()


@contextmanager
def _listener(size: int, *, is_far: bool) -> Iterator[tuple[socket.socket, str]]:
    """Listen for the ranks of a communicator, and yield the address too.

    Args:
        is_far: some of them are on other hosts.
    """
    if is_far:
        with socket.create_server((_own_address(), 0), backlog=size) as listener:
            address, port = listener.getsockname()
            yield listener, f"{address}:{port}"
        return
    name = f"@nccl-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(_abstract(name))
        listener.listen(size)
        yield listener, name


def _abstract(name: str) -> str:
    """Return the address of a local socket that is no file, so that none can be left."""
    return name.replace("@", "\0")


def _connected(address: str) -> socket.socket:
    """Return a connection to a listener."""
    if not address.startswith("@"):
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), _CONNECT_S)
        connection.settimeout(None)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_abstract(address))
    return connection


def _own_address() -> str:
    """Return the address of this host on the first interface that NCCL_SOCKET_IFNAME allows.

    Raises:
        OSError: none of them has an address.
    """
    wanted = os.environ.get("NCCL_SOCKET_IFNAME", "^lo,docker")
    names = [name for _, name in socket.if_nameindex() if _is_allowed(name, wanted)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in names:
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):
                answer = fcntl.ioctl(any_socket.fileno(), _GET_ADDRESS, request)
                return socket.inet_ntoa(answer[20:24])
    raise OSError(f"simulated NCCL: no interface with an address is among {wanted!r}")


def _is_allowed(name: str, wanted: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME allows an interface: "^" means all others, "=" no prefixes."""
    is_exact = "=" in wanted[:2]
    parts = wanted.lstrip("^=").split(",")
    is_named = name in parts if is_exact else any(map(name.startswith, parts))
    return is_named != wanted.startswith("^")


def _value(store: Any, key: str, goes_on: Callable[[], bool]) -> str:
    """Return what another rank has set, once it has."""
    while not store.check([key]):
        _check(goes_on)
        time.sleep(_POLL_S)
    return str(store.get(key).decode())


def _check(goes_on: Callable[[], bool]) -> None:
    if not goes_on():
        raise Aborted


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise EOFError
        found += part
    return found
