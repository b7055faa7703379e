"""States elsewhere in a loop of the user's own: the same bits as on the device."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from own_loop import state_of
from toys import build, data, split

import zrun_core
from zrun_core.errors import JobError

DISK = {"optimizer": "disk", "param": "disk"}


def train(stage: int, offload: Any, folder: str) -> dict[str, Any]:
    """Two backward calls per step, clipping, a save in the middle, and a load of it."""
    run = zrun_core.init(threads=1, patience_s=10.0)
    if isinstance(offload, dict):
        offload = {"dir": folder, **offload}
    model = zrun_core.shard(
        build,
        zero={"stage": stage, "bucket": 1 << 14},
        precision="bf16",
        accumulate=2,
        offload=offload,
    )
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2, clip=0.1)
    losses = []
    for number, batch in enumerate(data(5)):
        for k in range(2):
            loss = model(*split(split(batch, run.rank, run.world_size), k, 2))
            loss.backward()
            losses.append(run.mean(loss.item()))
        optimizer.step()
        if number == 2:
            zrun_core.save(f"{folder}/saved", model, step=number)
    zrun_core.load(f"{folder}/saved", model)
    with zrun_core.evaluation(model):
        losses.append(run.mean(model(*split(data(1)[0], run.rank, run.world_size)).item()))
    return {"losses": losses, **state_of(model)}


@pytest.mark.parametrize(("stage", "offload"), [(0, {"optimizer": "disk"}), (3, DISK)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loop_has_the_same_bits(ranks, tmp_path, world_size, stage, offload):
    (tmp_path / "here").mkdir()
    (tmp_path / "away").mkdir()
    here = ranks(world_size).run(train, stage, None, str(tmp_path / "here"))
    away = ranks(world_size).run(train, stage, offload, str(tmp_path / "away"))
    for own, other in zip(here, away, strict=True):
        assert own["losses"] == other["losses"]
        assert all((own[name] == other[name]).all() for name in own if name != "losses")


def warned(keys: dict[str, Any]) -> list[str]:
    zrun_core.init(threads=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        zrun_core.shard(build, **keys)
    return [str(each.message) for each in told]


@pytest.mark.parametrize("activations", [None, {"checkpoint": "full", "offload": "disk"}])
def test_a_disk_that_is_memory_is_warned_of(ranks, activations):
    keys = {"offload": {"dir": "/dev/shm"}, "activations": activations}
    if activations is None:
        keys["offload"]["optimizer"] = "disk"
    first, second = ranks(2).run(warned, keys)
    assert len(first) == 1
    assert "/dev/shm is tmpfs, which is memory: offloading to it saves none" in first[0]
    assert second == []


def refuse(offload: Any, stage: int, name: str) -> str:
    zrun_core.init(threads=1)
    try:
        model = zrun_core.shard(build, zero=stage, offload=offload)
        zrun_core.optimizer(model, name, lr=1e-2)
    except JobError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("offload", "stage", "name", "words"),
    [
        ("disc", 0, "adamw", "'device', 'host' or 'disk'"),
        ({"optimizer": "disk", "fraction": "auto"}, 0, "adamw", "write the share"),
        ({"param": "disk"}, 2, "adamw", "need zero=3"),
        ({"grad": "disk"}, 2, "adamw", "write optimizer: disk too"),
        ({"optimizer": "disk"}, 1, "lamb", "proposes the updates"),
    ],
)
def test_what_cannot_be_is_refused(ranks, offload, stage, name, words):
    assert words in ranks(1).run(refuse, offload, stage, name)[0]
