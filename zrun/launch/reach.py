"""Whether hosts reach each other: every agent listens at one address, and knocks at the others'.

A port that the kernel chooses stands for those that a run will choose. Whoever knocks is sent a mark: it tells when an
address leads to another machine.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

_PATIENCE_S = 3.0


class Door:
    """A listener at one address, never at all of them, that hands a mark to everyone who knocks."""

    def __init__(self, address: str, mark: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=1024)
        self.port = int(self._server.getsockname()[1])
        self._mark = mark.encode()
        threading.Thread(target=self._serve, name="door", daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                with connection, suppress(OSError):
                    connection.settimeout(1.0)
                    connection.sendall(self._mark)

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def knock(peers: Mapping[str, tuple[str, int]], mark: str, patience_s: float = _PATIENCE_S) -> dict[str, str]:
    """Connect to all peers, name -> (address, port), at once. Returns what went wrong, by peer."""
    failed: dict[str, str] = {}
    heard: dict[str, bytes] = {}
    deadline = time.monotonic() + patience_s
    with selectors.DefaultSelector() as selector:
        for name, (address, port) in peers.items():
            connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            connection.setblocking(False)
            try:
                status = connection.connect_ex((address, port))
            except OSError as error:  # socket.gaierror, for what is no address
                status = error.errno if error.errno is not None and error.errno > 0 else errno.EINVAL
            if status not in (0, errno.EINPROGRESS):
                failed[name] = os.strerror(status)
                connection.close()
                continue
            heard[name] = b""
            selector.register(connection, selectors.EVENT_READ, name)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                try:
                    data = key.fileobj.recv(256)  # type: ignore[union-attr]
                    heard[key.data] += data
                    if data and mark.encode().startswith(heard[key.data]):
                        continue  # so far, so good
                    if heard[key.data] != mark.encode():
                        failed[key.data] = "another machine or program answers at that address"
                except OSError as error:
                    failed[key.data] = error.strerror or str(error)
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
        for key in list(selector.get_map().values()):
            failed[key.data] = f"no answer within {patience_s:g} s"
            key.fileobj.close()  # type: ignore[union-attr]
    return failed
