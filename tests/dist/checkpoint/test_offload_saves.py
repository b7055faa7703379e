"""Saves of states elsewhere: the same bytes as without, and runs that go on at any placement."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from elsewhere import DISK, HOST, Ranks, check_slots, parts_of, sharded_at
from runs import job, losses, run
from toys import build, data, make_sharded, train_sharded

from zrun_core.checkpoint.checkpointer import Checkpointer
from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.initial_weights import load_weights
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.rank_save import RunInfo
from zrun_core.checkpoint.reader import Reader, Target
from zrun_core.checkpoint.snapshot import LateCopies, Snapshot
from zrun_core.checkpoint.step_index import open_index
from zrun_core.distributed.rng import Streams
from zrun_core.distributed.transport import Group
from zrun_core.errors import ExitCode, OffloadError, SaveError
from zrun_core.memory.buffers import ON_DEVICE, Placement
from zrun_core.spine.sections.checkpoint import CheckpointConfig, InitFromConfig
from zrun_core.tiers import stored
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.update.updates import Updates

PLACEMENTS: dict[str, tuple[int, Placement]] = {  # with a stage
    **{f"device, {stage}": (stage, ON_DEVICE) for stage in range(4)},
    "apart, 1": (1, Placement(grad=HOST, optimizer=HOST)),
    "apart, half, 2": (2, Placement(grad=HOST, optimizer=HOST, fraction=0.5)),
    "apart, all, 3": (3, Placement(param=HOST, grad=HOST, optimizer=HOST)),
    "disk, 0": (0, Placement(grad=DISK, optimizer=DISK)),
    "disk, all, 3": (3, Placement(param=DISK, grad=DISK, optimizer=DISK)),
    "disk parameters, 3": (3, Placement(param=DISK)),
    "mixed, 3": (3, Placement(param=DISK, grad=HOST, optimizer=HOST)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16", "optim": {"clip": 0.05}},
    "lion": {"precision": "bf16", "optim": {"name": "lion", "moments": "bf16"}},
    "lamb": {"optim": {"name": "lamb"}},
}
SAVED_AT = 3
ALONE = Group("host", (0,), 0, None)


def make(place: str, disk: str, settings: dict[str, Any], **more: Any) -> ShardedModel:
    stage, placement = PLACEMENTS[place]
    return sharded_at(stage, placement, disk, settings, **more)


def saver(sharded: ShardedModel, folder: str) -> Checkpointer:
    def tell(**fields: Any) -> None:
        assert "warning" not in fields, fields

    return Checkpointer(
        CheckpointFolder(Path(folder)),
        ModelState(sharded),
        Streams(0, sharded.comm.device, dp=sharded.mesh.world.index),
        CheckpointConfig(on_save_error="stop"),
        sharded.comm,
        sharded.mesh.world,
        RunInfo("run", {}, {}),
        tell,
    )


def on_device(kept: dict[Any, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what `parts_of` gives of the whole model, alike at every placement."""
    return {name: value for name, value in kept.items() if isinstance(name, str)}


def step_of(folder: str) -> tuple[Path, Manifest]:
    path = CheckpointFolder(Path(folder)).step_path(SAVED_AT)
    return path, read_step(path)


def save(
    place: str, settings: dict[str, Any], folder: str, wait: bool, **more: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Save step 3, and go on: return the losses and parameters of what follows."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as disk:
        sharded = make(place, disk, settings, **more)
        train_sharded(sharded, data(SAVED_AT))
        saves = saver(sharded, folder)
        saves.save(SAVED_AT, dict, "due", wait=wait)
        losses = train_sharded(sharded, data(6)[SAVED_AT:])
        saves.finish()
        saves.close()
        check_slots(sharded)
        return losses, on_device(parts_of(sharded))


def resume(
    place: str, settings: dict[str, Any], folder: str, **more: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Go on from step 3, in a model that was another before."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as disk:
        sharded = make(place, disk, settings, **more)
        train_sharded(sharded, data(1))
        path, manifest = step_of(folder)
        state = ModelState(sharded)
        state.check(manifest)
        state.load(open_index(path, manifest))
        check_slots(sharded)
        losses = train_sharded(sharded, data(6)[SAVED_AT:])
        check_slots(sharded)
        return losses, on_device(parts_of(sharded))


def same(left: Any, right: Any) -> None:
    assert left[0] == right[0]
    assert left[1].keys() == right[1].keys()
    assert [key for key, value in left[1].items() if not torch.equal(value, right[1][key])] == []


# Every placement with mixed precision; of the other settings those that treat states otherwise. Of
# LAMB, the records of all units are needed at once: none may be on disk.
CASES = {
    "bf16": list(PLACEMENTS),
    "fp32": ["device, 0", "device, 3", "disk, 0", "disk, all, 3", "disk parameters, 3"],
    "lion": ["device, 1", "device, 3", "apart, 1", "disk, all, 3"],
    "lamb": ["device, 1", "device, 2", "apart, 1", "apart, half, 2"],
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("settings", CASES)
@pytest.mark.at_most(1)
def test_every_placement_writes_the_same_files_and_goes_on_from_them(
    ranks: Ranks, tmp_path: Path, num_ranks: int, settings: str
) -> None:
    pool = ranks(num_ranks)
    places = CASES[settings]
    for number, place in enumerate(places):
        folder = str(tmp_path / place)
        went_on = pool.run(save, place, SETTINGS[settings], folder, number % 2 == 0)
        # The stages come first: at one stage files are the same, wherever states live.
        stage, _ = PLACEMENTS[place]
        ours, theirs = step_of(folder), step_of(str(tmp_path / f"device, {stage}"))
        assert ours[1].divisions == theirs[1].divisions
        assert ours[1].tensors == theirs[1].tensors
        for info in ours[1].files:
            assert (ours[0] / info.name).read_bytes() == (theirs[0] / info.name).read_bytes()
        other = places[(number + 2) % len(places)]
        after = pool.run(resume, other, SETTINGS[settings], folder)
        for one, two in zip(went_on, after, strict=True):
            same(one, two)


@pytest.mark.parametrize("place", ["apart, all, 3", "disk, all, 3"])
@pytest.mark.at_most(1)
def test_delayed_updates_are_settled_and_stay_delayed(
    ranks: Ranks, tmp_path: Path, place: str
) -> None:
    """Updates count from the beginning of the run: some before the save are delayed, or none."""
    for delay_after in (1, 4):
        folder = str(tmp_path / str(delay_after))
        keys = {"schedule": "delayed", "delay_after": delay_after}
        went_on = ranks(1).run(save_delayed, place, folder, keys)
        after = ranks(1).run(resume_delayed, place, folder, keys)
        same(went_on[0], after[0])
        serial = ranks(1).run(resume, place, SETTINGS["bf16"], folder)
        assert serial[0][0] != after[0][0]


def save_delayed(place: str, folder: str, keys: dict[str, Any]) -> Any:
    return save(place, SETTINGS["bf16"], folder, wait=False, **keys)


def resume_delayed(place: str, folder: str, keys: dict[str, Any]) -> Any:
    return resume(place, SETTINGS["bf16"], folder, **keys)


def states_in(folder: str) -> dict[tuple[str, str], torch.Tensor]:
    """Every state of every tensor, whole, as the files of a step have it."""
    path, manifest = step_of(folder)
    targets = []
    for info in manifest.tensors:
        for state, dtype in info.states.items():
            memory = torch.empty(info.numel, dtype=getattr(torch, dtype))
            targets.append(Target((info.name,), state, info.shape, info.stride, 0, memory))
    Reader(open_index(path, manifest), ALONE).fill(targets)
    return {(target.names[0], target.state): target.memory for target in targets}


def load_and_save(place: str, settings: dict[str, Any], source: str, folder: str) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as disk:
        sharded = make(place, disk, settings)
        path, manifest = step_of(source)
        ModelState(sharded).load(open_index(path, manifest))
        saves = saver(sharded, folder)
        saves.save(SAVED_AT, dict, "due")
        saves.close()
        check_slots(sharded)


def test_other_numbers_of_ranks_have_the_same_states(ranks: Ranks, tmp_path: Path) -> None:
    settings = SETTINGS["lion"]
    source = str(tmp_path / "source")
    ranks(2).run(save, "disk, all, 3", settings, source, False)
    before = states_in(source)
    assert {state for _, state in before} == {"value", "exp_avg"}
    for num_ranks, place in [(1, "disk, 0"), (3, "mixed, 3"), (1, "device, 1"), (2, "apart, 1")]:
        folder = str(tmp_path / f"{num_ranks} {place}")
        ranks(num_ranks).run(load_and_save, place, settings, source, folder)
        after = states_in(folder)
        assert after.keys() == before.keys()
        assert [key for key, value in before.items() if not torch.equal(value, after[key])] == []


@pytest.mark.parametrize("place", ["apart, all, 3", "disk, all, 3", "mixed, 3"])
@pytest.mark.parametrize("how", ["update", "gathered"])
def test_what_changes_states_elsewhere_waits_for_a_save_that_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, how: str
) -> None:
    """The save reads once the change has begun, and has had the time to end without it."""
    begun = threading.Event()
    wait_for_readers = Updates.wait_for_readers
    make_copies = LateCopies.make

    def tell(updates: Updates) -> None:
        begun.set()
        wait_for_readers(updates)

    def make_late(copies: LateCopies) -> None:
        begun.wait(3.0)
        time.sleep(0.2)
        make_copies(copies)

    sharded = make(place, str(tmp_path), {})
    train_sharded(sharded, data(SAVED_AT))
    saves = saver(sharded, str(tmp_path / "before"))
    saves.save(SAVED_AT, dict, "due")
    saves.close()
    monkeypatch.setattr(Updates, "wait_for_readers", tell)
    monkeypatch.setattr(LateCopies, "make", make_late)
    saves = saver(sharded, str(tmp_path / "after"))
    saves.save(SAVED_AT, dict, "due", wait=False)
    if how == "update":
        train_sharded(sharded, data(1))
        sharded.settle_updates()
    else:
        with sharded.gathered() as module:
            for param in module.parameters():
                param.fill_(7.0)
    saves.finish()
    saves.close()
    before, after = (
        list(open_index(*step_of(str(tmp_path / each))).fragments()) for each in ("before", "after")
    )
    assert before == after
    check_slots(sharded)


@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_that_fails_during_a_save_is_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    sharded = make("disk, all, 3", str(tmp_path), {})
    train_sharded(sharded, data(1))
    sharded.settle_updates()

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    saves = saver(sharded, str(tmp_path / "saved"))
    monkeypatch.setattr(os, "preadv", failing)

    def save() -> None:
        saves.save(SAVED_AT, dict, "due", wait=wait)
        saves.finish()

    with pytest.raises(SaveError, match=r"^step 3 is not saved: cannot read the .* Input/output"):
        save()
    assert SaveError.exit_code is ExitCode.SAVE
    sharded.updates.wait_for_readers()  # nobody reads any more
    with pytest.raises(OffloadError, match="the disk fails"):
        train_sharded(sharded, data(1))
    saves.close()


def test_a_save_in_the_background_copies_nothing_that_is_elsewhere(tmp_path: Path) -> None:
    sharded = make("disk, all, 3", str(tmp_path), {})
    train_sharded(sharded, data(1))
    items = ModelState(sharded).write_items()
    assert items
    assert {item.state for item in items} == {"value", "exp_avg", "exp_avg_sq"}
    assert not any(isinstance(item.data, torch.Tensor) for item in items)
    snapshot = Snapshot(sharded.comm.device)
    kept, late = snapshot.take(items)
    assert kept == items
    assert (late.pairs, late.reads_elsewhere) == ([], True)
    assert snapshot._memory is not None
    assert snapshot._memory.numel() == 0


@pytest.mark.thorough
def test_a_save_reads_into_slots_that_updates_leave_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it takes no memory for them, whether the loop waits or goes on."""
    taken = Mock(wraps=stored.byte_buffer)
    monkeypatch.setattr(stored, "byte_buffer", taken)
    torch.manual_seed(1)
    linears = [torch.nn.Linear(*sizes, bias=False) for sizes in ((1024, 3072), (3072, 1024))]
    module = torch.nn.Sequential(*linears)
    place = Placement(optimizer=DISK)
    sharded = make_sharded(module, 3, placement=place, disk_folder=str(tmp_path), bucket=4 << 20)

    def train() -> None:
        batch = (torch.ones(2, 1024),)
        train_sharded(sharded, [batch], loss_of=lambda model, part: model(*part).square().mean())

    train()
    assert sharded.tiers is not None
    held = sharded.tiers.slot_bytes
    assert held >= 3 * 4 * (8 << 20)  # there is room for four blocks in one slot
    for wait in (True, False):
        saves = saver(sharded, str(tmp_path / f"saved-{wait}"))
        saves.save(SAVED_AT, dict, "due", wait=wait)
        train()
        saves.close()
    taken.assert_not_called()
    assert sharded.tiers.slot_bytes == held
    check_slots(sharded)


def test_weights_from_elsewhere_fill_every_placement(tmp_path: Path) -> None:
    """`init_from` fills units one after the other; what it has no value for stays."""
    torch.manual_seed(2)
    state = build().state_dict()
    missing = state.pop("last.weight")
    source = tmp_path / "weights.pt"
    torch.save({name: torch.full_like(value, 0.25) for name, value in state.items()}, source)
    config = InitFromConfig(path=str(source), strict=False)
    for place in ("disk, all, 3", "apart, all, 3", "disk parameters, 3"):
        sharded = make(place, str(tmp_path), SETTINGS["bf16"])
        train_sharded(sharded, data(2))
        own = on_device(parts_of(sharded))["last.weight"]
        assert not torch.equal(own, missing)
        load_weights(config, ModelState(sharded), ALONE)
        check_slots(sharded)
        found = on_device(parts_of(sharded))
        assert torch.equal(found.pop("last.weight"), own)
        assert all((value == 0.25).all() for value in found.values())


@pytest.mark.thorough
def test_a_job_goes_on_from_a_disk_on_the_device_and_back(ranks: Ranks, tmp_path: Path) -> None:
    """A model with tied and frozen parameters and with running statistics, through the trainer."""
    disk = tmp_path / "disk"
    disk.mkdir()
    away = {"optimizer": "disk", "grad": "disk", "param": "disk", "dir": str(disk)}
    keys = {"zero": 3, "precision": "bf16", "checkpoint": {"every": 1, "async": True}}
    whole = ranks(2).run(run, job(**keys), str(tmp_path / "whole"))
    for name, first, second in (("down", away, {}), ("up", {}, away)):
        cut = ranks(2).run(run, job(**keys, offload=first), str(tmp_path / name), None, 5)
        rest = ranks(2).run(run, job(**keys, offload=second), str(tmp_path / name), {})
        assert [each["error"] for each in (*cut, *rest)] == [""] * 4
        assert {**losses(cut[0]), **losses(rest[0])} == losses(whole[0])
        assert [each["digest"] for each in rest] == [each["digest"] for each in whole]
