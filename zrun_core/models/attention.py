"""Multi-head attention with grouped queries (Vaswani et al. 2017; Ainslie et al. 2023)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from zrun_core.models.layers import Linear
from zrun_core.models.rope import rotate


class Attention(nn.Module):
    """Self-attention. Each of `kv_heads` key and value heads serves heads / kv_heads query heads.

    One projection makes queries, keys and values, grouped by key head: (q, ..., q, k, v), (q, ...,
    q, k, v), ... A contiguous slice of its rows is then whole heads, and the number of heads is
    read from the projection's width.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        *,
        causal: bool,
        bias: bool,
        dropout: float,
        std: float,
        out_std: float,
    ) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.group = heads // kv_heads  # query heads per key head
        self.causal = causal
        self.dropout = dropout
        self.qkv = Linear(dim, kv_heads * (self.group + 2) * self.head_dim, bias=bias, std=std)
        self.out = Linear(dim, dim, bias=bias, std=out_std)

    def forward(self, x: Tensor, rope: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """
        Args:
            x: [B, T, D].
            rope: fp32 [2, T, H / 2], the angles of each position; None: no rotation.
            mask: bool [B, 1, 1, T], true where a position may be attended to; None: everywhere.

        Returns:
            [B, T, D].
        """
        batch, length, _ = x.shape
        # [B, T, KV, group + 2, H]
        qkv = self.qkv(x).view(batch, length, -1, self.group + 2, self.head_dim)
        q, k, v = qkv.split((self.group, 1, 1), dim=3)
        q = q.flatten(2, 3).transpose(1, 2)  # [B, KV * group, T, H]
        k = k.flatten(2, 3).transpose(1, 2)  # [B, KV, T, H]
        v = v.flatten(2, 3).transpose(1, 2)  # [B, KV, T, H]
        if rope is not None:
            q = rotate(q, rope)
            k = rotate(k, rope)
        attended = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
            enable_gqa=self.group > 1,
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out
