"""The door at which the ranks of several hosts meet: a listening socket that rank 0 inherits.

The first host's agent opens it, because only a process of that host can, and the others must know its port before they
start. It is bound to the one address at which other hosts reach that host.
"""

from __future__ import annotations

import socket


def open_store(address: str) -> socket.socket:
    """A socket that listens at `address`, on a port of the kernel's choice, and nowhere else."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=4096)


def url(address: str, port: int) -> str:
    """As workers find it in ZRUN_STORE."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
