"""A GPT whose training forwards pause, as on slower devices; and a hook that ends a run in time.

Copied beside the job of `async_server.py`, which names both.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

from zrun_core.models.gpt import gpt
from zrun_core.train.user_hooks import HookContext

_begun: list[float] = []


class Paced(nn.Module):
    """The last rank pauses `slowed` times as long as the others."""

    def __init__(self, pause_s: float, slowed: float, **args: Any) -> None:
        super().__init__()
        self.inner = gpt(**args)
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        self.pause_s = pause_s * (slowed if is_last else 1.0)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        if self.training:
            time.sleep(self.pause_s)
        return self.inner(input_ids=input_ids, labels=labels)


def end_in_time(context: HookContext) -> None:
    """End the run when it has trained for so many seconds, evaluations included."""
    _begun.append(time.monotonic())
    if context.is_main and _begun[-1] - _begun[0] > float(os.environ["SECONDS_TO_TRAIN"]):
        context.stop("time is over")
