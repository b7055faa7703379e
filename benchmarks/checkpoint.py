"""Saving and loading a training state: zrun's store beside torch.save and torch.distributed.checkpoint, and the disk.

    python benchmarks/checkpoint.py              50M parameters in fp32 with two moments, 6 rounds: about 2 minutes
    python benchmarks/checkpoint.py --dir /mnt/nvme --rounds 10
    python benchmarks/checkpoint.py --quick      a small state, 2 rounds: a test of the harness

One process holds the state and saves it in every way in turn, forwards in one round and backwards in the next. A save
ends when the bytes are on the disk: torch.save is followed by an fsync, the others do that themselves. Before each save
the disk has nothing left to write, before each load the files are dropped from the page cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from render import render

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # zrun without installing it

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash

from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.manifest import Manifest, TensorInfo
from zrun_core.checkpoint.shard_file import Part, as_bytes, read_fragment, write_shard

STATES = ("value", "exp_avg", "exp_avg_sq")
TIMES = ("disk_write_s", "disk_read_s", "gather_s", "gather_digest_s", "copy_s")
_BLOCK = 8 * 2**20
_PIECE = 2**20
State = dict[str, torch.Tensor]  # f"{state}/{name}"


def make_state(quick: bool) -> State:
    """A GPT of 8 blocks, 512 wide, with 50k tokens: 50.9M parameters, in fp32 with Adam's two moments."""
    width, vocab, depth = (64, 1000, 2) if quick else (512, 50304, 8)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (vocab, width)}
    for index in range(depth):
        block = f"blocks.{index}"
        shapes |= {f"{block}.norm1.weight": (width,), f"{block}.norm2.weight": (width,)}
        shapes |= {f"{block}.attention.qkv.weight": (3 * width, width), f"{block}.attention.out.weight": (width, width)}
        shapes |= {f"{block}.up.weight": (4 * width, width), f"{block}.down.weight": (width, 4 * width)}
    return {f"{state}/{name}": torch.randn(shape) for name, shape in shapes.items() for state in STATES}


# Ways to save and to load. Each saves into an empty folder, and returns a function that waits for what goes on behind.


def _nothing() -> None:
    pass


def _store_parts(state: State) -> list[Part]:
    parts = []
    for key, tensor in state.items():
        kind, name = key.split("/", 1)
        parts.append(Part(name, kind, 0, tensor.numel(), tensor.reshape(-1)))
    return parts


def zrun_save(state: State, folder: Path) -> Callable[[], None]:
    checkpoints = CheckpointFolder(folder / "checkpoints")
    tmp = checkpoints.begin(1)
    info, fragments = write_shard(tmp / "rank-00000.safetensors", _store_parts(state))
    infos = [
        TensorInfo(key[6:], tuple(tensor.shape), tensor.stride(), "float32", "param", (), {})
        for key, tensor in state.items()
        if key.startswith("value/")
    ]
    checkpoints.commit(
        tmp,
        Manifest(
            step=1, run_id="bench", versions={}, job={}, world_size=1, layout={}, progress={}, files=[info],
            tensors=infos, fragments=fragments, rank_states=[],
        ),
    )  # fmt: skip
    checkpoints.point_latest(1)
    return _nothing


def zrun_load(state: State, folder: Path) -> None:
    (found,) = CheckpointFolder(folder / "checkpoints").scan()
    assert found.manifest is not None
    for fragment in found.manifest.fragments:
        into = state[f"{fragment.state}/{fragment.tensor}"].view(-1)
        read_fragment(found.path, fragment, into[fragment.start : fragment.stop])


def zrun_async(state: State, folder: Path) -> Callable[[], None]:
    """Copy the state, and save the copy behind."""
    snapshot = {key: tensor.clone() for key, tensor in state.items()}
    failed: list[BaseException] = []

    def work() -> None:
        try:
            zrun_save(snapshot, folder)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()

    def wait() -> None:
        thread.join()
        if failed:
            raise failed[0]

    return wait


def torch_save(state: State, folder: Path) -> Callable[[], None]:
    with (folder / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return _nothing


def torch_load(state: State, folder: Path) -> None:
    loaded = torch.load(folder / "state.pt", weights_only=True)
    for key, tensor in loaded.items():
        state[key].copy_(tensor)


def dcp_save(state: State, folder: Path) -> Callable[[], None]:
    dcp.save(state, checkpoint_id=folder / "dcp")
    return _nothing


def dcp_async(state: State, folder: Path) -> Callable[[], None]:
    future: Any = dcp.async_save(state, checkpoint_id=folder / "dcp")
    return future.result  # type: ignore[no-any-return]


def dcp_load(state: State, folder: Path) -> None:
    dcp.load(state, checkpoint_id=folder / "dcp")


@dataclass
class Way:
    """A way to save and load, and what was measured: seconds, and bytes beyond those held before."""

    name: str
    save: Callable[[State, Path], Callable[[], None]]
    load: Callable[[State, Path], None] | None = None
    save_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)


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
        done = pool.map(lambda offset: call(offset, min(_BLOCK, num_bytes - offset)), range(0, num_bytes, _BLOCK))
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
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


# Measuring


def measure(way: Way, state: State, root: Path) -> None:
    """One save, and one load of what was saved."""
    folder = Path(tempfile.mkdtemp(dir=root))
    gc.collect()
    os.sync()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    start = time.perf_counter()
    wait = way.save(state, folder)
    way.stall_s.append(time.perf_counter() - start)
    wait()
    way.save_s.append(time.perf_counter() - start)
    way.peak.append(resident("VmHWM") - before)
    if way.load is not None:
        target = {key: torch.full_like(tensor, math.nan) for key, tensor in state.items()}
        drop_from_cache(folder)
        start = time.perf_counter()
        way.load(target, folder)
        way.load_s.append(time.perf_counter() - start)
        if not all(torch.equal(target[key], tensor) for key, tensor in state.items()):
            sys.exit(f"{way.name} does not load what it saved")
    shutil.rmtree(folder)


def measure_disk(times: dict[str, list[float]], state: State, root: Path) -> None:
    """The same number of bytes, with nothing around."""
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
    for tensor in state.values():
        tensor.clone()
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(), help="a folder of the disk to measure (here)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="a small state, 2 rounds: a test of the harness")
    parser.add_argument("--json", type=Path, default=Path("bench-checkpoint.json"), help="where the results go")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # of DCP about its own storage
    torch.set_num_threads(1)
    state = make_state(options.quick)
    times: dict[str, list[float]] = {name: [] for name in TIMES}
    ways = [
        Way("zrun", zrun_save, zrun_load),
        Way("zrun, behind", zrun_async),
        Way("torch.save + fsync", torch_save, torch_load),
        Way("DCP save", dcp_save, dcp_load),
        Way("DCP async_save", dcp_async),
    ]
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench-checkpoint-") as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        for number in range(2 if options.quick else options.rounds):
            for way in ways if number % 2 == 0 else reversed(ways):
                measure(way, state, Path(folder))
            measure_disk(times, state, Path(folder))
        num_bytes = sum(tensor.nbytes for tensor in state.values())
        rows = [{name: value for name, value in vars(way).items() if not callable(value)} for way in ways]
        options.json.write_text(json.dumps({"bytes": num_bytes, "disk": times, "ways": rows}, indent=1))
        print(table(ways, times, num_bytes))
    sys.stdout.flush()
    os._exit(0)  # destroying a gloo group sometimes aborts


def table(ways: list[Way], times: dict[str, list[float]], num_bytes: int) -> str:
    """A row per way, then the disk and the targets."""
    columns = ("", "save s", "range", "GB/s", "stall s", "peak MB", "load s", "GB/s")
    lines = []
    for way in ways:
        save, load = statistics.median(way.save_s), statistics.median(way.load_s) if way.load_s else None
        lines.append([
            way.name, f"{save:.2f}", f"{min(way.save_s):.2f}-{max(way.save_s):.2f}", f"{num_bytes / save / 1e9:.2f}",
            f"{statistics.median(way.stall_s):.2f}", f"{max(way.peak) / 2**20:.0f}",
            f"{load:.2f}" if load else "", f"{num_bytes / load / 1e9:.2f}" if load else "",
        ])  # fmt: skip
    write, read, gathered, with_digests, copy = (statistics.median(times[name]) for name in TIMES)
    spread = f"{min(times['disk_write_s']):.2f}-{max(times['disk_write_s']):.2f}"
    lines.append(
        ["disk, O_DIRECT", f"{write:.2f}", spread, f"{num_bytes / write / 1e9:.2f}", "", "", f"{read:.2f}",
         f"{num_bytes / read / 1e9:.2f}"]
    )  # fmt: skip
    zrun, behind = ways[0], ways[1]
    save = statistics.median(zrun.save_s)
    ratios = [disk / own for disk, own in zip(times["disk_write_s"], zrun.save_s, strict=True)]
    loads = [disk / own for disk, own in zip(times["disk_read_s"], zrun.load_s, strict=True)]
    targets = [
        [
            "zrun's save rate / the disk's",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f}-{max(ratios):.2f}",
            "0.70",
        ],
        [
            "zrun's load rate / the disk's",
            f"{statistics.median(loads):.2f}",
            f"{min(loads):.2f}-{max(loads):.2f}",
            "0.70",
        ],
        ["what digests add / time of a save", f"{(with_digests - gathered) / save:.3f}", "", "0.05"],
        ["stall of a save behind / copy", f"{statistics.median(behind.stall_s) / copy:.2f}", "", "1.00"],
    ]
    return f"{num_bytes / 1e6:.0f} MB\n{render(columns, lines)}\n\n{render(('', 'median', 'range', 'target'), targets)}"


if __name__ == "__main__":
    main()
