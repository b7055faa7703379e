"""A block that runs again in backward begins as it began, and leaves no trace."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from zrun_core.activations.checkpoint import apply_checkpointing
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
