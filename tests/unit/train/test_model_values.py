"""A model has its values for a trial: all of them, or those of the block that runs."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from zrun_core.checkpoint.whole_values import WholeValues
from zrun_core.train.model_values import TrialBytes, with_values
from zrun_core.user_code.build import Built

CPU = torch.device("cpu")
DIM = 8


class Block(nn.Module):
    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM, bias=False)
        self.again = self.down  # of one module two names
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.again(self.up(x).relu()) * self.shared


class Model(nn.Module):
    """Its blocks share a parameter with what is around them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((DIM,), 0.5))
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(self.scale) for _ in range(3))
        self.register_buffer("offset", torch.arange(float(DIM)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.offset
        for block in self.blocks:
            x = block(x)
        return x * self.scale


class Values:
    """Hands out values of a model, and counts those that somebody has."""

    def __init__(self, model: nn.Module) -> None:
        self.read_of: list[str] = []
        self.most = 0
        self._of = {name: param.detach().clone() for name, param in model.named_parameters()}
        self._given: list[weakref.ref[torch.Tensor]] = []

    def read(self, name: str, param: torch.Tensor) -> torch.Tensor:
        value = self._of[name].clone()
        self.read_of.append(name)
        self._given.append(weakref.ref(value.untyped_storage()))
        self.most = max(self.most, sum(each() is not None for each in self._given))
        return value


@pytest.fixture
def model() -> Model:
    torch.manual_seed(5)
    return Model()


def hollow(model: nn.Module) -> None:
    """Free the values, as they are on the rank that has built a model for others."""
    for param in model.parameters():
        without = torch.empty_like(param)
        without.untyped_storage().resize_(0)
        param.data = without


def test_blocks_have_values_while_they_run_and_compute_the_same(model: Model) -> None:
    x = torch.randn(2, DIM)
    expected = model(x).detach()
    values = Values(model)
    hollow(model)
    params = dict(model.named_parameters())
    with with_values(Built(model, values.read), torch.float32, CPU, None, by_block=True):
        assert values.read_of == ["scale", "embed.weight", "embed.bias"]
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
            assert all(param.is_meta for param in model.blocks[1].up.parameters())
    of_a_block = ("up.weight", "up.bias", "down.weight")
    in_turn = [f"blocks.{number}.{key}" for number in range(3) for key in of_a_block]
    assert values.read_of[3:] == 2 * in_turn
    assert values.most == 6, "what is around, and one block"
    assert all(param is params[name] for name, param in model.named_parameters())


def test_all_at_once_every_value_is_read_before_the_forward(model: Model) -> None:
    x = torch.randn(2, DIM)
    expected = model(x).detach()
    values = Values(model)
    hollow(model)
    with with_values(Built(model, values.read), torch.float32, CPU, None):
        assert values.read_of == [name for name, _ in model.named_parameters()]
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert values.most == 12


def test_values_of_files_come_first_and_a_forward_that_fails_leaves_none(model: Model) -> None:
    built, files = Values(model), Values(model)

    def of_files(name: str, like: torch.Tensor) -> torch.Tensor | None:
        return files.read(name, like) if "up" in name else None

    hollow(model)
    source = WholeValues(of_files, Path("weights"))
    given = with_values(Built(model, built.read), torch.bfloat16, CPU, source, by_block=True)
    with given:
        with pytest.raises(RuntimeError, match="dtype"):
            model.blocks[1](torch.zeros(2, DIM))
        assert all(param.is_meta for param in model.blocks[1].down.parameters())
        model.blocks[1](torch.zeros(2, DIM, dtype=torch.bfloat16))
    assert files.read_of == 2 * ["blocks.1.up.weight", "blocks.1.up.bias"]
    assert built.read_of[3:] == 2 * ["blocks.1.down.weight"]


def test_a_block_that_is_read_while_it_does_not_run_has_no_value(model: Model) -> None:
    values = Values(model)
    hollow(model)
    with (
        with_values(Built(model, values.read), torch.float32, CPU, None, by_block=True),
        pytest.raises(RuntimeError),
    ):
        model.blocks[0].up.weight.norm().item()


def test_the_bytes_of_each_part(model: Model) -> None:
    around, block = DIM * DIM + 2 * DIM, 2 * DIM * DIM + DIM
    assert TrialBytes.of(model, torch.bfloat16) == (
        2 * (around + 3 * block),
        2 * around,
        2 * block,
    )
    assert TrialBytes.of(model.embed, torch.float32) == (4 * 72, 4 * 72, 0)
