"""A small model whose `fault` goes wrong on GPUs in its own way, on one rank, at one step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from simulated_gpu.nccl.settings import settings
from torch import nn

_RANK, _STEP = 1, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self, fault: str = "none", pause: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(8, 1)
        self.fault = fault
        self.pause = pause  # before each forward
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        time.sleep(self.pause)
        is_here = self.forwards >= _STEP and int(os.environ["RANK"]) == _RANK
        if self.fault == "fail once a board has told" and Path("struck").exists() and is_here:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        if is_here and self.fault in STRIKING and not Path("struck").exists():
            Path("struck").touch()  # tells when
        if is_here and self.fault in FAULTS:
            FAULTS[self.fault](x)
        for number, block in enumerate(self.blocks):
            if not (is_here and self.fault == "leave out a block" and number == 1):
                x = block(x)
        loss = self.out(x).square().mean()
        if self.fault == "hang while others read a loss":
            loss.item()  # the host waits for its device
        if self.fault == "hang before a collective of the code" and self.forwards >= _STEP:
            if is_here:
                time.sleep(600)
            settings.timeout_s = 3  # in place of two minutes and more, for works from now on
            dist.all_reduce(torch.ones(1, device=x.device))
            loss.item()
        return loss


def _fill(x: torch.Tensor) -> None:
    torch.empty(1 << 45, dtype=torch.uint8, device=x.device)


FAULTS: dict[str, Any] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": lambda _: time.sleep(600),
    "hang while others read a loss": lambda _: time.sleep(600),
    "fill": _fill,
}

STRIKING = {*FAULTS, "leave out a block", "hang before a collective of the code"}


def data() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(
        torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    )
