"""The record of a unit: one flat tensor with all an update needs, whatever the optimizer makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zrun_core
from zrun_core.library.model import ModelHandle
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.unit.record_layout import RecordLayout

pytestmark = pytest.mark.usefixtures("alone")


class Replacing(torch.optim.Optimizer):
    """A user's own: begins with ones, in two formats, and makes a new tensor in every update."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                state = self.state[param]
                if not state:
                    state["narrow"] = torch.ones_like(param, dtype=torch.bfloat16)
                    state["wide"] = torch.ones_like(param)
                state["wide"] = 0.9 * state["wide"] + param.grad
                state["narrow"].mul_(0.5)
                param.sub_(state["wide"] * state["narrow"].float(), alpha=group["lr"])


class Net(nn.Module):
    """A block that is used in some steps only, and one that never is; of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.never = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, late: bool) -> torch.Tensor:
        x = self.first(x)
        return self.late(x) if late else x


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": ("adamw", {}),
    "adagrad": ("adagrad", {"initial_accumulator_value": 0.3}),
    "momentum": ("sgd", {"momentum": 0.9}),
    "lamb": ("lamb", {"moments": "bf16"}),
    "replacing": (Replacing, {}),
}


def made(name: str, precision: str = "fp32") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = zrun_core.shard(Net, precision=precision)
    kind, options = CASES[name]
    return model, zrun_core.optimizer(model, kind, lr=1e-2, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, late: bool) -> None:
    generator = torch.Generator().manual_seed(number)
    model(torch.randn(3, 7, generator=generator), late=late).square().sum().backward()
    optimizer.step()


def units(model: nn.Module) -> list[FlatUnit]:
    return ModelHandle.of(model, "").sharded.units


def states(model: nn.Module) -> Iterator[tuple[FlatUnit, str, torch.Tensor]]:
    """(unit, name of the parameter, state for each of its elements)."""
    for unit, piece, update in ModelHandle.of(model, "").sharded.optimizer.updated_pieces():
        for value in update.state_of(piece).values():
            if isinstance(value, torch.Tensor) and value.dim():
                yield unit, piece.slot.name, value


def parameters(model: nn.Module) -> list[torch.Tensor]:
    with zrun_core.gathered(model):
        return [param.detach().clone() for param in model.parameters()]


def test_numbers_of_all_formats_begin_where_they_may() -> None:
    layout = RecordLayout(4, 3, {})
    assert layout.num_bytes == 16
    first = layout.extended({"narrow": torch.bfloat16, "byte": torch.uint8, "wide": torch.float64})
    later = first.extended({"more": torch.float32})
    record = torch.zeros(later.num_bytes, dtype=torch.uint8)
    assert first.num_bytes == 16 + 24 + 6 + 3, "nothing is between them"
    assert list(later.moments) == ["wide", "narrow", "byte", "more"]
    found = later.moments_of(record)
    assert {name: (each.dtype, each.numel()) for name, each in found.items()} == {
        "wide": (torch.float64, 3),
        "narrow": (torch.bfloat16, 3),
        "byte": (torch.uint8, 3),
        "more": (torch.float32, 3),
    }
    later.master_of(record).fill_(1)
    for each in found.values():
        each.fill_(1)
    assert later.master_of(record).tolist() == [1] * 4
    assert all((each == 1).all() for each in found.values()), "none overlaps another"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_states_lie_in_the_record_since_the_first_update(name: str, precision: str) -> None:
    model, optimizer = made(name, precision)
    begins_with_all = name == "adagrad"
    assert bool(list(states(model))) == begins_with_all
    for number in range(4):
        step(model, optimizer, number, late=number > 1)
        places = {
            id(unit): unit.record.home.at().untyped_storage().data_ptr() for unit in units(model)
        }
        found = list(states(model))
        updated = {"first"} | ({"late"} if number > 1 else set())
        expected = {"first", "late", "never"} if begins_with_all else updated
        assert {slot.partition(".")[0] for _, slot, _ in found} == expected
        for unit, _, value in found:
            assert value.untyped_storage().data_ptr() == places[id(unit)]


@pytest.mark.parametrize("name", ["momentum", "replacing"])
def test_a_record_can_be_read_moved_and_written_as_one(name: str) -> None:
    """Records and parameters are all that the next updates depend on, wherever they lie."""
    model, optimizer = made(name, "bf16")
    for number in range(3):
        step(model, optimizer, number, late=number > 0)
    kept = [(unit.record.home.at().clone(), unit.param.home.at().clone()) for unit in units(model)]
    for number in range(3, 6):
        step(model, optimizer, number, late=True)
    expected = parameters(model)
    for unit, (record, param) in zip(units(model), kept, strict=True):
        unit.record.home.grow(record.numel())
        unit.record.home.at().copy_(record)
        unit.param.home.at().copy_(param)
    for number in range(3, 6):
        step(model, optimizer, number, late=True)
    assert all(map(torch.equal, parameters(model), expected))


def test_an_own_optimizer_that_makes_new_tensors_computes_what_it_does_alone() -> None:
    model, optimizer = made("replacing")
    torch.manual_seed(0)
    plain = Net()
    with zrun_core.gathered(model):
        plain.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    alone = Replacing(plain.parameters(), lr=1e-2)
    for number in range(4):
        step(model, optimizer, number, late=number > 1)
        alone.zero_grad()
        step(plain, alone, number, late=number > 1)
    assert all(map(torch.equal, parameters(model), plain.parameters()))
