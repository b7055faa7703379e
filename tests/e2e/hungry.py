"""A user's small model whose memory runs out where a test says: `where`, from a step on."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

MIB = 1 << 20
forwards: list[int] = []


def hoard(mib: int) -> torch.Tensor:
    """Memory that is really there."""
    return torch.ones(mib * MIB, dtype=torch.uint8)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        return x + self.down(y)


class Net(nn.Module):
    def __init__(self, where: str = "", step: int = 3, rank: int = 1, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.where, self.step, self.rank = where, step, rank
        self.forwards = 0
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        forwards.append(1)
        if self.where == "forward" and self._is_due():
            x = x.repeat(2_000_000, 1)  # of which autograd keeps what blocks make
        if self.where == "allocation":
            x = x.repeat(20_000, 1)
        for block in self.blocks:
            x = block(x)
        if self.where == "allocation" and self._is_due():
            x = x + torch.empty(1 << 50)
        return x.square().mean()

    def _is_due(self) -> bool:
        return self.forwards >= self.step and int(os.environ["RANK"]) == self.rank


class Cache(torch.utils.data.Dataset):
    """Keeps what it has read."""

    def __init__(self, where: str = "", rank: int = 1, from_read: int = 8) -> None:
        self.where, self.rank, self.from_read = where, rank, from_read
        if where == "save":
            self.tokenizer = Tokenizer(0)  # rank 0 saves it
        self.reads = 0
        self.read_before: list[torch.Tensor] = []

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        is_due = self.reads > self.from_read and int(os.environ.get("RANK", "0")) == self.rank
        if self.where == "loader" and is_due:
            for _ in range(100):
                self.read_before.append(hoard(64))
        return torch.full((8,), float(index % 7))


class Hungry(torch.optim.SGD):
    """Takes memory in its update, and lets go of none."""

    def __init__(self, params: Any, lr: float = 0.1, step: int = 3, rank: int = 1) -> None:
        super().__init__(params, lr=lr)
        self.updates: list[torch.Tensor] = []
        self.due_at, self.due_on = step, rank

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        is_due = sum(forwards) >= self.due_at  # not where zrun tries out the class
        if is_due and int(os.environ["RANK"]) == self.due_on:
            for _ in range(100):
                self.updates.append(hoard(64))
        super().step()


class Tokenizer:
    """Saved with each step, and takes memory for it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def save_pretrained(self, folder: str) -> None:
        if int(os.environ["RANK"]) == self.rank:
            pieces = []
            for _ in range(100):
                pieces += [hoard(64)]


def on_step(context: Any) -> None:
    """Take memory for a while in one step, on one rank, and give it back."""
    if context.step == 4 and int(os.environ["RANK"]) == 1:
        table = [hoard(64) for _ in range(14)]
        time.sleep(2.0)
        del table


def metrics(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    """Compare samples with a table that is larger than what a step takes."""
    table = torch.ones(len(batch), 64 * MIB, dtype=torch.uint8)
    return {"seen": (table[:, ::4096].sum(), len(batch))}
