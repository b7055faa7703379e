"""Models and data for the tracer that behave, and some that do not.

A job names what it needs of this file.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Vectors(torch.utils.data.Dataset[Any]):
    """Tuples of a vector and its target."""

    def __init__(self, dim: int = 16, count: int = 8, ragged: bool = False) -> None:
        self.dim, self.count, self.ragged = dim, count, ragged

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(self.dim), torch.ones(1)


def hungry_metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Compare every sample with a table of 1 MiB, in one tensor."""
    x, y = batch
    table = x.new_ones(len(x), 1 << 18)
    return {"far": ((table - y).abs().sum(), len(x))}


def broken_metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    raise ValueError("no such column")


def look(context: Any) -> None:
    context.metric("loss", context.loss)


class Gathering:
    """A hook that has all parameters whole."""

    def __call__(self, context: Any) -> None:
        with context.gathered():
            pass


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Once(Layer):
    """A layer that cannot be recomputed."""

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._current_autograd_node() is not None:
            raise RuntimeError("this layer runs once")
        return super().forward(x)


class Ragged(torch.utils.data.Dataset[Any]):
    """Lists of tokens, as tokenizers make them: the last two are the longest."""

    def __init__(self, count: int = 8) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[int]:
        return [1] * (20 if index >= self.count - 2 else 2 + index % 5)


def sentences(count: int = 8, length: int = 64) -> list[dict[str, Tensor]]:
    rows = torch.ones(count, length, dtype=torch.int64)
    return [{"input_ids": row, "labels": row} for row in rows]


def padded(samples: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, samples))
    tokens = torch.tensor([[*sample, *[0] * (longest - len(sample))] for sample in samples])
    mask = torch.ones(len(samples), longest, longest)
    return {"input_ids": tokens, "labels": tokens, "mask": mask}


class Hangs(torch.utils.data.Dataset[Any]):
    """Whose length never comes."""

    def __len__(self) -> int:
        time.sleep(600)
        return 1


class Deep(nn.Module):
    """`style`: plain; collects (all outputs are used at the end); indexed (blocks by number);
    skips (one in two); once (no block can be recomputed)."""

    def __init__(self, dim: int = 16, depth: int = 12, style: str = "plain") -> None:
        super().__init__()
        self.depth, self.style = depth, style
        self.first, self.last = nn.Linear(dim, dim), nn.Linear(dim, 1)
        kind = Once if style == "once" else Layer
        self.layers = nn.ModuleList(kind(dim) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        seen = []
        if self.style == "indexed":
            for number in range(self.depth):
                x = self.layers[number](x)
        else:
            for number, layer in enumerate(self.layers):
                x = layer(x) * 2.0 if self.style == "skips" and number % 2 else layer(x)
                seen.append(x)
        if self.style == "collects":
            x = torch.stack(seen).mean(0)
        return F.mse_loss(self.last(x), y)


class Looks(nn.Module):
    """What runs depends on values."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(dim, dim), nn.Linear(dim, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        if float(y.sum()) > 0:
            x = x[(y[:, 0] > 0).nonzero()[:, 0]]
        return F.mse_loss(self.last(x), y)


class Recurrent(nn.Module):
    """An LSTM, whose kernel keeps a workspace for backward."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(dim, 24, 2, batch_first=True), nn.Linear(24, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.lstm(x[:, None].expand(-1, 12, -1))[0].mean(1)), y)


class Gated(nn.Module):
    """A GRU, which runs operators for each position in one call, and a layer of Python."""

    def __init__(self, dim: int = 16, positions: int = 12) -> None:
        super().__init__()
        self.gru, self.last = nn.GRU(dim, 24, batch_first=True), nn.Linear(24, 1)
        self.positions = positions

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        sequence = x[:, None].expand(-1, self.positions, -1)
        return F.mse_loss(self.last(self.gru(sequence)[0].mean(1)), y)


class Lookups(nn.Module):
    """Its gradient is sparse."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(500, 8, mode="sum", sparse=True)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.rows(x.long())), y)


class Square(Looks):
    """Memory is quadratic in the batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        return (x @ x.T).softmax(-1).square().mean()


class Ends(Looks):
    """Its forward ends the process, by `how`."""

    def __init__(self, how: str, dim: int = 16) -> None:
        super().__init__(dim)
        self.how = how
        if how == "abort without values" and self.first.weight.is_meta:
            os.abort()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.how == "abort":
            os.kill(os.getpid(), signal.SIGABRT)
        if self.how == "abort without values":
            return F.mse_loss(self.last(self.first(x)), y)
        if self.how == "exit":
            sys.exit(3)
        if self.how == "hang":
            time.sleep(600)
        raise ValueError("this model has a mistake")


def never() -> nn.Module:
    raise RuntimeError("no such weights")
