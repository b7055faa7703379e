"""This machine, now: its cores, memory, disk and network, and its GPUs by their driver."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil
from rich.text import Text

from zrun.topology.boards import Board
from zrun.watch.panel_layout import ALERT, GOOD, QUIET
from zrun_core.sizes import format_size

_FULL = 0.9  # of something: from there on it is shown as a warning
_WORDS = 36  # columns beside a bar, enough for most
_GPUS_S = 2.0  # between two looks at GPUs: drivers may take their time


class Use(NamedTuple):
    """Use of something of which there is so much.

    Attributes:
        share: of all of it.
        words: beside the bar.
    """

    name: str
    share: float
    words: str


class GpuSeen(NamedTuple):
    """A GPU, and what its sensors say, by the names of a `gpus` event."""

    name: str
    sensed: Mapping[str, Any]


@dataclass(frozen=True)
class Machine:
    """What was seen.

    Attributes:
        why_no_gpus: where there are none, why not.
    """

    name: str
    uses: tuple[Use, ...]
    gpus: tuple[GpuSeen, ...] = ()
    why_no_gpus: str = ""


class MachineWatch:
    """Looks at this machine again and again."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # counts from here
        self._gpus: tuple[GpuSeen, ...] = ()
        self._why_no_gpus = ""
        self._looked_at = float("-inf")
        self._sent = self._traffic()

    def look(self) -> Machine:
        """Return what there is now; rates are since the last look."""
        now = time.monotonic()
        if now - self._looked_at > _GPUS_S:
            self._looked_at = now
            self._look_at_gpus()
        uses = (self._cores(), self._memory(), self._disk())
        return Machine(
            f"{socket.gethostname()}: {self._network()}", uses, self._gpus, self._why_no_gpus
        )

    def _cores(self) -> Use:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        share = psutil.cpu_percent() / 100
        return Use("cores", share, f"{psutil.cpu_count()} cores, load {load:.1f}")

    def _memory(self) -> Use:
        seen = psutil.virtual_memory()
        used = seen.total - seen.available
        return Use("memory", used / seen.total, f"{format_size(used)} of {format_size(seen.total)}")

    def _disk(self) -> Use:
        seen = psutil.disk_usage(".")
        words = f"{format_size(seen.free)} free of this folder's"
        return Use("disk", 1 - seen.free / seen.total, words)

    def _traffic(self) -> tuple[float, int, int]:
        with suppress(OSError, AttributeError):
            seen = psutil.net_io_counters()
            return time.monotonic(), seen.bytes_sent, seen.bytes_recv
        return time.monotonic(), 0, 0

    def _network(self) -> str:
        then, sent, received = self._sent
        self._sent = self._traffic()
        seconds = max(1e-3, self._sent[0] - then)
        up, down = (self._sent[1] - sent) / seconds, (self._sent[2] - received) / seconds
        return f"network {format_size(int(up))}/s out, {format_size(int(down))}/s in"

    def _look_at_gpus(self) -> None:
        from zrun.topology.machine import read_machine

        reading = read_machine()
        self._gpus = tuple(map(_seen, reading.devices))
        self._why_no_gpus = reading.trouble or ("" if self._gpus else "no GPUs")


def _seen(board: Board) -> GpuSeen:
    sensed = dict(vars(board.health))
    if board.memory_bytes is not None and board.free_bytes is not None:
        sensed["used_bytes"] = board.memory_bytes - board.free_bytes
    return GpuSeen(f"GPU {board.index} {board.name or ''}".rstrip(), sensed)


def usage_line(use: Use, width: int, *, ascii_only: bool) -> Text:
    """Draw how much of something is used."""
    full, empty = ("#", "-") if ascii_only else ("━", "─")
    words = f" {use.share:4.0%}  {use.words}"
    # As long for all things of one terminal, so that they can be compared.
    length = max(8, min(40, width - 8 - max(_WORDS, len(words))))
    filled = round(min(1.0, use.share) * length)
    style = ALERT if use.share >= _FULL else GOOD
    return Text.assemble(
        f"{use.name:<8}", (full * filled, style), (empty * (length - filled), QUIET), words
    )
