"""A job that ends itself, or its agent, or its launcher, where the environment says so:
`KILL=rank:forward:17`.

Or waits until somebody asks for a save or a profile: `ASKED_AFTER=4`.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zrun_core.spine.stop_signals import SAVE


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Fate:
    """Counts how often a place was passed, and kills at the right time."""

    def __init__(self, place: str) -> None:
        self.count = 0
        victim, where, number = os.environ.get("KILL", "nobody:nowhere:0").split(":")
        is_chosen = where == place and os.environ.get("RANK") == ("1" if victim == "rank" else "0")
        self.victim, self.number = victim, int(number) if is_chosen else 0

    def passes(self) -> None:
        self.count += 1
        if self.count == self.number:
            agent = _parent(os.getpid())
            launcher = _parent(_parent(agent))  # the reaper is between them
            os.kill(
                {"rank": os.getpid(), "agent": agent, "launcher": launcher}[self.victim],
                signal.SIGKILL,
            )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.ReLU()) for _ in range(3)
        )
        self.last = nn.Linear(32, 1)
        self.fate = Fate("forward")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.fate.passes()
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.last(x), y)


class Vectors(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = (
            torch.randn(50, 32, generator=generator),
            torch.randn(50, 1, generator=generator),
        )
        self.fate = Fate("data")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.fate.passes()
        return self.x[index], self.y[index]


_hook = Fate("hook")
_asked_after = int(
    os.environ.get("ASKED_AFTER", 0)
)  # rank 0 waits after this step until it was asked to save, or for a profile


def on_step(context: Any) -> None:
    _hook.passes()
    while context.step == _asked_after and context.is_main and not is_asked():
        time.sleep(0.01)


def is_asked() -> bool:
    handler: Any = signal.getsignal(SAVE)
    return bool(handler.__self__._wants_save or handler.__self__._wants_profile)
