"""Slices of parameters that a loss looks at: named before training, or found by its first step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import VOCAB, losses
from test_tensor_parallel import on_axes, small
from torch import nn

PLAN = {"*.up": "colwise", "*.down": "rowwise"}


def penalty(params: Iterable[torch.Tensor], how: str) -> torch.Tensor:
    if how == "norms":
        return torch.stack([p.norm() for p in params]).sum()
    if how == "gram":
        return torch.stack([(p @ p.T).square().mean() for p in params if p.dim() == 2]).sum()
    return torch.stack([p.pow(2).sum() for p in params]).sum()


class Mlp(nn.Module):
    """Adds a penalty on its weights to what it returns, if it is `greedy`."""

    def __init__(self, dim: int, greedy: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.greedy = greedy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        if self.greedy:
            out = out + 0.01 * self.up.weight.square().sum()
        return out


class Model(nn.Module):
    def __init__(self, how: str = "", greedy: bool = False, dim: int = 8) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Mlp(dim, greedy) for _ in range(4))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        if self.how == "whole":
            loss = loss + 0.01 * penalty([self.head.bias, *self.blocks[0].down.bias[None]], "")
        elif self.how:
            loss = loss + 0.01 * penalty(self.blocks.parameters(), self.how)
        return loss


def decayed(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(batch["input_ids"], batch["labels"])
    return loss + 0.01 * penalty(model.parameters(), "")


def keys_of(parallel: dict[str, Any], **args: Any) -> dict[str, Any]:
    model = {"call": "test_tensor_penalties.py:Model", "args": args}
    return small(model=model, parallel={"plan": PLAN, **parallel} if parallel else {})


@pytest.mark.parametrize("how", ["squares", "norms", "gram"])
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=["tp", "tp and pp"])
@pytest.mark.at_most(1)
def test_a_penalty_on_slices_is_named_with_its_line(
    ranks, tmp_path: Path, parallel: dict[str, Any], how: str
) -> None:
    found = on_axes(keys_of(parallel, how=how), tmp_path, ranks)
    assert {each["code"] for each in found} == {2}
    error = found[0]["error"]
    number = 7 if how == "gram" else 11
    assert f"blocks.0.up.weight and {number} more would be read outside of its module" in error
    assert "(test_tensor_penalties.py:" in error


def test_a_loss_function_that_looks_at_weights_is_named(ranks, tmp_path: Path) -> None:
    keys = {**keys_of({"tp": 2}), "loss": "test_tensor_penalties.py:decayed"}
    found = on_axes(keys, tmp_path, ranks)
    assert {each["code"] for each in found} == {2}
    assert "would be read outside of its module (test_tensor_penalties.py:" in found[0]["error"]


def test_parameters_that_all_ranks_have_whole_may_be_looked_at(ranks, tmp_path: Path) -> None:
    one = on_axes(keys_of({}, how="whole"), tmp_path / "one", ranks)
    two = on_axes(keys_of({"tp": 2}, how="whole"), tmp_path / "two", ranks)
    assert losses(two[0]) == pytest.approx(losses(one[0]), rel=1e-6)


@pytest.mark.parametrize(
    "parallel",
    [{"tp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "schedule": "pipedream"}],
    ids=["tp", "tp and pp", "pipedream"],
)
@pytest.mark.at_most(1)
def test_ranks_whose_losses_differ_end_in_the_first_step(
    ranks, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    keys = keys_of(parallel, greedy=True)
    if parallel.get("schedule") == "pipedream":
        keys |= {"batch": {"global": 2, "micro": 2}, "steps": 8, "optim": {"lr": 1e-2}}
    found = on_axes(keys, tmp_path / "checked", ranks)
    assert {each["code"] for each in found} == {2}
    assert ": blocks.0 computes something else than in the whole model" in found[0]["error"]
    keys["guards"] = {"check_values": False}
    found = on_axes(keys, tmp_path / "not checked", ranks)
    assert {each["code"] for each in found} == {10}
    assert "in step 1 ranks that share layers (parallel.tp) computed different" in found[0]["error"]
