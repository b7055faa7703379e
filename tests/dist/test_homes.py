"""States of units that live elsewhere: fetched before they are used, and put once written.

`Apart` is as strict as a home can be. What was not fetched is not here, what was not put is lost,
and what comes is here only once somebody has waited for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from toys import build, data, make_sharded, train_sharded, world

from zrun_core.checkpoint.model_state import ModelState, Target
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.handle import Handle
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.zero.sharded_model import ShardedModel

Ranks = Callable[[int], Any]


class Apart:
    """A home in other memory. Here is only what was asked for, else NaN.

    Args:
        moves: whether values come to other memory each time.
    """

    def __init__(self, memory: torch.Tensor, comm: Comm, *, moves: bool) -> None:
        self._away, self._here, self._comm, self._moves = memory.clone(), memory, comm, moves
        self._is_here = False
        self.num_fetched = self.num_put = 0
        self.drop()

    def fetch(self) -> Handle | None:
        if self._is_here:
            return None
        self._is_here = True
        return Handle(self._comm, [], self._come)

    def _come(self) -> None:
        self.num_fetched += 1
        self._here.copy_(self._away)

    def at(self) -> torch.Tensor:
        return self._here

    def put(self) -> None:
        self.num_put += 1
        self._away.copy_(self._here)

    def drop(self) -> None:
        self._comm.settle()
        self._is_here = False
        self._here.view(torch.uint8).fill_(0xFF)
        if self._moves:
            self._here = self._here.clone()

    def grow(self, num_bytes: int) -> None:
        larger = torch.zeros(num_bytes, dtype=torch.uint8)
        larger[: self._away.numel()] = self._here if self._is_here else self._away
        self._away = larger
        self._is_here = False
        self._here = larger.clone()


def move_away(sharded: ShardedModel) -> list[Apart]:
    """Give states of all units other homes: parameters where only a shard of them is kept.

    Returns:
        Those that a step uses.
    """
    homes = []
    for unit in sharded.units:
        if unit.reshard_after_use:
            unit.param = Apart(unit.param.at(), sharded.comm, moves=False)
            homes.append(unit.param)
        if unit.trainable:
            unit.grad = Apart(unit.grad.at(), sharded.comm, moves=True)
            unit.record = Apart(unit.record.at(), sharded.comm, moves=True)
            if any(unit.layout.pieces(*unit.updated_range)):  # else there is padding only
                homes += [unit.grad, unit.record]
    return homes


def write(sharded: ShardedModel) -> None:
    """As user code does between steps."""
    with sharded.gathered() as module:
        for param in module.parameters():
            param.mul_(0.75)


def restore(sharded: ShardedModel) -> None:
    """As loading does: the optimizer's states are made anew and filled, then the values."""
    for _, piece, update in sharded.optimizer.updated_pieces():
        for value in update.set_state(piece, update.state_of(piece)).values():
            if value.dim():
                value.fill_(0.25)
    ModelState(sharded).fill(halve)


def halve(targets: Sequence[Target]) -> None:
    for target in targets:
        target.memory.mul_(0.5)


def run(stage: int, away: bool, accumulation: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train, look at everything between steps as the loop does, load, write to parameters, save."""
    sharded = make_sharded(build(), stage, **settings)
    homes = move_away(sharded) if away else []
    guard, found = ReplicaGuard(sharded), []
    losses = []
    for number in range(3):
        losses += train_sharded(sharded, data(2), accumulation=accumulation)
        guard.check(number, {"step": number})
        found.append(sharded.find_nonfinite_parameter())
        if number == 0:
            restore(sharded)
        if number == 1:
            write(sharded)
    losses += train_sharded(sharded, data(1))
    saved = ModelState(sharded).write_items()
    parts = {(each.tensor, each.state, each.start): each.data.clone() for each in saved}
    with sharded.gathered() as module:
        state = {name: value.clone() for name, value in module.state_dict().items()}
    return {
        "losses": losses,
        "found": found,
        "state": state,
        "parts": parts,
        "used": all(home.num_fetched and home.num_put for home in homes),
    }


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32": (1, {}),
    "accumulated": (2, {"optim": {"name": "adagrad", "args": {"initial_accumulator_value": 0.3}}}),
    "bf16": (2, {"precision": {"compute": "bf16", "reduce": "compute"}}),
    "lamb": (1, {"precision": "bf16", "optim": {"name": "lamb", "moments": "bf16"}}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_where_states_live_changes_nothing(ranks: Ranks, stage: int, name: str) -> None:
    accumulation, settings = CASES[name]
    here = ranks(2).run(run, stage, False, accumulation, settings)
    away = ranks(2).run(run, stage, True, accumulation, settings)
    for own, other in zip(here, away, strict=True):
        assert other["used"]
        assert own["losses"] == other["losses"]
        assert own["found"] == other["found"] == [None] * 3
        for what in ("state", "parts"):
            assert own[what].keys() == other[what].keys()
            theirs = other[what]
            differ = [key for key, each in own[what].items() if not torch.equal(each, theirs[key])]
            assert not differ, (what, differ)


def run_hybrid(away: bool) -> dict[str, torch.Tensor]:
    """Two copies of two shards each, and a gradient after the one that was to be the last."""
    sharded = make_sharded(build(), 2, shard_group=2)
    homes = move_away(sharded) if away else []
    rank, size = world()
    for x, y in data(3):
        sharded.begin_step()
        for _ in range(2):
            with sharded.forward() as micro:
                loss = sharded.module(x.chunk(size)[rank], y.chunk(size)[rank])
            sharded.backward(loss / size, micro, boundary=True)
        sums = NamedVector.of(sharded.comm.device, loss=0.0)
        sharded.step(1e-2, sums, lambda sums: torch.ones(()).double())
    assert all(home.num_fetched for home in homes)
    with sharded.gathered() as module:
        return {name: value.clone() for name, value in module.state_dict().items()}


def test_a_sum_that_is_added_to_comes_back_first(ranks: Ranks) -> None:
    here, away = (ranks(4).run(run_hybrid, is_away) for is_away in (False, True))
    for own, other in zip(here, away, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in own.items())
