"""Ports of this host that stay free until somebody listens there.

The kernel gives every outgoing connection a port of its own choice out of one range. A port below
that range is taken by nobody who does not name it.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20_000
_USUAL = 32_768  # where the kernel's range begins
_TRIES = 64


def listen_below_range(address: str) -> socket.socket:
    """Return a socket that listens at `address`, at a port that the kernel gives to nobody else.

    Where there is none, it is one of the kernel's choice.

    Raises:
        OSError: nothing can listen at this address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in (*_candidates(), 0):
        try:
            return socket.create_server((address, port), family=family)
        except OSError:
            if not port:
                raise
    raise AssertionError("the last candidate was tried")


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of `address` at which nobody listens now.

    Raises:
        OSError: nothing can listen at this address.
    """
    with listen_below_range(address) as server:
        return int(server.getsockname()[1])


def _candidates() -> list[int]:
    low = _USUAL
    with suppress(OSError, ValueError, IndexError):
        low = int(_RANGE.read_text().split()[0])
    if low - _LOWEST < _TRIES:
        return []
    return random.Random().sample(range(_LOWEST, low), _TRIES)
