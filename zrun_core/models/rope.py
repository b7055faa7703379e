"""Rotary position embedding (Su et al. 2021): the angles by which queries and keys rotate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class Rope(nn.Module):
    """Cosines and sines of position * theta^(-2i/H) for a head of size H, kept in fp32.

    The table is a non-persistent buffer: it follows the module's device, is in no checkpoint, and
    is computed anew when the module is cast or leaves the meta device. In bf16 positions above 256
    would collapse onto each other.
    """

    table: Tensor  # fp32 [2, seq_len, H / 2]: cosines, sines

    def __init__(self, head_dim: int, seq_len: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.seq_len = seq_len
        self.theta = theta
        self.register_buffer(
            "table", torch.empty(2, seq_len, head_dim // 2, dtype=torch.float32), persistent=False
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the table on the device where it lies; angles are computed in fp64."""
        device = self.table.device
        if device.type == "meta":
            # There are no values; `outer` would import torch's compiler, and `empty_like` sympy.
            self.table = torch.empty(self.table.shape, dtype=torch.float32, device=device)
            return
        dims = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
        exponents = dims / self.head_dim  # [H / 2]
        positions = torch.arange(self.seq_len, dtype=torch.float64, device=device)
        angles = torch.outer(positions, self.theta**-exponents)  # [seq_len, H / 2]
        self.table = torch.stack((angles.cos(), angles.sin())).float()

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.reset_parameters()
        return self

    def forward(self, length: int) -> Tensor:
        """Return the table for the first `length` positions, fp32 [2, length, H / 2]."""
        return self.table[:, :length]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + H/2]) of a head by its position's angles, in fp32.

    Args:
        x: [B, heads, T, H], of any format.
        table: fp32 [2, T, H / 2] from `Rope`.

    Returns:
        [B, heads, T, H], in the format of `x`.
    """
    cos, sin = table  # each [T, H / 2]
    first, second = x.float().chunk(2, dim=-1)  # each [B, heads, T, H / 2]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
