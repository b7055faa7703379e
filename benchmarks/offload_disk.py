"""The file of a rank beside the disk under it, which plain threads read and write past the cache.

Both move the same blocks of the same memory by as many threads, to a file without a name whose
space was reserved. Beside that, `SwapFile` takes a digest of each block, and keeps the order of
calls. `update` reads one state while it writes another one, as an update of states on disk does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from render import render

from zrun_core.memory.arena import byte_buffer
from zrun_core.sizes import format_size
from zrun_core.spine.direct_io import goes_past_the_cache, open_nameless, reserve
from zrun_core.tiers.swap_file import SwapFile

BLOCK = 8 << 20
THREADS = 4
TARGET = 0.85  # of what the disk itself does
WAYS = ("disk", "SwapFile")


class Way(Protocol):
    """One way to move two states of one size."""

    def write(self, memory: torch.Tensor, state: int) -> Callable[[], None]:
        """Begin to write a state; return what waits for it."""
        ...

    def read(self, memory: torch.Tensor, state: int) -> Callable[[], None]:
        """Begin to read a state; return what waits for it."""
        ...


class Disk:
    """The disk itself."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._file = open_nameless(folder)
        self._num_bytes = num_bytes
        reserve(self._file, 2 * num_bytes)
        goes_past_the_cache(self._file)

    def write(self, memory: torch.Tensor, state: int) -> Callable[[], None]:
        return self._move(os.pwritev, memory, state)

    def read(self, memory: torch.Tensor, state: int) -> Callable[[], None]:
        return self._move(os.preadv, memory, state)

    def _move(
        self, call: Callable[..., int], memory: torch.Tensor, state: int
    ) -> Callable[[], None]:
        view = memory.numpy().data
        starts = iter(range(0, self._num_bytes, BLOCK))  # its next() is atomic
        threads = [
            threading.Thread(target=self._work, args=(call, view, state * self._num_bytes, starts))
            for _ in range(THREADS)
        ]
        for thread in threads:
            thread.start()

        def wait() -> None:
            for thread in threads:
                thread.join()

        return wait

    def _work(
        self, call: Callable[..., int], view: memoryview, offset: int, starts: Iterator[int]
    ) -> None:
        for start in starts:
            count = call(self._file, [view[start : start + BLOCK]], offset + start)
            assert count == BLOCK


class Swap:
    """`SwapFile`."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._file = SwapFile(folder, 2 * num_bytes, num_threads=THREADS, block_bytes=BLOCK)
        self._extents = [self._file.reserve(num_bytes, name=f"state {n}") for n in range(2)]

    def write(self, memory: torch.Tensor, state: int) -> Callable[[], None]:
        return self._file.write(self._extents[state], memory).wait

    def read(self, memory: torch.Tensor, state: int) -> Callable[[], None]:
        return self._file.read(self._extents[state], memory).wait


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per operation, with the bytes per second of each way in each round."""
    num_bytes = (4 if options.quick else 64) * BLOCK
    rounds = 1 if options.quick else options.rounds
    here, there = (byte_buffer(num_bytes, torch.device("cpu")) for _ in range(2))
    for memory in (here, there):
        memory.random_(0, 256)
    ways: dict[str, Way] = {
        "disk": Disk(options.dir, num_bytes),
        "SwapFile": Swap(options.dir, num_bytes),
    }
    operations: dict[str, Callable[[Way], list[Callable[[], None]]]] = {
        "write": lambda way: [way.write(here, 0)],
        "read": lambda way: [way.read(there, 0)],
        "update": lambda way: [way.read(there, 1), way.write(here, 0)],
    }
    for way in ways.values():  # the first write to reserved space is slower
        for state in range(2):
            way.write(here, state)()
    rows = []
    for name, begin in operations.items():
        found: dict[str, list[float]] = {way: [] for way in ways}
        cpu_s: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            for way in WAYS[:: 1 if number % 2 == 0 else -1]:
                start, cpu = time.perf_counter(), time.process_time()
                waits = begin(ways[way])
                for wait in waits:
                    wait()
                moved = len(waits) * num_bytes
                found[way].append(moved / (time.perf_counter() - start))
                cpu_s[way].append((time.process_time() - cpu) / moved * 2**30)
        rows.append({"operation": name, "bytes": num_bytes, "rates": found, "cpu_s": cpu_s})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return GB/s of both, how they compare in each round, and CPU seconds per GiB."""
    lines = []
    for row in rows:
        rates = row["rates"]
        ratios = [ours / raw for raw, ours in zip(*(rates[way] for way in WAYS), strict=True)]
        ratio = statistics.median(ratios)
        lines.append(
            [
                f"{row['operation']} {format_size(row['bytes'])}",
                *(f"{statistics.median(rates[way]) / 1e9:.2f}" for way in WAYS),
                *(f"{min(rates[way]) / 1e9:.2f}-{max(rates[way]) / 1e9:.2f}" for way in WAYS),
                f"{ratio:.3f}",
                f"{min(ratios):.2f}-{max(ratios):.2f}",
                *(f"{statistics.median(row['cpu_s'][way]):.2f}" for way in WAYS),
                "met" if ratio >= TARGET else "MISSED",
            ]
        )
    columns = (
        "operation",
        *(f"{way} GB/s" for way in WAYS),
        *(f"{way} range" for way in WAYS),
        "ratio",
        "range",
        *(f"{way} CPU s/GiB" for way in WAYS),
        f">= {TARGET}",
    )
    return render(columns, lines)
