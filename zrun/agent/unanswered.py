"""Connections on which data goes out and nothing comes back.

That is what a network that was cut looks like from one end.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

_ESTABLISHED = "01"
_NUM_RETRIES = 3  # a lost packet is sent once more; a dead way swallows all of them


def unanswered(pids: Iterable[int], tables: Path = Path("/proc/net")) -> list[str]:
    """Return the addresses to which these processes have sent data in vain, several times.

    Args:
        pids: processes of this network namespace, each of which may be gone.
        tables: the folder of the kernel's tables of connections, `tcp` and `tcp6` (see proc(5)).
    """
    own = {inode for pid in pids for inode in _sockets(pid)}
    found: dict[str, None] = {}
    for name in ("tcp", "tcp6"):
        for remote, retries, inode in _connections(tables / name):
            if inode in own and retries >= _NUM_RETRIES:
                found[remote] = None
    return list(found)


def own_addresses() -> list[str]:
    """Return the addresses of this host at which others may know it."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return [
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in families
    ]


def _sockets(pid: int) -> Iterator[str]:
    """Yield the inodes of a process's sockets."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for descriptor in os.listdir(folder):
            with suppress(OSError):
                target = os.readlink(f"{folder}/{descriptor}")
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]


def _connections(table: Path) -> Iterator[tuple[str, int, str]]:
    """Yield each connection that stands.

    Yields:
        The other end's address, how often its oldest data was sent anew, and its inode.
    """
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _ESTABLISHED:
            yield _address(fields[2].partition(":")[0]), int(fields[6], 16), fields[9]


def _address(text: str) -> str:
    """Parse an address as the kernel prints it: words of the host's byte order, in hexadecimal."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    address = ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
