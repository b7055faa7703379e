"""Linear, embedding and feed-forward layers that know their initial scale.

Every module that owns parameters can draw them again by `reset_parameters()`, also after it was
built on the meta device. torch's own layers would draw from their default distribution then, not
from the model's.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer with weights from N(0, std^2) and zero biases."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float) -> None:
        self.std = std  # before the base class: it calls reset_parameters
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Draw the weights, clear the bias."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding table with entries from N(0, std^2)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float) -> None:
        self.std = std  # before the base class: it calls reset_parameters
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the table."""
        nn.init.normal_(self.weight, std=self.std)


class GeluMLP(nn.Module):
    """down(gelu(up(x))) with biases (Hendrycks, Gimpel 2016).

    GPT-2 approximates the GELU by tanh, BERT does not.
    """

    def __init__(self, dim: int, ffn_dim: int, *, tanh: bool, std: float, out_std: float) -> None:
        super().__init__()
        self.approximate = "tanh" if tanh else "none"
        self.up = Linear(dim, ffn_dim, bias=True, std=std)
        self.down = Linear(ffn_dim, dim, bias=True, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        out: Tensor = self.down(F.gelu(self.up(x), approximate=self.approximate))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) without biases (Shazeer 2020)."""

    def __init__(self, dim: int, ffn_dim: int, *, std: float, out_std: float) -> None:
        super().__init__()
        self.gate = Linear(dim, ffn_dim, bias=False, std=std)
        self.up = Linear(dim, ffn_dim, bias=False, std=std)
        self.down = Linear(ffn_dim, dim, bias=False, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out
