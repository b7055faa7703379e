"""What Linux says about this process and about everybody else.

Cheap enough to be read around every step.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

# Of tcpi_bytes_sent and then tcpi_bytes_retrans in the kernel's struct tcp_info, since Linux 4.18.
_SENT_AT = 200


def memory_mb(key: str) -> float:
    """Return MiB of this process: `VmRSS` now, `VmHWM` the highest since `restart_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def restart_peak() -> None:
    """Forget the highest resident memory so far."""
    Path("/proc/self/clear_refs").write_text("5")


def busy_s() -> float:
    """Return CPU seconds used on this machine by all processes, and stolen by its neighbours."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def loopback_bytes() -> int:
    """Bytes sent through the loopback device by everybody since boot, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise OSError("there is no loopback device")


def socket_bytes() -> int:
    """Bytes that this process has sent through the TCP sockets that it has open.

    Payload only, nobody else's, and each byte once, although a busy machine sends some again.
    """
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed in between, or no TCP
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(info) >= _SENT_AT + 16:
                num_bytes, again = struct.unpack_from("=QQ", info, _SENT_AT)
                total += num_bytes - again
    return total
