"""Forwards before training leave no trace in the first batch, nor in the state of a model."""

from __future__ import annotations

from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import VOCAB, losses
from test_tensor_parallel import on_axes, small
from torch import nn


class Block(nn.Module):
    """An MLP that warms up by the calls it has counted, and keeps what it was given last."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.calls = 0
        self.last: deque[float] = deque([0.0], maxlen=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last.append(self.last[-1] + 0.1)
        scale = min(1.0, 0.2 * self.calls) * self.last[-1]
        return x + scale * self.down(torch.relu(self.up(x)))


class Writer(nn.Module):
    """Writes to its batch, and counts its calls."""

    def __init__(self, writes: str, dim: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.writes = writes
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB)
        self.calls = 0
        self.seen: dict[str, int] = {}
        self.register_buffer("count", torch.zeros(()))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        self.count += 0.1  # type: ignore[operator]
        self.seen["calls"] = self.seen.get("calls", 0) + 1
        if self.writes == "inputs":
            batch["input_ids"].add_(1).remainder_(VOCAB)
        if self.writes == "labels":
            batch["labels"][:, :-1] = batch["labels"][:, 1:].clone()
        if self.writes == "mapping":
            batch["labels"] = batch.pop("input_ids").flip(1) + 0 * batch.pop("labels")
            batch["input_ids"] = batch["labels"]
        x = self.embed(batch["input_ids"]) * min(1.0, 0.3 * self.calls) * self.seen["calls"]
        x = x * (1 + self.count)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


class Weighted:
    """A loss that grows with its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        loss: torch.Tensor = model(batch)
        return loss * self.calls


PLAN = {"*.up": "colwise", "*.down": "rowwise"}


def keys_of(writes: str, **parallel: Any) -> dict[str, Any]:
    return small(
        model={"call": "test_trials.py:Writer", "args": {"writes": writes}},
        loss={"call": "test_trials.py:Weighted", "args": {}},
        parallel=parallel,
    )


@pytest.fixture(scope="module")
def one(ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def found(writes: str) -> dict[int, float]:
        return losses(on_axes(keys_of(writes), tmp_path_factory.mktemp("one"), ranks)[0])

    return found


@pytest.mark.parametrize("writes", ["", "inputs", "labels", "mapping"])
@pytest.mark.parametrize(
    "parallel",
    [{"pp": 2}, {"pp": 2, "schedule": "interleaved"}, {"tp": 2, "plan": PLAN}],
    ids=["pp", "interleaved", "tp"],
)
@pytest.mark.at_most(1)
def test_losses_are_those_of_one_rank(
    ranks, tmp_path: Path, one: Any, parallel: dict[str, Any], writes: str
) -> None:
    found = on_axes(keys_of(writes, **parallel), tmp_path, ranks)
    assert not found[0]["error"]
    assert losses(found[0]) == pytest.approx(one(writes), rel=1e-6)


class Leaving(nn.Module):
    """A block that leaves a number, as an attribute or in a list."""

    shown = 0.0  # until a forward has written it
    _held = 0.0

    @property
    def held(self) -> float:
        return self._held

    @held.setter
    def held(self, value: float) -> None:
        self._held = value

    def __init__(self, dim: int, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.how = how
        self.aux = 0.0
        self.found: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = float(x.detach().pow(2).mean())
        self.held = self.shown + 0 * self.held
        self.shown = self.held + 1
        if self.how == "attribute":
            self.aux = number
        else:
            self.found.append(number)
        return x + self.linear(x)


class Auxiliary(nn.Module):
    """Weighs its loss by numbers that its blocks have left, if it `reads` them."""

    def __init__(self, how: str, reads: bool, dim: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.reads = reads
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Leaving(dim, how) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        if self.reads:
            loss = loss * (1 + sum(block.aux + sum(block.found[-1:]) for block in self.blocks))
        return loss


@pytest.mark.parametrize(("how", "name"), [("attribute", "aux"), ("list", "found")])
@pytest.mark.at_most(1)
def test_a_number_that_a_block_leaves_for_others_is_named(
    ranks, tmp_path: Path, how: str, name: str
) -> None:
    for reads in (False, True):
        model = {"call": "test_trials.py:Auxiliary", "args": {"how": how, "reads": reads}}
        found = on_axes(small(model=model, parallel={"pp": 2}), tmp_path / str(reads), ranks)
        if not reads:
            one = on_axes(small(model=model), tmp_path / "one", ranks)
            assert losses(found[0]) == losses(one[0]) != {}
            continue
        assert found[0]["code"] == 2
        assert f"a block writes a number to blocks.0.{name}, which is read" in found[0]["error"]
