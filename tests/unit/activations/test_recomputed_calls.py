"""A block that runs again in backward begins as it began, and leaves no trace."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from zrun_core.activations.checkpoint import apply_checkpointing
from zrun_core.activations.recomputed_call import BlockState
from zrun_core.errors import JobError
from zrun_core.spine.sections.activations import ActivationsConfig


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.kind = kind
        self.register_buffer("mask", None, persistent=False)
        size = 1 << 19 if kind == "large" else 4
        self.register_buffer("table", torch.zeros(size))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "lazy" and self.mask is None:
            self.mask = torch.zeros(x.shape[1], x.shape[1])
        if self.kind == "grown":
            self.table = torch.zeros(1 << 20)
        if self.kind == "large":
            self.table[0] += 1
        if self.kind == "remembers":
            self.last = x.var()
        y: torch.Tensor = self.attention(x, x, x, attn_mask=self.mask)[0]
        return x + y


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def recomputed(kind: str) -> Model:
    torch.manual_seed(0)
    model = Model(kind)
    apply_checkpointing(model, ActivationsConfig(checkpoint="full"))
    return model


@pytest.mark.parametrize("kind", ["lazy", "grown", "remembers"])
def test_blocks_that_make_buffers_and_take_one_tensor_thrice(kind: str) -> None:
    torch.manual_seed(0)
    plain = Model(kind)
    model = recomputed(kind)
    x = torch.randn(2, 5, 8)
    for each in (plain, model):
        for _ in range(2):
            each(x).backward()
    for (name, param), own in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(param.grad, own.grad), name


def test_a_large_buffer_that_is_written_is_refused() -> None:
    with pytest.raises(JobError, match=r"buffer table, which is larger than 1\.0 MiB"):
        recomputed("large")(torch.randn(2, 5, 8))


def test_what_a_block_remembers_does_not_pile_up() -> None:
    model = recomputed("remembers")
    inputs = []
    for _ in range(4):
        x = torch.randn(2, 5, 8, requires_grad=True)
        inputs.append(weakref.ref(x))
        model(x).backward()
        del x
    gc.collect()
    assert sum(each() is not None for each in inputs) <= 2


class Aliased(nn.Module):
    """Counts in a buffer that attributes hold too, by which it scales."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("n", torch.zeros(1))
        holders: dict[str, Any] = {
            "list": [self.n],
            "dict": {"n": self.n},
            "tuple": (self.n,),
            "view": [self.n[0]],
        }
        self.held = holders[how]
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1  # type: ignore[operator]
        n = self.held["n"] if self.how == "dict" else self.held[0]
        return x + torch.tanh(self.linear(x) * n.clone())


@pytest.mark.parametrize("how", ["list", "dict"])
def test_a_written_buffer_that_an_attribute_holds_too(how: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    grads = []
    for checkpoint in ("none", "full"):
        torch.manual_seed(0)
        model = Model("plain")
        model.blocks = nn.ModuleList(Aliased(how) for _ in range(2))
        apply_checkpointing(model, ActivationsConfig(checkpoint=checkpoint))
        for _ in range(2):
            first, second = model(x), model(2 * x)  # backward when the counter has gone on
            (first + second).backward()
        assert [block.n.item() for block in model.blocks] == [4, 4]
        held = [block.held["n" if how == "dict" else 0] for block in model.blocks]
        assert all(each is block.n for each, block in zip(held, model.blocks, strict=True))
        grads.append([param.grad for param in model.parameters()])
    for plain, own in zip(*grads, strict=True):
        assert torch.equal(plain, own)


@pytest.mark.parametrize("how", ["tuple", "view"])
def test_a_written_buffer_that_cannot_be_kept_apart_is_refused(how: str) -> None:
    model = Model("plain")
    model.blocks = nn.ModuleList([Aliased(how), Aliased(how)])
    apply_checkpointing(model, ActivationsConfig(checkpoint="full"))
    with pytest.raises(JobError, match=r"buffer that Aliased.held holds too, in a tuple"):
        model(torch.randn(3, 8))


def test_large_tables_of_attributes_are_not_copied() -> None:
    block = Block("plain")
    block.tables = [torch.zeros(1 << 19)]
    state = BlockState(block)
    begun = state.copy()
    assert begun.attributes is not None
    (content,) = (own["tables"][1] for own in begun.attributes if "tables" in own)
    assert content is not None
    assert all(part.state is None for part in content.parts if part.value is block.tables[0])
    match = "writes in place to tables, a tensor that is no buffer"
    with pytest.raises(JobError, match=match), state.watched(begun):
        block.tables[0].add_(1)
