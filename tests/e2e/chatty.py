"""A user's code that prints: lines, a progress bar, colours, and far too much."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn

BURST = 100_000


def model() -> nn.Module:
    print("\x1b[1mbuilding\x1b[0m a model")
    print("on stderr \x1b]0;a title\x07", file=sys.stderr)
    return nn.Linear(8, 1)


def data() -> torch.utils.data.TensorDataset:
    for percent in range(101):
        sys.stderr.write(f"\rreading {percent:3}%\x1b[K")
    sys.stderr.write("\n")
    return torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))


def loss(model: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def on_step(context: Any) -> None:
    if context.step == 2:
        for number in range(BURST):
            print("burst", number)
    if context.step == 3 and "FAIL" in os.environ and context.is_main:
        print("now it happens")
        raise ValueError("a wrong turn")
