"""The model is built once per host, bit for bit as a plain loop builds it, and a failure fails on
every rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from toys import Net, make_sharded, world

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.user_code.build import Built, build_once_per_host
from zrun_core.user_code.meta_init import build_on_meta
from zrun_core.user_code.user import user_code

CPU = torch.device("cpu")
SEED = 5


def plain() -> nn.Module:
    return Net()


def from_numpy() -> nn.Module:
    model = Net()
    weights = np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32)
    model.first.weight = nn.Parameter(torch.from_numpy(weights))
    return model


def own_generator() -> nn.Module:
    model, generator = Net(), torch.Generator().manual_seed(9)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, device="cpu"))
    return model


def scaled_in_place() -> nn.Module:
    model = Net()
    for number, block in enumerate(model.blocks):
        block.down.weight.data.mul_(0.5 ** (number + 1))
        nn.init.zeros_(block.down.bias)
    return model


def loaded() -> nn.Module:
    model, generator = Net(), torch.Generator().manual_seed(2)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    model.load_state_dict(
        {n: torch.randn(shape, generator=generator, device="cpu") for n, shape in shapes.items()}
    )
    return model


def tied_and_formatted() -> nn.Module:
    """A tied weight, a batch norm in channels_last, a buffer that two modules share, and a bool
    buffer.
    """
    model = Net()
    model.head = nn.Linear(32, 32, bias=False)
    model.head.weight = model.first.weight
    model.conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(
        memory_format=torch.channels_last
    )
    model.register_buffer("table", torch.rand(4))
    model.conv.register_buffer("table", model.table)
    model.register_buffer("mask", torch.ones(3, 3).tril().bool(), persistent=False)
    return model


def looks_at_values() -> nn.Module:
    model = Net()
    with user_code("train.py:build failed"):
        scale = float(model.first.weight.std().detach())
    with torch.no_grad():
        model.last.weight.mul_(scale)
    return model


def keeps_a_tensor() -> nn.Module:
    model = Net()
    model.scales = {"residual": [torch.rand(3)]}
    model.register_buffer("count", torch.zeros(2))
    model.same = model.count
    return model


def build(factory: str, run_dir: str, init: str = "factory") -> Built:
    make: Callable[[], nn.Module] = globals()[factory]
    if init == "meta":
        return build_on_meta(make, SEED)
    return build_once_per_host(make, SEED, Path(run_dir) / "init", join().host, Comm(CPU))


def join() -> Mesh:
    rank, size = world()
    return Mesh.build(rank, ["host"] * size, size)


def shards(factory: str, run_dir: str, init: str = "factory") -> dict[str, Any]:
    """This rank's shards at stage 3, and the buffers."""
    built = build(factory, run_dir, init)
    sharded = make_sharded(built.module, 3, read=built.read)
    return {
        "layouts": sharded.layouts,
        "shards": {unit.name: unit.param.shard.numpy().copy() for unit in sharded.units},
        "buffers": {name: buffer.numpy().copy() for name, buffer in built.module.named_buffers()},
        "notes": built.notes,
    }


def expected_shard(layout: Any, index: int, values: dict[str, torch.Tensor]) -> np.ndarray:
    flat = torch.zeros(layout.padded_numel)
    for slot in layout.slots:
        flat.as_strided(slot.shape, slot.stride, slot.offset).copy_(values[slot.name])
    start, stop = layout.shard_range(index)
    found: np.ndarray = flat[start:stop].numpy()
    return found


FACTORIES = [plain, from_numpy, own_generator, scaled_in_place, loaded, tied_and_formatted]


@pytest.mark.parametrize("factory", [*FACTORIES, looks_at_values, keeps_a_tensor])
@pytest.mark.at_most(4)
def test_shards_are_bit_equal_to_the_plain_build(ranks, tmp_path, factory):
    torch.manual_seed(SEED)
    model = factory()
    values = {name: param.detach() for name, param in model.named_parameters()}
    for rank, run in enumerate(ranks(2).run(shards, factory.__name__, str(tmp_path))):
        for layout in run["layouts"]:
            expected = expected_shard(layout, rank, values)
            assert (run["shards"][layout.name] == expected).all(), f"{layout.name} on rank {rank}"
        assert run["buffers"].keys() == dict(model.named_buffers()).keys()
        for name, buffer in model.named_buffers():
            assert (run["buffers"][name] == buffer.numpy()).all(), name
    assert not list(tmp_path.iterdir()), "the file is gone"


@pytest.mark.parametrize(
    ("factory", "reason"),
    [(looks_at_values, "meta"), (keeps_a_tensor, "keeps tensors that are no buffers")],
)
def test_a_factory_that_needs_values_runs_on_every_rank_and_says_so(
    ranks, tmp_path, factory, reason
):
    first, second = ranks(2).run(shards, factory.__name__, str(tmp_path))
    assert first["notes"] == ()
    assert "the model factory runs on every rank: " in second["notes"][0]
    assert reason in second["notes"][0]


def aliases(run_dir: str) -> tuple[bool, float]:
    module = build("keeps_a_tensor", run_dir).module
    module.count.add_(1)
    return module.same is module.count, float(module.same.sum())


def test_a_buffer_stays_the_attribute_that_it_also_is(ranks, tmp_path):
    assert ranks(2).run(aliases, str(tmp_path)) == [(True, 2.0), (True, 2.0)]


def test_init_meta_is_the_same_on_every_rank(ranks, tmp_path):
    runs = ranks(2).run(shards, "plain", str(tmp_path), "meta")
    built = build_on_meta(plain, SEED)
    values = {
        name: built.read(name, param).clone() for name, param in built.module.named_parameters()
    }
    for rank, run in enumerate(runs):
        for layout in run["layouts"]:
            assert (run["shards"][layout.name] == expected_shard(layout, rank, values)).all()


# Failures


def deeper_on_the_second_rank() -> nn.Module:
    return Net(depth=3 + world()[0])


def fails_on_the_first_rank() -> nn.Module:
    with user_code("train.py:build failed"):
        if world()[0] == 0:
            raise ValueError("no such pretrained model")
    return Net()


def fails_on_the_second_rank() -> nn.Module:
    with user_code("train.py:build failed"):
        if world()[0] == 1:
            raise ValueError("no such pretrained model")
    return Net()


def failure(factory: str, run_dir: str) -> tuple[str, str, list[str]]:
    try:
        build(factory, run_dir)
    except Exception as error:
        Comm(CPU).barrier(join().world)  # everybody is here: nobody hangs
        return type(error).__name__, str(error), os.listdir(run_dir)
    return "", "", os.listdir(run_dir)


@pytest.mark.parametrize(
    ("factory", "kinds", "messages"),
    [
        (
            deeper_on_the_second_rank,
            ["PeerError", "UserCodeError"],
            [
                "could not be built on rank 1",
                "builds different models on different ranks: param blocks.3",
            ],
        ),
        (
            fails_on_the_first_rank,
            ["UserCodeError", "PeerError"],
            ["no such pretrained model", "could not be built on rank 0"],
        ),
        (
            fails_on_the_second_rank,
            ["PeerError", "UserCodeError"],
            ["could not be built on rank 1", "no such pretrained model"],
        ),
    ],
)
def test_a_failure_fails_on_every_rank(ranks, tmp_path, factory, kinds, messages):
    runs = ranks(2).run(failure, factory.__name__, str(tmp_path))
    for (kind, text, files), expected_kind, message in zip(runs, kinds, messages, strict=True):
        assert kind == expected_kind
        assert message in text
        assert files == []


def test_a_file_that_cannot_be_written_fails_on_every_rank(ranks, tmp_path):
    (tmp_path / "init").touch()  # somebody else's
    first, second = ranks(2).run(failure, "plain", str(tmp_path))
    assert (first[0], second[0]) == ("FileExistsError", "PeerError")
