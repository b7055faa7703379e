"""What jobs of scenarios name: a model, and hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zrun_core.train.user_hooks import HookContext


def tells_mean(context: HookContext) -> None:
    """Record a mean over ranks, of which each has another number."""
    context.metric("rank", context.mean(float(context.rank + context.step)))


def ends(context: HookContext) -> None:
    """End the run after the second evaluation; the last rank asks."""
    if context.step > 1 and context.rank == context.world_size - 1:
        context.stop("that is enough")


class Translator(nn.Module):
    """torch's own encoder and decoder: the decoder's attention is given two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        x = self.embed(input_ids)
        hidden = self.layers(x, x)
        return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten())
