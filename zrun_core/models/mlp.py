"""A multilayer perceptron with its loss, the smallest model that trains.

In a job file: `model: zrun_core.models.mlp:mlp`.
"""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between them; classifies integer targets, regresses floating ones."""

    def __init__(self, in_dim: int, hidden_dim: int, out_dim: int, depth: int) -> None:
        super().__init__()
        widths = [in_dim, *[hidden_dim] * (depth - 1), out_dim]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """
        Args:
            x: [B, in_dim].
            y: int64 [B] of classes, or floating [B, out_dim]; None: no loss.

        Returns:
            Outputs [B, out_dim], or with `y` the mean cross-entropy or squared error (fp32, 0-d).
        """
        for index, layer in enumerate(self.layers):
            if index:
                x = F.relu(x)
            x = layer(x)
        if y is None:
            return x
        if y.is_floating_point():
            return F.mse_loss(x.float(), y.float())
        return F.cross_entropy(x.float(), y)


def mlp(in_dim: int = 32, hidden_dim: int = 64, out_dim: int = 10, depth: int = 3) -> MLP:
    """Return an MLP of `depth` linear layers, in torch's default initialisation.

    Args:
        in_dim: width of the input.
        hidden_dim: width between two layers.
        out_dim: classes, or width of the target.
        depth: layers.
    """
    return MLP(in_dim, hidden_dim, out_dim, depth)
