"""Saving and loading while a model trains.

zrun beside torch.save, torch.distributed.checkpoint, and the disk itself.

    python benchmarks/checkpoint.py              50M parameters in fp32 with two moments, 6 rounds:
                                                 about 5 minutes
    python benchmarks/checkpoint.py --dir /mnt/nvme --rounds 10
    python benchmarks/checkpoint.py --quick      a small model, 1 round: a test of the harness

One process trains one model, and saves it after the first of every six steps: in every way in turn,
forwards in one round and backwards in the next, and once not at all. zrun saves with the
`Checkpointer` of a job, and loads with the loader of one. A save ends when the bytes are on the
disk: torch.save is followed by an fsync, the others do that themselves. The stall is the time that
the loop spends in calls to save, and in updates that wait until what they change is copied; beside
it the loop loses what makes its steps longer. Before each save the disk has nothing left to write,
before each load the files are dropped from the page cache. A round before the first is measured for
its peak of memory only.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from render import render

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # zrun without installing it

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash

import zrun_core
from zrun_core.checkpoint.checkpointer import Checkpointer, versions
from zrun_core.checkpoint.digest import digest
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.rank_save import RunInfo
from zrun_core.checkpoint.resume import load_newest
from zrun_core.checkpoint.shard_file import as_bytes
from zrun_core.distributed.rng import Streams
from zrun_core.library.model import ModelHandle
from zrun_core.models.gpt import gpt
from zrun_core.spine.sections.checkpoint import CheckpointConfig
from zrun_core.spine.spec import ResumeSpec

TIMES = ("disk_write_s", "disk_read_s", "gather_s", "gather_digest_s", "copy_s")
MEASURED = ("save_s", "stall_s", "lost_s", "load_s", "peak")
STEPS = 6  # of a loop; a save follows the first
_BLOCK = 8 * 2**20
_PIECE = 2**20
State = dict[str, torch.Tensor]  # f"{state}/{name}", flat views of the memory that is trained


class Training:
    """A GPT of 8 blocks, 512 wide, with 50k tokens.

    50.9M parameters in fp32, with Adam's two moments.
    """

    def __init__(self, quick: bool) -> None:
        shape = (
            {"dim": 64, "vocab_size": 1000, "depth": 2}
            if quick
            else {"dim": 512, "vocab_size": 50304, "depth": 8}
        )
        self._ids = torch.randint(shape["vocab_size"], (1, 33))
        self._model = zrun_core.shard(lambda: gpt(heads=8, seq_len=32, **shape))  # type: ignore[arg-type]
        self._optimizer = zrun_core.optimizer(self._model, "adamw", lr=1e-4)
        handle = ModelHandle.of(self._model, "Training")
        self.comm, self.world = handle.run._comm, handle.sharded.mesh.world
        self.model_state = TimedState(handle.sharded)
        self.step()  # so that the optimizer has its state
        self.num_bytes = sum(tensor.nbytes for tensor in self.state().values())

    def step(self) -> None:
        self._model(self._ids[:, :-1], labels=self._ids[:, 1:]).backward()
        self._optimizer.step()

    def state(self) -> State:
        return {f"{part.state}/{part.tensor}": part.data for part in self.model_state.write_items()}

    def digests(self) -> dict[str, str]:
        return {key: digest(as_bytes(tensor).data) for key, tensor in self.state().items()}


class Way(ABC):
    """A way to save and load, and what was measured.

    Seconds, and bytes beyond those of a loop that saves nothing.
    """

    name: str
    loads = True

    def __init__(self, training: Training, root: Path) -> None:
        self.training = training
        self.folder = root / self.name.replace(" ", "-")
        self.save_s: list[float] = []
        self.stall_s: list[float] = []
        self.lost_s: list[float] = []
        self.load_s: list[float] = []
        self.peak: list[int] = []

    @abstractmethod
    def after_step(self, number: int) -> None:
        """Between two steps of the loop; the save begins in that after step 0."""

    def waited_s(self) -> float:
        """Seconds of the loop, since this was asked last, in which steps waited for a save."""
        return 0.0

    @abstractmethod
    def finish(self) -> float:
        """Wait for what goes on behind; seconds since the save began, until it was there."""

    @abstractmethod
    def load(self) -> None:
        """Fill the model and its optimizer."""

    @property
    def timed(self) -> list[list[float]]:
        return [self.save_s, self.stall_s, self.lost_s, self.load_s]


class NoSave(Way):
    """A loop that saves nothing."""

    name = "no save"
    loads = False

    def __init__(self, training: Training, root: Path) -> None:
        super().__init__(training, root)
        self.loop_s: list[float] = []

    def after_step(self, number: int) -> None:
        pass

    def finish(self) -> float:
        return 0.0

    def load(self) -> None:
        pass


class Zrun(Way):
    """The saves of a job, in the order in which a trainer calls them.

    The memory of a copy is kept, as there.
    """

    name = "zrun"
    in_background = False

    def __init__(self, training: Training, root: Path) -> None:
        super().__init__(training, root)
        self._told: list[dict[str, Any]] = []
        config = CheckpointConfig.model_validate(
            {"every": STEPS, "keep": 2, "async": self.in_background}
        )
        folder, about = CheckpointFolder(self.folder), RunInfo("benchmark", {}, versions())
        streams = Streams(0, training.comm.device, dp=training.world.index)
        self._saves = Checkpointer(
            folder,
            training.model_state,
            streams,
            config,
            training.comm,
            training.world,
            about,
            lambda **fields: self._told.append(fields),
        )
        self._step = 0

    def after_step(self, number: int) -> None:
        if number == 0:
            self._step = (self._step // STEPS + 1) * STEPS  # a multiple is due
        else:
            self._step += 1
        self._saves.update(self._saves.contribution())
        self._saves.after_step(self._step, dict)

    def finish(self) -> float:
        self._saves.finish()
        (fields,) = self._told
        self._told.clear()
        if "seconds" not in fields:
            sys.exit(f"{self.name}: {fields}")
        self._saves.finish_pruning()  # the next measurement has the disk for itself
        return float(fields["seconds"])

    def load(self) -> None:
        load_newest(
            ResumeSpec(folder=str(self.folder)),
            self.training.model_state,
            self.training.comm,
            self.training.world,
        )


class TimedState(ModelState):
    """Takes the time in which updates wait."""

    waited_s = 0.0

    def before_update(self, call: Callable[[], None]) -> None:
        def timed() -> None:
            start = time.perf_counter()
            call()
            self.waited_s += time.perf_counter() - start

        super().before_update(timed)


class ZrunBehind(Zrun):
    """From a copy, while training goes on."""

    name = "zrun, behind"
    in_background = True
    loads = False

    def waited_s(self) -> float:
        waited, self.training.model_state.waited_s = self.training.model_state.waited_s, 0.0
        return waited


class _Once(Way):
    """A way that is one call."""

    def after_step(self, number: int) -> None:
        if number == 0:
            self.folder.mkdir()
            self._start = time.perf_counter()
            self.save(self.training.state())
            self._end = time.perf_counter()

    @abstractmethod
    def save(self, state: State) -> None:
        """Save, or begin to."""

    def finish(self) -> float:
        return self._end - self._start


class TorchSave(_Once):
    name = "torch.save + fsync"

    def save(self, state: State) -> None:
        with (self.folder / "state.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self) -> None:
        loaded = torch.load(self.folder / "state.pt", weights_only=True)
        for key, tensor in self.training.state().items():
            tensor.copy_(loaded[key])


class Dcp(_Once):
    name = "DCP save"

    def save(self, state: State) -> None:
        dcp.save(state, checkpoint_id=self.folder)

    def load(self) -> None:
        dcp.load(self.training.state(), checkpoint_id=self.folder)


class DcpBehind(Dcp):
    name = "DCP async_save"
    loads = False

    def save(self, state: State) -> None:
        self._is_there = threading.Event()
        self._future: Any = dcp.async_save(state, checkpoint_id=self.folder)
        self._future.add_done_callback(self._note)

    def _note(self, _: object) -> None:
        self._end_behind = time.perf_counter()
        self._is_there.set()

    def finish(self) -> float:
        self._future.result()
        self._is_there.wait()
        return self._end_behind - self._start


# The disk itself


def disk_write(path: Path, num_bytes: int) -> None:
    """Blocks of 8 MiB past the page cache, four at once, into reserved space."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    os.posix_fallocate(file, 0, num_bytes)
    block = mmap.mmap(-1, _BLOCK)
    block.write(os.urandom(_BLOCK))
    _at_once(lambda offset, count: os.pwrite(file, memoryview(block)[:count], offset), num_bytes)
    os.fsync(file)
    os.close(file)


def disk_read(path: Path, num_bytes: int) -> None:
    """Blocks of 8 MiB past the page cache, four at once."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    local = threading.local()

    def read(offset: int, count: int) -> int:
        if not hasattr(local, "block"):
            local.block = mmap.mmap(-1, _BLOCK)
        return os.preadv(file, [memoryview(local.block)[:count]], offset)

    _at_once(read, num_bytes)
    os.close(file)


def _at_once(call: Callable[[int, int], int], num_bytes: int) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = pool.map(
            lambda offset: call(offset, min(_BLOCK, num_bytes - offset)),
            range(0, num_bytes, _BLOCK),
        )
        assert sum(done) == num_bytes


def drop_from_cache(folder: Path) -> None:
    """Make the next read of every file come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def resident(key: str) -> int:
    """Bytes, from the kernel's account of this process."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{key}:")
    )
    return int(line.split()[1]) * 1024


# Measuring


def measure(way: Way, plain: NoSave | None) -> float:
    """A loop with one save, and a load of what was saved.

    Returns the seconds of the loop, its calls included.

    Args:
        plain: the loop that saves nothing, measured in the same round before.
    """
    gc.collect()
    os.sync()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    total = stall = 0.0
    saved: dict[str, str] = {}
    for number in range(STEPS):
        start = time.perf_counter()
        way.training.step()
        total += time.perf_counter() - start
        if number == 0 and way.loads:
            saved = way.training.digests()
        start = time.perf_counter()
        way.after_step(number)
        stall += time.perf_counter() - start
    total += stall
    way.stall_s.append(stall + way.waited_s())
    way.save_s.append(way.finish())
    way.peak.append(resident("VmHWM") - before)
    if plain is not None:
        way.lost_s.append(total - plain.loop_s[-1])
        way.peak[-1] -= plain.peak[-1]
    if way.loads:
        for tensor in way.training.state().values():
            tensor.fill_(float("nan"))
        drop_from_cache(way.folder)
        start = time.perf_counter()
        way.load()
        way.load_s.append(time.perf_counter() - start)
        if way.training.digests() != saved:
            sys.exit(f"{way.name} does not load what it saved")
    if isinstance(way, _Once):
        shutil.rmtree(way.folder)
    return total


def measure_disk(
    times: dict[str, list[float]], state: State, room: torch.Tensor, root: Path
) -> None:
    """The same number of bytes, with nothing around.

    Args:
        room: memory for a copy of the state, used before.
    """
    path = root / "disk"
    num_bytes = sum(tensor.nbytes for tensor in state.values()) // 4096 * 4096
    os.sync()
    for name, call in (("disk_write_s", disk_write), ("disk_read_s", disk_read)):
        start = time.perf_counter()
        call(path, num_bytes)
        times[name].append(time.perf_counter() - start)
    path.unlink()
    for name, wanted in (("gather_s", False), ("gather_digest_s", True)):
        start = time.perf_counter()
        gather(state, wanted)
        times[name].append(time.perf_counter() - start)
    start = time.perf_counter()
    offset = 0
    for tensor in state.values():
        room[offset : offset + tensor.numel()].copy_(tensor)
        offset += tensor.numel()
    times["copy_s"].append(time.perf_counter() - start)


def gather(state: State, digests: bool) -> None:
    """Copy the state into blocks as a save does, with or without taking digests on the way."""
    block = np.frombuffer(mmap.mmap(-1, _BLOCK), dtype=np.uint8)
    for tensor in state.values():
        content, running = as_bytes(tensor), xxhash.xxh3_128()
        for begin in range(0, len(content), _PIECE):
            piece = content[begin : begin + _PIECE]
            if digests:
                running.update(piece.data)
            np.copyto(block[begin % _BLOCK : begin % _BLOCK + len(piece)], piece)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="a folder of the disk to measure (here)"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--quick", action="store_true", help="a small model, 1 round: a test of the harness"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("bench-checkpoint.json"), help="where the results go"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # of DCP about its own storage
    times: dict[str, list[float]] = {name: [] for name in TIMES}
    with tempfile.TemporaryDirectory(
        dir=options.dir.absolute(), prefix="bench-checkpoint-"
    ) as folder:
        root = Path(folder)
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1
        )
        zrun_core.init(device="cpu", threads=1)
        training = Training(options.quick)
        plain = NoSave(training, root)
        ways: list[Way] = [
            kind(training, root) for kind in (Zrun, ZrunBehind, TorchSave, Dcp, DcpBehind)
        ]
        room = torch.zeros(training.num_bytes // 4)
        for number in range(1 + (1 if options.quick else options.rounds)):
            plain.loop_s.append(measure(plain, None))
            for way in ways if number % 2 else reversed(ways):
                measure(way, plain)
            measure_disk(times, training.state(), room, root)
            if number == 0:
                for measured in (*(way.timed for way in ways), times.values()):
                    for each in measured:
                        each.clear()
        rows = [{"name": way.name, **{key: getattr(way, key) for key in MEASURED}} for way in ways]
        loops = [total / STEPS for total in plain.loop_s[1:]]
        options.json.write_text(
            json.dumps(
                {"bytes": training.num_bytes, "step_s": loops, "disk": times, "ways": rows},
                indent=1,
            )
        )
        print(table(ways, loops, times, training.num_bytes))
    sys.stdout.flush()
    os._exit(0)  # destroying a gloo group sometimes aborts


def table(
    ways: list[Way], loops: list[float], times: dict[str, list[float]], num_bytes: int
) -> str:
    """A row per way, then the disk and the targets."""
    columns = (
        "",
        "save s",
        "range",
        "GB/s",
        "stall s",
        "loop loses s",
        "peak MB",
        "load s",
        "GB/s",
    )
    lines = []
    for way in ways:
        save = statistics.median(way.save_s)
        load = statistics.median(way.load_s) if way.loads else None
        lines.append(
            [
                way.name,
                f"{save:.2f}",
                _range(way.save_s),
                f"{num_bytes / save / 1e9:.2f}",
                f"{statistics.median(way.stall_s):.2f}",
                f"{statistics.median(way.lost_s):.2f}",
                f"{max(way.peak) / 2**20:.0f}",
                *([f"{load:.2f}", f"{num_bytes / load / 1e9:.2f}"] if load else ["", ""]),
            ]
        )
    write, read, gathered, with_digests, copy = (statistics.median(times[name]) for name in TIMES)
    lines.append(
        [
            "disk, O_DIRECT",
            f"{write:.2f}",
            _range(times["disk_write_s"]),
            f"{num_bytes / write / 1e9:.2f}",
            "",
            "",
            "",
            f"{read:.2f}",
            f"{num_bytes / read / 1e9:.2f}",
        ]
    )
    lines.append(
        [
            "copy in memory",
            f"{copy:.2f}",
            _range(times["copy_s"]),
            f"{num_bytes / copy / 1e9:.2f}",
            *[""] * 5,
        ]
    )
    zrun, behind = ways[0], ways[1]
    targets = [
        _ratio(
            "zrun's save rate / the disk's", times["disk_write_s"], zrun.save_s, "at least 0.70"
        ),
        _ratio("zrun's load rate / the disk's", times["disk_read_s"], zrun.load_s, "at least 0.70"),
        [
            "what digests add / time of a save",
            f"{(with_digests - gathered) / statistics.median(zrun.save_s):.3f}",
            "",
            "at most 0.05",
        ],
        _ratio("stall of a save behind / copy", behind.stall_s, times["copy_s"], "at most 1.00"),
    ]
    about = (
        f"{num_bytes / 1e6:.0f} MB; a step takes {statistics.median(loops):.2f} s ({_range(loops)})"
    )
    return (
        f"{about}\n{render(columns, lines)}\n\n{render(('', 'median', 'range', 'target'), targets)}"
    )


def _range(values: list[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}"


def _ratio(name: str, above: list[float], below: list[float], target: str) -> list[str]:
    """A row of the targets, from the ratio in each round."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    return [name, f"{statistics.median(ratios):.2f}", _range(ratios), target]


if __name__ == "__main__":
    main()
