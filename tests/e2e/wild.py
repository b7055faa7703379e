"""A user's small model whose `fault` goes wrong in its own way, on one rank, at one step."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    def __init__(
        self, fault: str = "none", rank: int = 1, step: int = 3, pause: float = 0.0
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.out = nn.Linear(8, 1)
        self.fault, self.rank, self.step, self.pause = fault, rank, step, pause
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        time.sleep(self.pause)
        at_fault = self.forwards >= self.step and int(os.environ["RANK"]) == self.rank
        if at_fault:
            FAULTS.get(self.fault, lambda: None)()
        for block in self.blocks:
            x = torch.tanh(block(x))
        loss = self.out(x).square().mean()
        if at_fault and self.fault in ("inf", "nan"):
            self.out.weight.register_hook(lambda grad: grad * float(self.fault))
        return loss * float("nan") if at_fault and self.fault == "nan loss" else loss


def spin() -> None:
    while True:
        pass


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(600)


def damage_the_disk() -> None:
    """Change a byte of each page of the file without a name that this rank has its states in."""
    (path,) = (
        path
        for path in Path("/proc/self/fd").iterdir()
        if path.exists() and "/swap/" in os.readlink(path)
    )
    with path.open("r+b", buffering=0) as file:
        for page in range(0, os.fstat(file.fileno()).st_size, 4096):
            (byte,) = os.pread(file.fileno(), 1, page)
            os.pwrite(file.fileno(), bytes([byte ^ 1]), page)
        os.fsync(file.fileno())


FAULTS = {
    "damage the disk": damage_the_disk,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "spin": spin,
    "hold the gil": hold_the_gil,
    "crash": lambda: ctypes.string_at(0),
    "exit": lambda: sys.exit(0),
    "leave": lambda: os._exit(0),
    "memory": lambda: torch.empty(1 << 50),
}


def data() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(
        torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    )


def flip(context: Any) -> None:
    """The lowest mantissa bit of one parameter, on one rank, after the third step."""
    if context.step == 3 and os.environ["RANK"] == "1":
        context.model.blocks[1].weight.detach().view(torch.int32)[2, 3] ^= 1
