"""A step is written, committed, read, verified and pruned.

The safetensors library opens what was written.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from checkpoint_toys import (
    fragments_of,
    rank_state,
    read_step_state,
    toy_state,
    write_files,
    write_step,
)
from safetensors import safe_open

from zrun_core.checkpoint import folder as store
from zrun_core.checkpoint.best import Best
from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.folder_lock import hold, release
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.manifest_fields import ITEM_BYTES
from zrun_core.checkpoint.manifest_parts import TensorInfo
from zrun_core.checkpoint.shard_file import (
    DTYPES,
    WriteItem,
    read_fragment,
    write_shard,
)
from zrun_core.checkpoint.verify import verify
from zrun_core.errors import CheckpointError, ExitCode, SaveError


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def steps(folder: CheckpointFolder) -> list[int]:
    return [found.step for found in folder.scan() if found.problem is None]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_was_saved_is_read(folder: CheckpointFolder, ranks: int) -> None:
    write_step(folder, 50, ranks)
    (found,) = folder.scan()
    assert (found.step, found.problem, found.path.name) == (50, None, "step-00000050")
    assert found.manifest is not None
    assert verify(found.path, found.manifest) == []
    read = read_step_state(found.path, found.manifest)
    for name, tensor in toy_state(50).items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_safetensors_opens_our_files(folder: CheckpointFolder) -> None:
    manifest = write_step(folder, 50, ranks=2)
    for info in manifest.files:
        with safe_open(folder.step_path(50) / info.name, framework="pt") as file:
            fragments = fragments_of(folder.step_path(50), manifest, info.name)
            assert set(file.keys()) == {*(fragment.key for fragment in fragments), "record"}
            for fragment in fragments:
                tensor = torch.empty(
                    fragment.stop - fragment.start, dtype=getattr(torch, fragment.dtype)
                )
                read_fragment(folder.step_path(50), fragment, tensor)
                assert torch.equal(file.get_tensor(fragment.key), tensor)


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_every_dtype(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    assert dtype.itemsize == ITEM_BYTES[name]
    data = (
        torch.arange(64, dtype=torch.uint8).remainder(2).view(dtype)
    )  # 0 and 1 are what a bool can be
    item = WriteItem("a", "value", 0, data.numel(), data)
    info = TensorInfo("a", (data.numel(),), (1,), name, "param", (), {}, {"value": name})
    manifest = write_files(tmp_path, 1, [[item]], [info])
    (fragment,) = fragments_of(tmp_path, manifest)
    assert fragment.dtype == DTYPES[dtype] == name
    with safe_open(tmp_path / fragment.file, framework="pt") as file:
        assert torch.equal(file.get_tensor("value/a").view(torch.uint8), data.view(torch.uint8))
    read = torch.empty_like(data)
    read_fragment(tmp_path, fragment, read)
    assert torch.equal(read.view(torch.uint8), data.view(torch.uint8))
    assert verify(tmp_path, manifest) == []


@pytest.mark.parametrize(
    "num_bytes", [0, 1, 4095, 4096, 2**23 - 4096, 2**23, 2**23 + 1, 3 * 2**23 + 4097]
)
def test_sizes_around_blocks(tmp_path: Path, num_bytes: int) -> None:
    data = torch.arange(num_bytes, dtype=torch.int32).to(torch.uint8)
    parts = [
        WriteItem("rng/0/a", "rank", 0, num_bytes, data),
        WriteItem("rng/0/b", "rank", 0, 3, torch.tensor([1, 2, 3])),
    ]
    manifest = write_files(tmp_path, 1, [parts], [], divisions=[])
    (info,) = manifest.files
    assert info.num_bytes == os.stat(tmp_path / info.name).st_size
    fragments = fragments_of(tmp_path, manifest)
    # The wider format first.
    assert [fragment.key for fragment in fragments] == ["rank/rng/0/b", "rank/rng/0/a"]
    read = torch.empty_like(data)
    read_fragment(tmp_path, fragments[1], read)
    assert torch.equal(read, data)


def test_only_the_owner_can_read(folder: CheckpointFolder) -> None:
    umask = os.umask(0)
    try:
        write_step(folder, 1)
    finally:
        os.umask(umask)
    for path in (folder.path, *folder.path.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_manifest_survives_json(folder: CheckpointFolder) -> None:
    manifest = write_step(folder, 7)
    assert Manifest.from_json(manifest.to_json()) == manifest == read_step(folder.step_path(7))


def test_newest_first(folder: CheckpointFolder) -> None:
    for step in (9, 100, 20):
        write_step(folder, step)
    assert steps(folder) == [100, 20, 9]
    assert folder.latest() == (20, None)


def test_no_folder_has_no_steps(folder: CheckpointFolder) -> None:
    assert folder.scan() == []
    assert folder.latest() == (None, None)
    assert folder.sweep() == []
    assert folder.prune(2) == []


def test_no_step_is_overwritten(folder: CheckpointFolder) -> None:
    write_step(folder, 5)
    before = (folder.step_path(5) / "manifest.json").read_bytes()
    with pytest.raises(SaveError, match="step-00000005 exists") as caught:
        folder.begin(5)
    assert caught.value.exit_code == ExitCode.SAVE == 8
    manifest = read_step(folder.step_path(5))
    tmp = folder.path / "step-00000005.tmp-00"
    os.rename(folder.step_path(5), tmp)
    folder.step_path(5).mkdir()  # a rename would replace an empty folder
    with pytest.raises(SaveError, match="exists"):
        folder.commit(tmp, manifest)
    assert (tmp / "manifest.json").read_bytes() == before


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(SaveError, match="File exists"):
        write_shard(tmp_path / "a", [], rank_state(0))
    assert (tmp_path / "a").read_text() == "mine"


@pytest.mark.parametrize("damage", ["missing", "short", "overlap"])
def test_commit_refuses_what_would_not_be_read(folder: CheckpointFolder, damage: str) -> None:
    manifest = write_step(folder, 5)
    tmp = folder.begin(6)
    for info in manifest.files:
        (tmp / info.name).write_bytes((folder.step_path(5) / info.name).read_bytes())
    if damage == "missing":
        (tmp / manifest.files[1].name).unlink()
    elif damage == "short":
        os.truncate(tmp / manifest.files[0].name, 5000)
    else:
        manifest.divisions.append(manifest.divisions[0])
    with pytest.raises(SaveError, match="cannot save step"):
        folder.commit(tmp, Manifest(**{**manifest.__dict__, "step": 6}))
    folder.discard(tmp)
    assert sorted(os.listdir(folder.path)) == ["latest", "step-00000005"]
    assert steps(folder) == [5]


def test_prune_keeps_the_newest(folder: CheckpointFolder) -> None:
    for step in range(1, 6):
        write_step(folder, step)
    assert folder.prune(3) == [2, 1]
    assert steps(folder) == [5, 4, 3]
    assert folder.prune(3) == []
    assert not list(folder.path.glob("*.tmp-*"))


def test_prune_leaves_the_best_alone(folder: CheckpointFolder) -> None:
    """Whatever else its file says; and it takes no place of the newest."""
    for step in range(1, 6):
        write_step(folder, step)
    best = Best(2, "loss", "min", 0.1)
    folder.point_best(best)
    assert folder.best() == (2, None)
    assert folder.best_so_far() == best
    assert folder.prune(2, dry_run=True) == [3, 1]
    assert folder.prune(2, thorough=True) == [3, 1]
    assert steps(folder) == [5, 4, 2]
    for text in (
        "",
        "step-00000002\n",
        "step-00000002 loss min nan\n",
        "step-00000009 loss min 1\n",
    ):
        (folder.path / "best").write_text(text)
        assert folder.best_so_far() is None
    (folder.path / "best").unlink()
    assert folder.prune(2) == [2]


def test_prune_never_below_two_valid(folder: CheckpointFolder) -> None:
    for step in range(1, 6):
        write_step(folder, step)
    os.unlink(folder.step_path(5) / "manifest.json")
    os.truncate(folder.step_path(3) / "rank-00000.safetensors", 100)
    assert folder.prune(2) == [1]
    assert steps(folder) == [4, 2]
    for keep in (1, 0, -1):
        with pytest.raises(ValueError, match="never kept"):
            folder.prune(keep)


def test_thorough_prune_counts_only_what_verifies(folder: CheckpointFolder) -> None:
    for step in range(1, 5):
        write_step(folder, step)
    with (folder.step_path(4) / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert folder.prune(2, thorough=True) == [1]
    assert [found.step for found in folder.scan()] == [4, 3, 2]


def flip_last_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def test_no_removal_rests_on_a_step_that_rotted(folder: CheckpointFolder) -> None:
    """Its manifest and its sizes are right."""
    for step in (1, 2, 3):
        write_step(folder, step)
    flip_last_bit(folder.step_path(2) / "rank-00001.safetensors")
    assert folder.prune(2) == []
    assert list(folder.damaged) == [2]
    assert "rank-00001.safetensors is damaged" in folder.damaged[2]
    write_step(folder, 4)
    assert folder.prune(2) == [2, 1]
    assert steps(folder) == [4, 3]


def test_a_step_that_stays_is_read_once(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before something is removed for it."""
    read: list[int] = []
    monkeypatch.setattr(store, "read_back", lambda path, manifest: read.append(manifest.step) or [])
    for step in range(1, 6):
        write_step(folder, step)
        folder.prune(3)
        folder.prune(3)
    assert steps(folder) == [5, 4, 3]
    assert read == [3, 4]
    folder.set_aside(5)
    write_step(folder, 5)
    write_step(folder, 6)
    folder.prune(3)
    assert read == [3, 4, 5]


def test_set_aside_frees_the_number(folder: CheckpointFolder) -> None:
    write_step(folder, 5)
    aside = folder.set_aside(5)
    assert aside.is_dir()
    assert folder.scan() == []
    write_step(folder, 5)
    assert steps(folder) == [5]


def test_sweep_removes_what_died(folder: CheckpointFolder) -> None:
    write_step(folder, 5)
    (folder.begin(6) / "rank-00000.safetensors").write_text("half")
    (folder.path / "latest.tmp-00").write_text("half")
    (folder.path / "step-00000007.tmp-mine").write_text("not ours")
    assert len(folder.sweep()) == 2
    assert sorted(os.listdir(folder.path)) == ["latest", "step-00000005", "step-00000007.tmp-mine"]


def test_errors_have_their_exit_code() -> None:
    assert CheckpointError.exit_code == ExitCode.CHECKPOINT == 9


def test_a_process_that_was_forked_does_not_hold_the_folder(tmp_path: Path) -> None:
    lock = hold(tmp_path)
    (is_there, says), (ours, theirs) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(theirs)
        os.write(says, b"!")
        os.read(ours, 1)  # until the test has ended
        os._exit(0)
    try:
        os.read(is_there, 1)
        with pytest.raises(SaveError, match=f"in use by process {os.getpid()} "):
            hold(tmp_path, patience_s=0)
        release(lock)
        release(hold(tmp_path, patience_s=0))
    finally:
        for each in (is_there, says, ours, theirs):
            os.close(each)
        os.waitpid(child, 0)
