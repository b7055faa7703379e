"""Saves of states elsewhere: the same bytes as without, and runs that go on at any placement."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from test_offload import DISK, HOST, Ranks, late_copies, parts_of
from toys import build, data, make_sharded, train_sharded

from zrun_core.checkpoint.checkpointer import Checkpointer
from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.rank_save import RunInfo
from zrun_core.distributed.rng import Streams
from zrun_core.memory.buffers import ON_DEVICE, Placement
from zrun_core.spine.config import CheckpointConfig
from zrun_core.zero.sharded_model import ShardedModel

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


def make(place: str, disk: str, settings: dict[str, Any], **more: Any) -> ShardedModel:
    stage, placement = PLACEMENTS[place]
    is_apart = HOST in (placement.param, placement.grad, placement.optimizer)
    return make_sharded(
        build(),
        stage,
        placement=placement,
        disk_folder=disk,
        apart=late_copies() if is_apart else None,
        **settings,
        **more,
    )


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
    """What `parts_of` gives of the whole model, which is alike at every placement."""
    return {name: value for name, value in kept.items() if isinstance(name, str)}


def check_slots(sharded: ShardedModel) -> None:
    """Nobody has kept a piece of host memory."""
    sharded.settle_updates()
    if sharded.tiers is not None:
        assert sharded.tiers.slots_taken == {}


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
        state.load(path, manifest)
        check_slots(sharded)
        losses = train_sharded(sharded, data(6)[SAVED_AT:])
        check_slots(sharded)
        return losses, on_device(parts_of(sharded))


def same(left: Any, right: Any) -> None:
    assert left[0] == right[0]
    assert left[1].keys() == right[1].keys()
    assert [key for key, value in left[1].items() if not torch.equal(value, right[1][key])] == []


def places_for(settings: str) -> list[str]:
    """Of LAMB, the records of all units are needed at once: none may be on disk."""
    return [
        name
        for name, (_, placement) in PLACEMENTS.items()
        if settings != "lamb" or placement.optimizer is not DISK
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_placement_writes_the_same_files_and_goes_on_from_them(
    ranks: Ranks, tmp_path: Path, num_ranks: int, settings: str
) -> None:
    pool = ranks(num_ranks)
    places = places_for(settings)
    for number, place in enumerate(places):
        folder = str(tmp_path / place)
        went_on = pool.run(save, place, SETTINGS[settings], folder, number % 2 == 0)
        # The stages come first: at one stage files are the same, wherever states live.
        stage, _ = PLACEMENTS[place]
        ours, theirs = step_of(folder), step_of(str(tmp_path / f"device, {stage}"))
        assert ours[1].fragments == theirs[1].fragments
        assert ours[1].tensors == theirs[1].tensors
        for info in ours[1].files:
            assert (ours[0] / info.name).read_bytes() == (theirs[0] / info.name).read_bytes()
        other = places[(number + 2) % len(places)]
        after = pool.run(resume, other, SETTINGS[settings], folder)
        for one, two in zip(went_on, after, strict=True):
            same(one, two)
