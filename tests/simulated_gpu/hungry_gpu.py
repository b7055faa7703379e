"""A model that takes memory of a GPU by the length of its rows, of which one pair is unusual."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ROWS, LONG = 32, 11  # samples; the one that a GPU has no memory for, beside that of another rank
LENGTH, TOO_LONG = 16, 1 << 20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)  # the same wherever it is made
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x).square().mean()


def rows(length: int) -> list[torch.Tensor]:
    """Return the rows, the unusual one with this length."""
    given = torch.Generator().manual_seed(0)
    found = [torch.randn(LENGTH, 8, generator=given) for _ in range(ROWS)]
    found[LONG] = found[LONG].repeat(length // LENGTH, 1)
    return found


def data(without: list[int] | None = None, length: int = TOO_LONG) -> list[torch.Tensor]:
    """Return the data of a job.

    Args:
        without: numbers of rows that are left out.
        length: of the unusual one.
    """
    return [row for number, row in enumerate(rows(length)) if number not in (without or ())]


def told(context: Any) -> None:
    """Print what the GPU holds after each step."""
    torch.cuda.synchronize()
    print("holds", torch.cuda.memory_allocated(), flush=True)
