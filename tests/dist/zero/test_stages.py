"""The ZeRO stages change memory and traffic, never the result."""

from __future__ import annotations

import pytest
import torch
from toys import build, data, same_bits, train, train_ddp, train_peer, train_plain, world


def fsdp2() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = build(), init_device_mesh("cpu", (world()[1],))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train_peer(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_stages_are_bit_equal_in_fp32(ranks, world_size):
    runs = [ranks(world_size).run(train, stage, {}) for stage in range(4)]
    for run in runs:
        for rank in range(world_size):
            same_bits(run[rank], runs[0][0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bit_equal_to_ddp_on_two_ranks(ranks, stage):
    same_bits(ranks(2).run(train, stage, {})[0], ranks(2).run(train_ddp)[0])


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
