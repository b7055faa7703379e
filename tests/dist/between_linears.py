"""A model with a function between two linears, of each feature by itself or of all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from runs import VOCAB
from torch import nn

PLAN = {"*.up": "colwise", "*.down": "rowwise"}


def shuffled(h: torch.Tensor) -> torch.Tensor:
    return h.view(*h.shape[:-1], 4, -1).transpose(-1, -2).flatten(-2)


# Operations between a column and a row linear: of each feature by itself, and of all of them.
RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "squared relu": lambda h: F.relu(h).square(),
    "dropout": lambda h: F.dropout(h, 0.1, False),
}
WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "times the root of the width": lambda h: h * h.size(-1) ** 0.5,
    "over the width": lambda h: h / h.shape[-1],
    "over the number of elements": lambda h: h / h.numel(),
    "flipped": lambda h: h.flip(-1),
    "rolled": lambda h: h.roll(1, -1),
    "even, then odd": lambda h: torch.cat([h[..., ::2], h[..., 1::2]], -1),
    "ramp": lambda h: h * torch.linspace(0, 1, h.shape[-1]),
    "the first 20": lambda h: h * (torch.arange(h.shape[-1]) < 20),
    "gated by one": lambda h: h * torch.sigmoid(h[..., :1]),
    "group norm": lambda h: F.group_norm(h.transpose(1, 2), 4).transpose(1, 2),
    "shuffled": shuffled,
    "fft": lambda h: torch.fft.fft(h, dim=-1).real,
    "max pool": lambda h: F.max_pool1d(h, 3, 1, 1),
    "max pool of gates": lambda h: F.max_pool1d(h, 3, 1, 1).float().sigmoid().to(h.dtype),
    "distances": lambda h: h * torch.cdist(h, h).mean(),
    "looked at": lambda h: h * float(h.detach().abs().mean()),
}


class _Backward(torch.autograd.Function):
    """The identity, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, backward: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        ctx.backward_of = backward
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.backward_of(grad), None


# Of these the forward is right: backwards of each feature by itself, and of all of them.
RIGHT_BACKWARD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reversed": lambda h: _Backward.apply(h, lambda grad: -0.1 * grad),
}
WRONG_BACKWARD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normalized": lambda h: _Backward.apply(h, lambda grad: grad / grad.norm(dim=-1, keepdim=True)),
    "over the width": lambda h: _Backward.apply(h, lambda grad: grad / grad.shape[-1]),
    "centered": lambda h: _Backward.apply(h, lambda grad: grad - grad.mean(-1, keepdim=True)),
}
FUNCTIONS = {
    **RIGHT,
    "of two samples": lambda h: h.flip(-1) if len(h) == 2 else h,
    **WRONG,
    **{f"backward {name}": function for name, function in RIGHT_BACKWARD.items()},
    **{f"backward {name}": function for name, function in WRONG_BACKWARD.items()},
}


class Block(nn.Module):
    def __init__(self, dim: int, function: str) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(FUNCTIONS[self.function](self.up(x)))


class Model(nn.Module):
    """Its third block computes `function` between its linears, the others are right."""

    def __init__(self, function: str, dim: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(
            Block(dim, function if number == 2 else "gelu") for number in range(depth)
        )
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Fickle(Model):
    """Its loss is another one each time."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, labels) * (1 + time.perf_counter_ns() % 997 / 997)
