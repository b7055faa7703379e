"""The ZeRO stages change memory and traffic, never the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from toys import Net, data, full_state, make_sharded, train_plain, train_sharded, world


def build() -> Net:
    torch.manual_seed(1)
    return Net()


def train(stage: int, options: dict[str, Any], accumulation: int = 1, steps: int = 6) -> dict[str, Any]:
    sharded = make_sharded(build(), stage, **options)
    losses = train_sharded(sharded, data(steps), accumulation=accumulation)
    state = full_state(sharded)
    return {"losses": losses, "state": {name: value.numpy() for name, value in state.items()}}


def train_peer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Global mean losses by step of a model that averages its gradients over the ranks by itself."""
    rank, size = world()
    losses = []
    for x, y in data(steps):
        loss = model(x.chunk(size)[rank], y.chunk(size)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double() / size
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses


def ddp(steps: int = 6) -> dict[str, Any]:
    model = torch.nn.parallel.DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    losses = train_peer(model, optimizer, steps)
    return {"losses": losses, "state": {n: p.detach().numpy() for n, p in model.module.named_parameters()}}


def fsdp2(steps: int = 6) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = build(), init_device_mesh("cpu", (world()[1],))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train_peer(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), steps)


def same_bits(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["losses"] == right["losses"]
    for name, value in left["state"].items():
        assert (value == right["state"][name]).all(), name


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_stages_are_bit_equal_in_fp32(ranks, world_size):
    runs = [ranks(world_size).run(train, stage, {}) for stage in range(4)]
    for run in runs:
        for rank in range(world_size):
            same_bits(run[rank], runs[0][0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bit_equal_to_ddp_on_two_ranks(ranks, stage):
    same_bits(ranks(2).run(train, stage, {})[0], ranks(2).run(ddp)[0])


def test_losses_are_those_of_fsdp2(ranks):
    ours = ranks(2).run(train, 3, {})[0]["losses"]
    assert ours == pytest.approx(ranks(2).run(fsdp2)[0], abs=1e-6)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_equals_a_plain_loop(ranks, world_size, accumulation, stage):
    plain = train_plain(build(), data(6))
    ours = ranks(world_size).run(train, stage, {}, accumulation)[0]["losses"]
    assert ours == pytest.approx(plain, abs=2e-6)
