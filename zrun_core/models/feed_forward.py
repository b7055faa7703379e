"""The two feed-forward layers of transformers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from zrun_core.models.layers import Linear


class GeluMLP(nn.Module):
    """down(gelu(up(x))) with biases; GPT-2 approximates the GELU by tanh, BERT does not (Hendrycks, Gimpel 2016)."""

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
