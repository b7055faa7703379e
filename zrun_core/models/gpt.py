"""A decoder-only language model in two flavours, from a job file:

    model: {call: "zrun_core.models.gpt:gpt", args: {flavour: llama, dim: 512, depth: 8, heads: 8}}

`gpt2`: learned positions, LayerNorm, GELU, biases (Radford et al. 2019). `llama`: RoPE, RMSNorm,
SwiGLU, grouped queries, no biases (Touvron et al. 2023). Both normalise before each layer and can
tie the head to the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from zrun_core.errors import JobError
from zrun_core.models.attention import Attention
from zrun_core.models.layers import Embedding, GeluMLP, Linear, SwiGLU
from zrun_core.models.rope import Rope
from zrun_core.models.token_loss import token_loss

_STD = 0.02  # GPT-2's initial scale of every weight


class Flavour(StrEnum):
    """The layers that a block is made of."""

    GPT2 = "gpt2"
    LLAMA = "llama"


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT; checked when it is made.

    Raises:
        JobError: the numbers do not fit each other.
    """

    flavour: Flavour
    vocab_size: int
    dim: int
    depth: int
    heads: int
    kv_heads: int
    seq_len: int  # positions at most
    ffn_dim: int
    tied: bool
    dropout: float
    norm_eps: float
    rope_theta: float
    loss_chunk: int | None  # positions per chunk of the loss; None: all at once

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise JobError(f"gpt: dim {self.dim} does not divide into {self.heads} heads")
        if self.heads % self.kv_heads:
            raise JobError(f"gpt: {self.heads} heads do not divide over {self.kv_heads} kv_heads")
        if self.flavour is Flavour.LLAMA and self.head_dim % 2:
            division = f"dim {self.dim} / {self.heads} heads = {self.head_dim}"
            raise JobError(f"gpt: RoPE rotates pairs, but {division} is odd")
        if self.flavour is Flavour.LLAMA and self.dropout:
            raise JobError("gpt: the llama flavour has no dropout: write dropout: 0")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def residual_std(self) -> float:
        """Initial scale of the layers that add to the residual stream.

        There are 2 * depth of them, which together keep its variance.
        """
        return float(_STD / (2 * self.depth) ** 0.5)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        is_gpt2 = config.flavour is Flavour.GPT2
        self.attention_norm = _norm(config)
        self.attention = Attention(
            config.dim,
            config.heads,
            config.kv_heads,
            causal=True,
            bias=is_gpt2,
            dropout=config.dropout,
            std=_STD,
            out_std=config.residual_std,
        )
        self.mlp_norm = _norm(config)
        self.mlp = _mlp(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; `rope` is fp32 [2, T, H / 2], or None in the gpt2 flavour."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rope))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class GPT(nn.Module):
    """Token ids in, next-token logits or their mean loss out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.vocab_size, config.dim, std=_STD)
        if config.flavour is Flavour.GPT2:
            self.positions = Embedding(config.seq_len, config.dim, std=_STD)
        else:
            self.rope = Rope(config.head_dim, config.seq_len, config.rope_theta)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = _norm(config)
        self.head = Linear(config.dim, config.vocab_size, bias=False, std=_STD)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """
        Args:
            input_ids: int64 [B, T], T at most `config.seq_len`.
            labels: int64 [B, T]; labels[b, t] is the token that follows input_ids[b, t], or -100.

        Returns:
            Logits [B, T, V], or with labels the mean cross-entropy in nats per token (fp32, 0-d).

        Raises:
            ValueError: the sequence is longer than the model.
        """
        length = input_ids.shape[1]
        if length > self.config.seq_len:
            limit = self.config.seq_len
            raise ValueError(
                f"a sequence of {length} tokens is longer than the model's seq_len {limit}"
            )
        x = self.tokens(input_ids)  # [B, T, D]
        rope = None
        if self.config.flavour is Flavour.GPT2:
            x = x + self.positions(torch.arange(length, device=input_ids.device))
        else:
            rope = self.rope(length)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, rope)
        x = self.norm(x)
        if labels is not None:
            return token_loss(x, labels, self.head, self.config.loss_chunk)
        logits: Tensor = self.head(x)
        return logits


def gpt(
    flavour: str = "gpt2",
    *,
    vocab_size: int = 256,
    dim: int = 384,
    depth: int = 6,
    heads: int = 6,
    kv_heads: int | None = None,
    seq_len: int = 256,
    ffn_dim: int | None = None,
    tied: bool = True,
    dropout: float = 0.0,
    norm_eps: float = 1e-5,
    rope_theta: float = 10_000.0,
    loss_chunk: int | None = None,
) -> GPT:
    """Return a freshly initialised GPT.

    Args:
        flavour: gpt2 or llama.
        vocab_size: token ids are below it.
        dim: width of the residual stream; divides into `heads`.
        depth: blocks.
        heads: attention heads per block.
        seq_len: positions at most.
        tied: use the token embedding for the head, too.
        dropout: probability; 0 in the llama flavour.
        norm_eps: added to the variance in every norm.
        rope_theta: base of the rotation's frequencies (llama).
        kv_heads: key and value heads; None: as many as `heads`.
        ffn_dim: width inside the feed-forward layer; None: 4 * dim (gpt2), 8/3 * dim up to a
            multiple of 256 (llama).
        loss_chunk: positions whose logits exist at a time; None: all.

    Raises:
        JobError: the flavour is unknown, or the numbers do not fit each other.
    """
    if flavour not in tuple(Flavour):
        raise JobError(f"gpt: there is no flavour {flavour!r}: write {' or '.join(Flavour)}")
    if ffn_dim is None:
        if flavour == Flavour.GPT2:
            ffn_dim = 4 * dim
        else:
            ffn_dim = -(-8 * dim // 3 // 256) * 256
    return GPT(
        GPTConfig(
            flavour=Flavour(flavour),
            vocab_size=vocab_size,
            dim=dim,
            depth=depth,
            heads=heads,
            kv_heads=kv_heads or heads,
            seq_len=seq_len,
            ffn_dim=ffn_dim,
            tied=tied,
            dropout=dropout,
            norm_eps=norm_eps,
            rope_theta=rope_theta,
            loss_chunk=loss_chunk,
        )
    )


def _mlp(config: GPTConfig) -> nn.Module:
    if config.flavour is Flavour.GPT2:
        return GeluMLP(config.dim, config.ffn_dim, tanh=True, std=_STD, out_std=config.residual_std)
    return SwiGLU(config.dim, config.ffn_dim, std=_STD, out_std=config.residual_std)


def _norm(config: GPTConfig) -> nn.Module:
    if config.flavour is Flavour.GPT2:
        return nn.LayerNorm(config.dim, eps=config.norm_eps)
    return nn.RMSNorm(config.dim, eps=config.norm_eps)
