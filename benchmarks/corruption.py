"""What is found when checkpoints are damaged or cannot be written.

zrun, torch.distributed.checkpoint and torch.save.

    python benchmarks/corruption.py          every fault: about 2 minutes; the full disk needs root
    python benchmarks/corruption.py --quick      few cases: a test of the harness

All three save the same tensors. A case is one of

    found      loading raises, or saving does where saving is what goes wrong
    harmless   the tensors that are loaded are the ones that were saved
    SILENT     nothing is raised, and a tensor has other values, or a save that failed is reported
               as a success
"""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from render import render

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # zrun without installing it

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from zrun_core.checkpoint.divisions import part_start, single_unit
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.manifest_fields import rank_file
from zrun_core.checkpoint.manifest_parts import Division, SavedRank, TensorInfo
from zrun_core.checkpoint.shard_file import WriteItem, check_header, read_fragment, write_shard
from zrun_core.checkpoint.step_index import open_index

State = dict[str, torch.Tensor]
RAISED = (Exception, CheckpointException)  # which is no Exception
Fault = Callable[["System", Path, bool], Counter[str]]


def make_state(step: int) -> State:
    """1.2 MB of fp32 whose every element tells the step."""
    random_numbers = torch.Generator().manual_seed(step)
    return {
        f"layer{index}.weight": torch.randn(128, 600, generator=random_numbers) + step
        for index in range(4)
    }


class System(ABC):
    """A way to save the steps of a run below a folder."""

    name: str

    @abstractmethod
    def save(self, folder: Path, step: int) -> None:
        """Save a step, with an fsync."""

    @abstractmethod
    def load(self, folder: Path, step: int) -> State:
        """Load it, or raise."""

    @abstractmethod
    def path(self, folder: Path, step: int) -> Path:
        """What holds the step: a file or a folder."""

    @abstractmethod
    @contextmanager
    def failing_writes(self) -> Iterator[None]:
        """Writes fail as a disk does, in the thread that writes."""
        yield

    @abstractmethod
    @contextmanager
    def dying(self) -> Iterator[None]:
        """The process ends when about half of the bytes of a save are written."""
        yield

    def files(self, folder: Path, step: int) -> list[Path]:
        path = self.path(folder, step)
        return (
            sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        )


def _broken(*_: object, **__: object) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


class Zrun(System):
    name = "zrun"

    def path(self, folder: Path, step: int) -> Path:
        return CheckpointFolder(folder).step_path(step)

    def save(self, folder: Path, step: int) -> None:
        state = make_state(step)
        checkpoints = CheckpointFolder(folder)
        tmp = checkpoints.begin(step)
        try:
            halves = [
                [self._half(name, tensor.reshape(-1), rank) for name, tensor in state.items()]
                for rank in range(2)
            ]
            files = [
                write_shard(
                    tmp / rank_file(rank), half, SavedRank(rank, {}, {"order": None, "late": []})
                )
                for rank, half in enumerate(halves)
            ]
            infos = [
                TensorInfo(
                    name,
                    tuple(tensor.shape),
                    tensor.stride(),
                    "float32",
                    "param",
                    (),
                    {},
                    {"value": "float32"},
                )
                for name, tensor in state.items()
            ]
            units = [single_unit(info.name, [(info.name, info.numel)]) for info in infos]
            divided = [unit for unit in units if unit is not None]
            checkpoints.commit(
                tmp,
                Manifest(
                    step=step,
                    run_id="bench",
                    versions={},
                    job={},
                    world_size=2,
                    layout={},
                    progress={},
                    files=files,
                    tensors=infos,
                    divisions=[Division([0, 1], 2, divided)],
                ),
            )
        except Exception:
            checkpoints.discard(tmp)
            raise

    @staticmethod
    def _half(name: str, flat: torch.Tensor, rank: int) -> WriteItem:
        middle = part_start(flat.numel(), 1, 2, 1)
        start, stop = ((0, middle), (middle, flat.numel()))[rank]
        return WriteItem(name, "value", start, stop, flat[start:stop])

    def load(self, folder: Path, step: int) -> State:
        (found,) = (found for found in CheckpointFolder(folder).scan() if found.step == step)
        if found.manifest is None:
            raise ValueError(found.problem)
        state = {info.name: torch.empty(info.shape) for info in found.manifest.tensors}
        index = open_index(found.path, found.manifest)
        for info in found.manifest.files:
            check_header(found.path, info, index.content(info.name).header_digest)
        for fragment in index.fragments():
            read_fragment(
                found.path,
                fragment,
                state[fragment.tensor].view(-1)[fragment.start : fragment.stop],
            )
        return state

    @contextmanager
    def failing_writes(self) -> Iterator[None]:
        with mock.patch.object(os, "pwrite", _broken):
            yield

    @contextmanager
    def dying(self) -> Iterator[None]:
        left = [2]  # the fsync of the second of two files

        def fsync(file: int) -> None:
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)

        with mock.patch.object(os, "fsync", fsync):
            yield


class Dcp(System):
    name = "DCP, 4 threads"

    def path(self, folder: Path, step: int) -> Path:
        return folder / f"step-{step}"

    def save(self, folder: Path, step: int) -> None:
        writer = FileSystemWriter(self.path(folder, step), thread_count=4)
        dcp.save(make_state(step), storage_writer=writer, no_dist=True)

    def load(self, folder: Path, step: int) -> State:
        state = {name: torch.zeros_like(tensor) for name, tensor in make_state(step).items()}
        dcp.load(state, checkpoint_id=self.path(folder, step), no_dist=True)
        return state

    @contextmanager
    def failing_writes(self) -> Iterator[None]:
        def in_a_writer(mode: str) -> None:
            if threading.current_thread() is not threading.main_thread() and "w" in mode:
                _broken()

        with _opening(in_a_writer, nullcontext()):
            yield

    @contextmanager
    def dying(self) -> Iterator[None]:
        left = [3]  # the third of four files, one after the other

        def count(mode: str) -> None:
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)

        with _opening(count, threading.Lock()):
            yield


@contextmanager
def _opening(before: Callable[[str], None], held: AbstractContextManager[Any]) -> Iterator[None]:
    """DCP calls `before` with the mode of each file that it opens, and holds `held` while it is
    open.
    """
    real = FileSystem.create_stream

    @contextmanager
    def create_stream(system: FileSystem, path: Any, mode: str) -> Iterator[io.IOBase]:
        with held:
            before(mode)
            with real(system, path, mode) as stream:
                yield stream

    with mock.patch.object(FileSystem, "create_stream", create_stream):
        yield


class TorchSave(System):
    name = "torch.save"

    def path(self, folder: Path, step: int) -> Path:
        return folder / f"step-{step}.pt"

    def save(self, folder: Path, step: int) -> None:
        with self.path(folder, step).open("wb") as file:
            torch.save(make_state(step), file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, folder: Path, step: int) -> State:
        state: State = torch.load(self.path(folder, step), weights_only=True)
        return state

    @contextmanager
    def failing_writes(self) -> Iterator[None]:
        with mock.patch.object(
            os, "fsync", _broken
        ):  # where a disk that fails shows behind a page cache
            yield

    @contextmanager
    def dying(self) -> Iterator[None]:
        def half(file: int) -> None:
            os.ftruncate(file, os.fstat(file).st_size // 2)
            os._exit(9)

        with mock.patch.object(os, "fsync", half):
            yield


# Faults


def outcome(system: System, folder: Path, step: int) -> str:
    """What loading a step that was meddled with comes to."""
    try:
        loaded = system.load(folder, step)
        expected = make_state(step)
        same = loaded.keys() == expected.keys() and all(
            torch.equal(loaded[name], expected[name]) for name in expected
        )
    except RAISED:
        return "found"
    return "harmless" if same else "SILENT"


def bit_flips(system: System, folder: Path, quick: bool) -> Counter[str]:
    system.save(folder, 10)
    chance = random.Random(0)
    files = system.files(folder, 10)
    sizes = [file.stat().st_size for file in files]
    outcomes: Counter[str] = Counter()
    for _ in range(16 if quick else 256):
        (file,) = chance.choices(files, sizes)
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        outcomes[outcome(system, folder, 10)] += 1
        file.write_bytes(content)
    return outcomes


def truncations(system: System, folder: Path, quick: bool) -> Counter[str]:
    system.save(folder, 10)
    outcomes: Counter[str] = Counter()
    for file in system.files(folder, 10):
        content = file.read_bytes()
        for end in range(0, len(content), 2**17 if quick else 4096):
            os.truncate(file, end)
            outcomes[outcome(system, folder, 10)] += 1
            file.write_bytes(content)
    return outcomes


def missing(system: System, folder: Path, quick: bool) -> Counter[str]:
    system.save(folder, 10)
    outcomes: Counter[str] = Counter()
    for file in system.files(folder, 10):
        file.rename(folder / "away")
        outcomes[outcome(system, folder, 10)] += 1
        (folder / "away").rename(file)
    return outcomes


def of_another_step(system: System, folder: Path, quick: bool) -> Counter[str]:
    system.save(folder, 10)
    system.save(folder, 20)
    outcomes: Counter[str] = Counter()
    for mine, other in zip(system.files(folder, 20), system.files(folder, 10), strict=True):
        content = mine.read_bytes()
        shutil.copy(other, mine)
        outcomes[outcome(system, folder, 20)] += 1
        mine.write_bytes(content)
    return outcomes


def io_error(system: System, folder: Path, quick: bool) -> Counter[str]:
    with system.failing_writes():
        return Counter([_told(system, folder, 20)])


def _told(system: System, folder: Path, step: int) -> str:
    """Save where that cannot succeed."""
    try:
        system.save(folder, step)
    except RAISED:
        return "found"
    return "SILENT"


def killed(system: System, folder: Path, quick: bool) -> Counter[str]:
    """A step is there, and the next is saved under its name, as with one like `last`.

    zrun has no such thing.
    """
    system.save(folder, 10)
    step = 10 if isinstance(system, Zrun) else 20
    os.rename(system.path(folder, 10), system.path(folder, step))
    if (child := os.fork()) == 0:
        with system.dying():
            system.save(folder, 20)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 9:
        sys.exit(f"{system.name}: the process did not die where it should")
    try:
        loaded = system.load(folder, step)
    except RAISED:
        return Counter(["found, both steps lost"])
    whole = any(
        all(torch.equal(loaded[key], each[key]) for key in each)
        for each in (make_state(10), make_state(20))
    )
    return Counter(["harmless" if whole else "SILENT: a mix of both"])


def full_disk(system: System, folder: Path, quick: bool) -> Counter[str]:
    """With room for 0 to 90 % of a step, beside one that was saved before."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
    try:
        system.save(disk, 10)
        status = os.statvfs(disk)
        used = status.f_blocks - status.f_bfree
        outcomes: Counter[str] = Counter()
        for percent in range(0, 100, 10):
            blocks = (
                used
                + sum(file.stat().st_size for file in system.files(disk, 10))
                * percent
                // 100
                // 4096
            )
            subprocess.run(["mount", "-o", f"remount,size={blocks * 4096}", str(disk)], check=True)
            told = _told(system, disk, 20)
            kept = outcome(system, disk, 10) == "harmless"
            status = os.statvfs(disk)
            left = status.f_blocks - status.f_bfree > used
            outcomes[
                told
                + (", half a step is left" if left else "")
                + ("" if kept else ", OLD STEP LOST")
            ] += 1
            path = system.path(disk, 20)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return outcomes
    finally:
        subprocess.run(["umount", str(disk)], check=True)


FAULTS: dict[str, Fault] = {
    "a bit flipped, anywhere": bit_flips,
    "a file cut at each 4 KiB": truncations,
    "a file missing": missing,
    "a file of another step": of_another_step,
    "I/O error while writing": io_error,
    "disk full at 0 to 90 %": full_disk,
    "killed in mid-save": killed,
}


def main() -> None:
    """Run every fault on every system and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few cases: a test of the harness")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    threading.excepthook = lambda _: None  # of DCP's writers, whose errors go nowhere else
    torch.set_num_threads(1)
    systems = [Zrun(), Dcp(), TorchSave()]
    lines, silent = [], 0
    for name, fault in FAULTS.items():
        if fault is full_disk and os.geteuid() != 0:
            lines.append([name, "needs root", "", ""])
            continue
        line = [name]
        for system in systems:
            with tempfile.TemporaryDirectory(prefix="corruption-") as folder:
                outcomes = fault(system, Path(folder), options.quick)
            line.append("; ".join(f"{count} {text}" for text, count in sorted(outcomes.items())))
            if isinstance(system, Zrun):
                silent += sum(
                    count for text, count in outcomes.items() if "SILENT" in text or "LOST" in text
                )
        lines.append(line)
    print(render(("fault", *(system.name for system in systems)), lines))
    sys.exit(silent > 0)


if __name__ == "__main__":
    main()
