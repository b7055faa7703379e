"""The disk of a host on which states of a job are to lie: is it fit for them, and how fast is it?

`look_at` runs on each host; the rest makes sentences of what it found, and is pure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from zrun_core.sizes import format_size
from zrun_core.tiers.probe import DiskFacts, probe_disk

if TYPE_CHECKING:  # an agent is there sooner without pydantic
    from zrun_core.spine.config import JobConfig

_SLOW = 250e6  # bytes per second, below which a run is hardly wanted
_PATIENCE_S = 20.0  # for a disk: an agent has half a minute for all that it is asked
_MISSING = "there is no such folder"
# Bytes of a parameter that a step reads from the disk, and writes to it, with Adam in bf16.
_TRAFFIC = {"optimizer": (12, 12), "grad": (4, 4), "param": (4, 2)}


@dataclass(frozen=True)
class SwapFolder:
    """The folder of states on disk, as a job names it; each host looks for it by itself.

    Attributes:
        path: absolute, or with the `~` of whoever runs the job there.
        is_made: it is the run directory, which is made where it does not exist.
    """

    path: str
    is_made: bool

    @classmethod
    def of(cls, job: JobConfig, job_dir: Path, run_dir: Path) -> SwapFolder | None:
        """Return the folder that a job needs; None: nothing of it lives on a disk.

        Args:
            job_dir: of its file, from which the folder is looked for.
            run_dir: of the run, or the folder in which it will be made.
        """
        if not job.uses_disk:
            return None
        chosen = job.offload.dir
        if chosen is None:
            return cls(str(run_dir.absolute()), is_made=True)
        if chosen.startswith("~"):
            return cls(chosen, is_made=False)
        return cls(str(job_dir.absolute() / chosen), is_made=False)


def look_at(folder: SwapFolder) -> DiskFacts:
    """Return what the disk under a folder of this host is like. It takes a fraction of a second."""
    path = Path(os.path.expanduser(folder.path))
    if folder.is_made:
        path = next(each for each in (path, *path.parents) if each.is_dir())
    if not path.exists():
        return DiskFacts(str(path), _MISSING)
    return _probe(path)


def _probe(path: Path) -> DiskFacts:
    """Return the facts of a disk. One that does not answer, as of a server that is gone, has none.

    A thread that waits for such a disk obeys nobody.
    """
    found: SimpleQueue[DiskFacts] = SimpleQueue()
    Thread(target=lambda: found.put(probe_disk(str(path))), daemon=True).start()
    try:
        return found.get(timeout=_PATIENCE_S)
    except Empty:
        return DiskFacts(str(path), f"it has not answered for {_PATIENCE_S:g} s")


def find_problem(disk: DiskFacts) -> str | None:
    """Return why no states can lie on a disk; None: they can."""
    elsewhere = "name a folder on a local disk in offload.dir"
    if disk.error == _MISSING:
        elsewhere = f"make it, or {elsewhere}"
    if disk.error is not None:
        return f"states on disk: {disk.folder}: {disk.error}: {elsewhere}"
    if disk.is_memory:
        return (
            f"states on disk: {disk.folder} is memory, not a disk ({disk.filesystem}), and they "
            f"would stay in it: {elsewhere}, or write offload: host"
        )
    return None


def find_warnings(disk: DiskFacts, job: JobConfig) -> Iterator[str]:
    """Yield why a run with its states on this disk will be slow.

    Args:
        disk: one without a problem.
    """
    if not disk.direct:
        yield (
            f"{disk.folder} ({disk.filesystem}) has no direct I/O: all traffic goes through the "
            "page cache, which takes time and memory"
        )
    if 0 < min(disk.read_rate, disk.write_rate) < _SLOW:
        yield f"the disk of {disk.folder} is slow: it {_rates(disk)}{_price(disk, job)}"


def in_words(disk: DiskFacts) -> str:
    """Return a line about a disk: `/scratch (xfs), 1.7 TiB free, reads 2.9 GB/s, ...`."""
    return (
        f"{disk.folder} ({disk.filesystem or 'file system unknown'}), "
        f"{format_size(disk.free_bytes)} free, {_rates(disk)}"
    )


def _rates(disk: DiskFacts) -> str:
    if not disk.read_rate or not disk.write_rate:
        return "too little to measure its speed"
    return f"reads {_rate(disk.read_rate)}, writes {_rate(disk.write_rate)}"


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s < 1e9:
        return f"{bytes_per_s / 1e6:.0f} MB/s"
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def _price(disk: DiskFacts, job: JobConfig) -> str:
    """Return what a step will take on a disk, where its rates were measured."""
    homes = {
        "optimizer": job.offload.optimizer,
        "grad": job.offload.grad_tier,
        "param": job.offload.param,
    }
    traffic = [_TRAFFIC[state] for state, home in homes.items() if home == "disk"]
    if not traffic or not disk.read_rate or not disk.write_rate:
        return ""
    read = sum(each for each, _ in traffic)
    written = sum(each for _, each in traffic)
    seconds = 1e9 * (read / disk.read_rate + written / disk.write_rate)
    return (
        f", and a step reads {read} bytes of each parameter and writes {written}: about "
        f"{seconds:.0f} s for a billion parameters of this host"
    )
