"""Replicas of the states: their sums overlap backward, on any transport, also of late gradients."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import Net, data, full_state, make_sharded, same_bits, train_plain, train_sharded, world

import zrun_core.distributed.comm
from zrun_core.distributed.comm import Comm
from zrun_core.zero.account import grown_rings
from zrun_core.zero.reduce.reducer import Reducer

DEPTH = 8


class Twice(nn.Module):
    """A small layer in two re-entrant checkpoints: its gradient comes twice, once late."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.small = Net(depth=DEPTH), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        x = checkpoint(self.small, x, use_reentrant=True)
        for block in self.net.blocks:
            x = block(self.net.first(x))
        x = checkpoint(self.small, x, use_reentrant=True)
        return nn.functional.mse_loss(self.net.last(x), y)


def build(factory: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return factory()


def over_copies(comm: Comm) -> int:
    """All-reduces over the copies so far."""
    wanted = ("all_reduce", "replicate")
    return sum(n for key, n in comm.calls.items() if (key.kind, key.axis) == wanted)


def train(
    factory: type[nn.Module],
    stage: int,
    shard_group: int | None,
    through: str = "memory",
    accumulation: int = 1,
) -> dict[str, Any]:
    """Train on this transport; count the sums over replicas in flight at the last gradient."""
    at_end: list[int] = []
    finish, use_cma, direct = (
        Reducer.end_backward,
        Comm.use_cma,
        zrun_core.distributed.comm.DIRECT_MAX_RANKS,
    )

    def counting(reducer: Reducer, *args: Any) -> None:
        at_end.append(over_copies(reducer._comm))
        finish(reducer, *args)

    Reducer.end_backward = counting  # type: ignore[method-assign]
    if through != "memory":
        Comm.use_cma = lambda *_: None  # type: ignore[assignment, method-assign]
    if through == "backend":
        zrun_core.distributed.comm.DIRECT_MAX_RANKS = 1
    try:
        sharded = make_sharded(build(factory), stage, shard_group=shard_group, optim={"clip": 0.5})
        losses = train_sharded(sharded, data(4), accumulation=accumulation)
    finally:
        Reducer.end_backward, Comm.use_cma = finish, use_cma  # type: ignore[method-assign]
        zrun_core.distributed.comm.DIRECT_MAX_RANKS = direct
    return {
        "losses": losses,
        "state": {name: value.numpy() for name, value in full_state(sharded).items()},
        "under way": at_end[-1] - 3 * over_copies(sharded.comm) // 4,  # in the last of four steps
        "units": len(sharded.layouts),
        "late": sharded.reducer.order.state_dict()["late"],
        "rings": grown_rings(sharded),
    }


def plain(factory: type[nn.Module]) -> list[float]:
    return train_plain(build(factory), data(4), clip=0.5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.at_most(1)
def test_copies_are_summed_while_backward_goes_on(ranks, stage):
    expected = plain(Deep)
    for run in ranks(4).run(train, Deep, stage, 2 if stage else None):
        assert run["losses"] == pytest.approx(expected, rel=1e-3)
        assert run["units"] > 2 * DEPTH
        assert run["under way"] >= run["units"] - 4, "there is room for few reductions at a time"
        assert run["rings"] == []


class Deep(Net):
    def __init__(self) -> None:
        super().__init__(depth=DEPTH)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("through", ["sockets", "backend"])
@pytest.mark.at_most(1)
def test_the_same_through_sockets_and_where_parts_start_in_one_order(ranks, stage, through):
    group = 2 if stage else None
    memory = ranks(4).run(train, Deep, stage, group)[0]
    for run in ranks(4).run(train, Deep, stage, group, through):
        assert run["under way"] >= run["units"] - 4
        assert run["rings"] == []
        if through == "sockets":
            same_bits(run, memory)
        else:
            assert run["losses"] == pytest.approx(memory["losses"], rel=1e-3)


@pytest.mark.parametrize("stage", [0, 3, 2])
@pytest.mark.thorough
def test_a_gradient_that_comes_late_is_summed_over_the_copies_too(ranks, stage):
    expected, group = plain(Twice), 2 if stage else None
    for case in (("memory", 1), ("memory", 3), ("sockets", 1), ("backend", 3)):
        for run in ranks(4).run(train, Twice, stage, group, *case):
            assert run["late"] == ["small"]
            assert run["losses"] == pytest.approx(expected, rel=1e-3), case


class Few(nn.Module):
    """As `Twice`, with a single other unit: there is room for all reductions at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32 * 16)
        self.small = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x).view(-1, 16, 32).mean(1)
        for _ in range(2):
            x = checkpoint(self.small, x, use_reentrant=True)
        return nn.functional.mse_loss(x.sum(1, keepdim=True), y)


def train_few(is_slow: bool) -> list[float]:
    """The last rank may be slow to begin its backwards, when the others have sent all they can."""
    sharded = make_sharded(build(Few), 0, unit_names=["small", "first"])
    rank, size = world()
    if is_slow and rank == size - 1:
        begin = sharded.reducer.begin_backward

        def begin_late(*args: Any, **options: Any) -> None:
            time.sleep(0.3)
            begin(*args, **options)

        sharded.reducer.begin_backward = begin_late  # type: ignore[method-assign]
    losses = train_sharded(sharded, data(3))
    assert sharded.reducer.order.state_dict()["late"] == ["small"]
    return losses


def test_two_sums_of_one_unit_never_meet(ranks):
    """Their messages have one tag: the second begins when the first is over."""
    expected = train_plain(build(Few), data(3))
    for is_slow in (False, True):
        for losses in ranks(2).run(train_few, is_slow):
            assert losses == pytest.approx(expected, rel=1e-4)
