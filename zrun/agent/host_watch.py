"""The agent's look at its host, every ten seconds: cores, memory, disk, network."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from zrun_core.spine.events import Event

_TELL_S = 10.0


class HostWatch:
    """Samples a host. It keeps no thread: one look takes less than a millisecond."""

    def __init__(self, rank: int, folder: Path) -> None:
        """
        Args:
            rank: the first of the host, by which the launcher knows it.
            folder: of the run; its disk is the one that is told of.
        """
        self._rank = rank
        self._folder = str(folder)
        self._told_at: float | None = None
        self._counters: dict[str, int] = {}

    def look(self, now: float) -> Event | None:
        """Return an event of the host; None: it is not time yet, or the first look.

        Args:
            now: seconds of any clock.
        """
        if self._told_at is not None and now - self._told_at < _TELL_S:
            return None
        import psutil  # late: no rank waits for it

        before, then = self._counters, self._told_at
        self._told_at = now
        self._counters = _tried(lambda: _counters(psutil)) or {}
        cores = _tried(lambda: psutil.cpu_percent() / 100)  # since the look before
        if then is None:
            return None
        memory = _tried(psutil.virtual_memory)
        disk = _tried(lambda: psutil.disk_usage(self._folder))
        return {
            "type": "host",
            "time": time.time(),
            "rank": self._rank,
            "cores": psutil.cpu_count(),
            "cores_busy": cores,
            "load": _tried(lambda: psutil.getloadavg()[0]),
            "memory_bytes": memory and memory.total,
            "memory_used_bytes": memory and memory.total - memory.available,
            "disk_bytes": disk and disk.total,
            "disk_free_bytes": disk and disk.free,
            **{
                f"{name}_per_s": max(0, value - before[name]) / (now - then)
                for name, value in self._counters.items()
                if name in before
            },
        }


def _counters(psutil: Any) -> dict[str, int]:
    """Return bytes that went through the host's devices since it was started."""
    found: dict[str, int] = {}
    network = psutil.net_io_counters()
    if network is not None:
        found |= {"sent_bytes": network.bytes_sent, "received_bytes": network.bytes_recv}
    disks = _tried(psutil.disk_io_counters)
    if disks is not None:
        found |= {"disk_read_bytes": disks.read_bytes, "disk_written_bytes": disks.write_bytes}
    return found


def _tried(read: Callable[[], Any]) -> Any:
    """Return what can be read here; None: it cannot, as in some containers."""
    with suppress(Exception):
        return read()
    return None
