"""BERT with its masked-language-model head (Devlin et al. 2018).

In a job file: `model: zrun_core.models.bert:bert`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zrun_core.errors import JobError
from zrun_core.models.attention import Attention
from zrun_core.models.layers import Embedding, GeluMLP, Linear
from zrun_core.models.token_loss import token_loss

_STD = 0.02  # BERT's initial scale of every weight
_EPS = 1e-12  # of every LayerNorm


class EncoderLayer(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x)): BERT normalises after the residual sum."""

    def __init__(self, dim: int, heads: int, ffn_dim: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(
            dim, heads, heads, causal=False, bias=True, dropout=dropout, std=_STD, out_std=_STD
        )
        self.attention_norm = nn.LayerNorm(dim, eps=_EPS)
        self.mlp = GeluMLP(dim, ffn_dim, tanh=False, std=_STD, out_std=_STD)
        self.mlp_norm = nn.LayerNorm(dim, eps=_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; `mask` is bool [B, 1, 1, T], true at real tokens."""
        x = self.attention_norm(x + self.dropout(self.attention(x, mask=mask)))
        out: Tensor = self.mlp_norm(x + self.dropout(self.mlp(x)))
        return out


class MaskedHead(nn.Module):
    """decoder(norm(gelu(dense(x)))) + bias, the decoder tied to the token embedding."""

    def __init__(self, tokens: Embedding) -> None:
        super().__init__()
        vocab_size, dim = tokens.weight.shape
        self.dense = Linear(dim, dim, bias=True, std=_STD)
        self.norm = nn.LayerNorm(dim, eps=_EPS)
        self.decoder = Linear(dim, vocab_size, bias=True, std=_STD)
        self.decoder.weight = tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> logits [..., V]."""
        logits: Tensor = self.decoder(self.norm(F.gelu(self.dense(x))))
        return logits


class Bert(nn.Module):
    """Bidirectional encoder; token ids in, logits or the masked-language-model loss out."""

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        depth: int,
        heads: int,
        ffn_dim: int,
        seq_len: int,
        dropout: float,
        loss_chunk: int | None,
    ) -> None:
        super().__init__()
        self.loss_chunk = loss_chunk
        self.tokens = Embedding(vocab_size, dim, std=_STD)
        self.positions = Embedding(seq_len, dim, std=_STD)
        self.segments = Embedding(2, dim, std=_STD)
        self.norm = nn.LayerNorm(dim, eps=_EPS)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            EncoderLayer(dim, heads, ffn_dim, dropout) for _ in range(depth)
        )
        self.head = MaskedHead(self.tokens)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            input_ids: int64 [B, T].
            labels: int64 [B, T], the original token where one was masked, -100 elsewhere.
            attention_mask: [B, T], nonzero at real tokens; None: all are.
            token_type_ids: int64 [B, T] of 0 and 1, the segment of each token; None: all in segment
                0.

        Returns:
            Logits [B, T, V], or with labels their mean cross-entropy in nats per masked token
            (fp32, 0-d).

        Raises:
            ValueError: the sequence is longer than the model.
        """
        length = input_ids.shape[1]
        seq_len = self.positions.num_embeddings
        if length > seq_len:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the model's seq_len {seq_len}"
            )
        positions = torch.arange(length, device=input_ids.device)
        segments = token_type_ids
        if segments is None:
            segments = torch.zeros_like(input_ids)
        x = self.tokens(input_ids)  # [B, T, D]
        x = x + self.positions(positions) + self.segments(segments)
        x = self.dropout(self.norm(x))
        mask = None
        if attention_mask is not None:
            mask = attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, mask)
        if labels is not None:
            return token_loss(x, labels, self.head, self.loss_chunk)
        logits: Tensor = self.head(x)
        return logits


def bert(
    *,
    vocab_size: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ffn_dim: int | None = None,
    seq_len: int = 512,
    dropout: float = 0.1,
    loss_chunk: int | None = None,
) -> Bert:
    """Return a freshly initialised BERT; the defaults are bert-base-uncased.

    Args:
        vocab_size: token ids are below it.
        dim: width of the residual stream; divides into `heads`.
        depth: layers.
        heads: attention heads per layer.
        seq_len: positions at most.
        dropout: probability, in every layer and on the embeddings.
        ffn_dim: width inside the feed-forward layer; None: 4 * dim.
        loss_chunk: positions whose logits exist at a time; None: all.

    Raises:
        JobError: `dim` does not divide into `heads`.
    """
    if dim % heads:
        raise JobError(f"bert: dim {dim} does not divide into {heads} heads")
    return Bert(
        vocab_size=vocab_size,
        dim=dim,
        depth=depth,
        heads=heads,
        ffn_dim=ffn_dim or 4 * dim,
        seq_len=seq_len,
        dropout=dropout,
        loss_chunk=loss_chunk,
    )
