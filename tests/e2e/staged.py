"""A job for two stages; a block of the second one sleeps for ever when it is called `SLEEP_AT`."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.number = number
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.number == 3 and self.calls == int(os.environ.get("SLEEP_AT", "0")):
            time.sleep(600)  # for ever: the test ends the run within seconds
        return x + torch.relu(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number) for number in range(4))
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x), y)


def data(**_: Any) -> torch.utils.data.Dataset[Any]:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(64, 32, generator=generator), torch.randn(64, 1, generator=generator)
    )
