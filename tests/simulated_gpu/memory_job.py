"""A job whose memory is foretold, and measured on a simulated device.

Its operators take the same memory on the device as on CUDA. Attention would not: the device keeps
the scores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "benchmarks"))
import gpu_planner  # noqa: E402
import planner  # noqa: E402

from zrun_core.hardware.measured import Rates, from_rates  # noqa: E402

DIM, ROWS = 192, 512
BATCH_BYTES = 4 * ROWS * (DIM + 1)  # of a sample
JOB = {"model": "memory_job.py:Blocks", "data": "memory_job.py:Rows"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.last(x).float() - y).square().mean()


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(ROWS, DIM, generator=generator)
        return {"x": x, "y": x[:, :1].clone()}


@contextmanager
def _known() -> Iterator[None]:
    """Let the benchmark know this job, and run a few steps of it."""
    with (
        patch.dict(planner._ALL, {"blocks": JOB}),
        patch.multiple(gpu_planner, HERE=HERE, _STEPS=3, _WARM_UP=1),
    ):
        yield


def foretold(case: planner.Case) -> dict[str, Any]:
    """Return what the planner says of a case, on a device like the simulated one."""
    flops = dict.fromkeys(("fp32", "bf16", "fp16"), 1e12)
    rates = Rates({"fp32": 1e11}, 1e10, "H100", flops, 1e11, 80 << 30, 1e10, 1e10)
    on = from_rates(rates, ranks=1, host_bytes=1 << 36, cores=os.cpu_count() or 1)
    on = replace(on, device=replace(on.device, workspace_bytes=0))  # cuBLAS, which is not there
    with _known():
        return gpu_planner.predict(case, on)


def measured(case: planner.Case) -> dict[str, Any]:
    """Return what the device of this process holds at most in steps after the first."""
    with _known():
        return gpu_planner.run(case)
