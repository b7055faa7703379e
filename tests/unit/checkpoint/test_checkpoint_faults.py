"""Saves that fail or are cut short.

Told as such, the step before stays, and no step is ever half there.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toys import (
    fragments_of,
    rank_state,
    toy_infos,
    toy_parts,
    toy_state,
    write_files,
    write_step,
)
from recorded_disk import Disk, recording

from zrun_core.checkpoint import folder as store
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.manifest_parts import Fragment, TensorInfo
from zrun_core.checkpoint.shard_file import WriteItem, read_fragment, write_shard
from zrun_core.checkpoint.verify import verify
from zrun_core.errors import CheckpointError, SaveError

HERE = Path(__file__).parent
KILLS = os.environ.get("ZRUN_TEST_KILLS", "50")


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """With one step, 10."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    write_step(folder, 10, scale=8)
    return folder


def save(folder: CheckpointFolder, step: int) -> None:
    """Save a step the way a run does: what fails is discarded."""
    state = toy_state(step, scale=8)
    tmp = folder.begin(step)
    try:
        parts = [toy_parts(state, rank, 2) for rank in (0, 1)]
        folder.commit(tmp, write_files(tmp, step, parts, toy_infos(state)))
    except SaveError:
        folder.discard(tmp)
        raise
    folder.point_latest(step)
    folder.prune(2)


def valid(folder: CheckpointFolder) -> list[int]:
    """The steps that count; each is read whole."""
    found = [each for each in folder.scan() if each.manifest is not None]
    assert all(
        verify(each.path, each.manifest) == [] for each in found if each.manifest is not None
    )
    return [each.step for each in found]


def failing_after(
    monkeypatch: pytest.MonkeyPatch, limit: int, error: int, *, in_thread: bool = False
) -> None:
    """A disk that takes `limit` bytes, reserves nothing, and then fails."""
    real, written, lock = os.pwrite, [0], threading.Lock()

    def pwrite(file: int, data: Any, offset: int) -> int:
        if in_thread and threading.current_thread() is threading.main_thread():
            return real(file, data, offset)
        with lock:
            written[0] += len(data)
            if written[0] > limit:
                raise OSError(error, os.strerror(error))
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)


def step_bytes(folder: CheckpointFolder) -> int:
    return sum(path.stat().st_size for path in folder.step_path(10).iterdir())


@pytest.mark.parametrize("percent", range(0, 100, 10))
def test_disk_full_without_reservation(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, percent: int
) -> None:
    failing_after(monkeypatch, step_bytes(folder) * percent // 100, errno.ENOSPC)
    with pytest.raises(SaveError, match=r"No space left on device \(.* needed, .* free\)"):
        save(folder, 20)
    monkeypatch.undo()
    assert sorted(os.listdir(folder.path)) == ["latest", "step-00000010"]
    save(folder, 20)
    assert valid(folder) == [20, 10]


@pytest.mark.parametrize("error", [errno.EIO, errno.EDQUOT, errno.EROFS, errno.EBADF])
def test_error_in_a_writer_thread(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    failing_after(monkeypatch, 0, error, in_thread=True)
    with pytest.raises(SaveError, match=os.strerror(error)):
        save(folder, 20)
    assert valid(folder) == [10]


def test_only_the_last_of_many_blocks_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = torch.ones(11 * 2**20)
    failing_after(monkeypatch, data.nbytes - 1, errno.EIO, in_thread=True)
    with pytest.raises(SaveError, match="Input/output error"):
        write_shard(tmp_path / "a", [WriteItem("a", "value", 0, data.numel(), data)], rank_state(0))
    assert not (tmp_path / "a").exists()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def half(file: int, data: Any, offset: int) -> int:
        return real(file, data[: len(data) // 2 or len(data)], offset)  # not always whole pages

    monkeypatch.setattr(os, "pwrite", half)
    data = torch.randn(3 * 2**20)
    fragment = write_one(tmp_path, data)
    read = torch.empty_like(data)
    read_fragment(tmp_path, fragment, read)
    assert torch.equal(read, data)


def test_a_file_system_with_fewer_features(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither reserves space nor writes past the page cache, as some say only when it is tried."""
    real = os.pwrite

    def pwrite(file: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "posix_fallocate", raising(errno.EOPNOTSUPP))
    save(folder, 20)
    assert valid(folder) == [20, 10]


def test_a_write_of_nothing_is_an_error(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(SaveError, match="takes no more bytes"):
        save(folder, 20)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randn(2**20)
    fragment = write_one(tmp_path, data)
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, views, offset: real(file, [views[0][:100_001]], offset)
    )
    read = torch.empty_like(data)
    read_fragment(tmp_path, fragment, read)
    assert torch.equal(read, data)
    monkeypatch.setattr(os, "preadv", raising(errno.EIO))
    with pytest.raises(CheckpointError, match="Input/output error"):
        read_fragment(tmp_path, fragment, read)


def write_one(path: Path, data: torch.Tensor) -> Fragment:
    info = TensorInfo("a", (data.numel(),), (1,), "float32", "param", (), {}, {"value": "float32"})
    item = WriteItem("a", "value", 0, data.numel(), data)
    (fragment,) = fragments_of(path, write_files(path, 1, [[item]], [info]))
    return fragment


def raising(error: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return call


def test_the_folder_cannot_be_synced_after_the_rename(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is there: that is told, and what may still happen to it."""
    told, commit, sync = [], CheckpointFolder.commit, store._sync

    def fail(path: Path) -> None:
        if path == folder.path and folder.step_path(20).exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    monkeypatch.setattr(store, "_sync", fail)
    monkeypatch.setattr(CheckpointFolder, "commit", lambda *args: told.append(commit(*args)))
    monkeypatch.setattr(CheckpointFolder, "point_latest", lambda *_: None)
    save(folder, 20)
    assert told == [
        f"step 20 is saved, but {folder.path} cannot be synced: Input/output error; see the disk"
    ]
    assert valid(folder) == [20, 10]


CALLS = ("open", "pwrite", "posix_fallocate", "fsync", "rename", "replace", "mkdir")


def test_an_error_at_every_call(folder: CheckpointFolder) -> None:
    """Whichever call fails, the save does, unless the step was complete by then."""
    for number in itertools.count():
        left = [number]

        def failing(real: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] == -1:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return real(*arguments, **options)

            return call

        before = valid(folder)
        step = before[0] + 10
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, failing(getattr(os, name)))
            message = ""
            try:
                save(folder, step)
            except SaveError as error:
                message = str(error)
        after = valid(folder)
        assert len(after) >= min(len(before), 2)
        assert after[0] in (before[0], step)
        assert "Input/output error" in message or (message == "" and after[0] == step)
        if left[0] >= 0:
            break
    assert number > 25


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A file system of its own: a function that sets its options and returns its folder."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], capture_output=True
    ).returncode:
        pytest.skip("this container may not mount a file system")

    def options(text: str) -> Path:
        subprocess.run(["mount", "-o", f"remount,{text}", str(path)], check=True)
        return path

    yield options
    subprocess.run(["umount", str(path)], check=True)


def test_a_real_full_disk(small_disk: Callable[[str], Path]) -> None:
    """At 0 to 90 % of the bytes, then with room for all but the manifest, then read-only."""
    folder = CheckpointFolder(small_disk("size=64m") / "checkpoints")
    save(folder, 10)
    used = os.statvfs(folder.path)
    blocks = used.f_blocks - used.f_bfree
    shards = sum(
        -(-path.stat().st_size // 4096) for path in folder.step_path(10).glob("*.safetensors")
    )
    for percent in (*range(0, 100, 10), 100):
        small_disk(f"size={(blocks + shards * percent // 100) * 4096}")
        with pytest.raises(SaveError, match="No space left on device") as caught:
            save(folder, 20)
        assert ("manifest.json" in str(caught.value)) == (percent == 100)
        assert sorted(os.listdir(folder.path)) == ["latest", "step-00000010"]
    small_disk("size=64m,ro")
    with pytest.raises(SaveError, match="Read-only file system"):
        save(folder, 20)
    assert valid(folder) == [10]
    small_disk("rw")
    save(folder, 20)
    assert valid(folder) == [20, 10]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="Not a directory"):
        save(CheckpointFolder(tmp_path / "file" / "checkpoints"), 10)


def test_prune_that_is_cut_short(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is half removed is no step; what is left of it goes with the next sweep."""
    for step in (20, 30, 40):
        write_step(folder, step)

    def half(path: Path) -> None:
        (path / "manifest.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half)
        with pytest.raises(KeyboardInterrupt):
            folder.prune(2)
    assert [found.step for found in folder.scan()] == [40, 30, 10]
    assert all(found.problem is None for found in folder.scan())
    assert len(folder.sweep()) == 1
    assert folder.prune(2) == [10]


@pytest.mark.parametrize("mode", ["nothing", "names", "all", "some"])
@pytest.mark.at_most(2)
def test_power_loss_after_any_operation(tmp_path: Path, mode: str) -> None:
    """Every prefix of four saves with pruning leaves the step that was committed last, or the one
    on its way.
    """
    root = tmp_path / "root"
    root.mkdir()
    folder = CheckpointFolder(root / "gpt" / "a" / "checkpoints")
    acknowledged: list[tuple[int, int]] = []  # operations, step
    with recording(root) as log:
        folder.path.mkdir(0o700, parents=True)  # by a launcher, which waits for no disk
        for step in (1, 2, 3, 4):
            write_step(folder, step)
            acknowledged.append((len(log), step))
            folder.prune(2)
    disk, chance = Disk(root), random.Random(3)
    for done, operation in enumerate(log, start=1):
        disk.do(operation)
        left = tmp_path / "left"
        disk.power_loss(left, mode, chance)
        told = max((step for operations, step in acknowledged if operations <= done), default=0)
        steps = valid(CheckpointFolder(left / "gpt" / "a" / "checkpoints"))
        assert (steps[0] if steps else 0) in (told, told + 1), (done, operation[0])
        assert len(steps) >= min(told, 2)
        shutil.rmtree(left)
    assert len(log) > 60


@pytest.mark.thorough
def test_sigkill_at_every_call_and_at_random_instants(tmp_path: Path) -> None:
    """50 random instants; 1,000 with ZRUN_TEST_KILLS=1000.

    In memory if possible: a process that dies takes no disk.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=memory if os.access(memory, os.W_OK) else tmp_path
    ) as folder:
        command = [sys.executable, str(HERE / "kill_saves.py"), f"{folder}/checkpoints", KILLS]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600 + int(KILLS))
    assert result.returncode == 0, result.stdout + result.stderr
    assert ", 0 bad" in result.stdout
