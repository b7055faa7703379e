"""Where ranks, steps or parameters are not alike.

Late ranks, unused units, nested `gathered`, uneven groups.
"""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import DISK, HOST, sharded_at
from torch import nn
from toys import (
    Block,
    Net,
    build,
    data,
    full_state,
    make_sharded,
    train_plain,
    train_sharded,
    world,
)

from zrun_core.errors import UserCodeError
from zrun_core.memory.buffers import Placement, Tier
from zrun_core.zero.account import expected_traffic


def penalty_first(model: nn.Module, batch: Any) -> torch.Tensor:
    """Looks at parameters before any module runs, while the other rank is late to send what it
    updated.
    """
    if world()[0] == 1:
        time.sleep(0.05)
    penalty = sum(param.float().pow(2).sum() for param in model.parameters())
    return model(*batch) + 1e-2 * penalty


def train(stage: int, options: dict[str, Any]) -> list[float]:
    return train_sharded(make_sharded(build(), stage, **options), data(4), loss_of=penalty_first)


@pytest.mark.parametrize("options", [{}, {"persist_below": 300}, {"whole_blocks": True}])
@pytest.mark.at_most(1)
def test_parameters_looked_at_first_are_those_of_the_last_update(ranks, options):
    plain = train_plain(build(), data(4), loss_of=penalty_first)
    for stage in range(4):
        if stage == 3 and "whole_blocks" in options:
            continue  # compiled blocks: parameters are whole inside `gathered` only
        for losses in ranks(2).run(train, stage, options):
            assert losses == pytest.approx(plain, abs=2e-6), f"stage {stage}"


def train_elsewhere(tier: Tier, folder: str) -> list[float]:
    sharded = sharded_at(3, Placement(param=tier), folder, {})
    return train_sharded(sharded, data(4), loss_of=penalty_first)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("tier", [HOST, DISK])
@pytest.mark.at_most(4)
def test_parameters_that_live_elsewhere_are_there_when_the_loss_reads_them(
    ranks, tmp_path: Path, tier: Tier, num_ranks: int
):
    """A rank alone has all of them, but not here."""
    plain = train_plain(build(), data(4), loss_of=penalty_first)
    for losses in ranks(num_ranks).run(train_elsewhere, tier, str(tmp_path)):
        assert losses == pytest.approx(plain, abs=2e-6)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = build(), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(x, y)


def train_unused(stage: int) -> list[float]:
    torch.manual_seed(1)
    return train_sharded(make_sharded(Unused(), stage), data(4))


def test_a_unit_that_never_runs_is_left_alone(ranks):
    plain = train_plain(build(), data(4))
    for stage in range(4):
        assert ranks(2).run(train_unused, stage)[0] == pytest.approx(plain, abs=2e-6), (
            f"stage {stage}"
        )


class Sometimes(Block):
    """Scales its input, on all ranks but the first."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.scale = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale if world()[0] else x)


def train_sometimes(stage: int) -> list[float]:
    torch.manual_seed(1)
    model = Net(depth=6)
    model.blocks[4] = Sometimes(32)
    return train_sharded(make_sharded(model, stage, leaf_names=[r"blocks\.4$"]), data(4))


def test_a_leaf_may_leave_parameters_unused_on_some_ranks(ranks):
    losses = [ranks(2).run(train_sometimes, stage)[0] for stage in range(4)]
    assert losses == [losses[0]] * 4


def hybrid_of_three(stage: int) -> list[float]:
    sharded = make_sharded(build(), stage, shard_group=1)
    losses = train_sharded(sharded, data(4))
    sent, expected = {}, expected_traffic(sharded, 4, 4)
    for key, num_bytes in sharded.comm.sent_bytes.items():
        sent[key.kind] = sent.get(key.kind, 0) + num_bytes
    assert sent.get("all_reduce", 0) == expected.get("all_reduce", 0)
    return losses


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.at_most(1)
def test_three_copies_share_shards_that_do_not_divide(ranks, stage):
    plain = train_plain(build(), data(4))
    assert ranks(3).run(hybrid_of_three, stage)[0] == pytest.approx(plain, abs=2e-6)


def nested(stage: int) -> tuple[bool, str]:
    sharded = make_sharded(build(), stage)
    with sharded.gathered() as outer:
        with sharded.gathered():
            pass
        still_whole = bool(torch.isfinite(outer.last.weight).all())
    with sharded.forward(), pytest.raises(UserCodeError) as caught, sharded.gathered():
        pass
    with sharded.evaluation():  # what is under way arrives
        pass
    return still_whole, str(caught.value)


def test_gathered_nests_and_refuses_to_interrupt_a_forward(ranks):
    for stage in (1, 3):
        still_whole, refusal = ranks(2).run(nested, stage)[0]
        assert still_whole
        assert "gathered()" in refusal


class Empty(nn.Module):
    """Parameters without elements, as a factory makes them for sizes of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.nothing = build(), nn.Linear(0, 0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(x, y) + self.nothing(x[:, :0]).sum()


def train_empty(stage: int) -> list[float]:
    sharded = make_sharded(Empty(), stage, unit_names=["nothing"])
    losses = train_sharded(sharded, data(4))
    full_state(sharded)
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.at_most(2)
def test_parameters_without_elements(ranks, stage):
    plain = train_plain(build(), data(4))
    assert ranks(2).run(train_empty, stage)[0] == pytest.approx(plain, abs=2e-6)


def raise_once(stage: int) -> list[float]:
    """A forward that raises in the second step, after some units were gathered.

    The step is then made again.
    """
    sharded, batches = make_sharded(build(), stage), data(4)

    def failing(model: nn.Module, batch: Any) -> torch.Tensor:
        model.blocks[1](model.first(batch[0]))
        raise ValueError("mine")

    losses = train_sharded(sharded, batches[:1])
    with pytest.raises(ValueError, match="mine"):
        train_sharded(sharded, batches[1:2], loss_of=failing)
    return losses + train_sharded(sharded, batches[1:])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_can_be_made_again_after_the_users_code_raised(ranks, stage):
    plain = train_plain(build(), data(4))
    assert ranks(2).run(raise_once, stage)[0] == pytest.approx(plain, abs=2e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_nobody_holds_gives_its_memory_back(stage):
    sharded = make_sharded(build(), stage)
    train_sharded(sharded, data(2))
    alive = [weakref.ref(sharded), *(weakref.ref(unit) for unit in sharded.units)]
    del sharded
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)
