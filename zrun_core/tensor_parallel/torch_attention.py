"""An `nn.MultiheadAttention` of which each rank has some of the heads.

    in_proj_weight [3 * width, width]     rows of its queries, of its keys and of its values
    out_proj.weight [width, width]        columns; the results are summed over ranks

torch's own forward reads widths from its input, which stays whole, so the forward here takes its
place. It computes the same, by the kernels that torch would choose.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zrun_core.errors import UserCodeError
from zrun_core.tensor_parallel.borders import gather_out, sum_out
from zrun_core.tensor_parallel.tensor_comm import TensorComm
from zrun_core.user_code.forward_layers import Layer, wrap_forward


def replace_forward(
    attention: nn.MultiheadAttention, comm: TensorComm | None, name: str
) -> Callable[[], None]:
    """Let attention compute with the heads of which it has weights; return what undoes that.

    Args:
        attention: with slices of its parameters. Its attributes stay those of all heads.
        comm: of the ranks that have the other heads; None: as one of them, without messages.
    """
    forward = functools.partial(_own_heads, attention, comm, name)
    return wrap_forward(attention, Layer.ATTENTION, forward)


def _own_heads(
    attention: nn.MultiheadAttention,
    comm: TensorComm | None,
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what `nn.MultiheadAttention.forward` does, given the same."""
    if is_causal and attn_mask is None:
        raise UserCodeError(f"{name}: is_causal only hints at what attn_mask is: give it that too")
    is_batched = query.dim() == 3
    is_batch_first = attention.batch_first and is_batched
    q, k, v = (
        _heads(each, attention.head_dim, is_batch_first=is_batch_first)
        for each in _projected(attention, query, key, value)
    )
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None  # the kernel makes it
    else:
        is_causal = False
    index = 0 if comm is None else comm.index
    mask = _bias(attn_mask, q, attention.num_heads, index, name)
    if key_padding_mask is not None:
        padding = _as_bias(key_padding_mask, q).view(q.shape[0], 1, 1, -1)
        mask = padding if mask is None else mask + padding
    dropout = attention.dropout if attention.training else 0.0
    weights = None
    if need_weights:
        weights = _weights(q, k, mask, dropout)
        attended = weights @ v
    else:
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    if is_batch_first:
        attended = attended.transpose(1, 2).flatten(2)
    else:
        attended = attended.permute(2, 0, 1, 3).flatten(2)
    out = attention.out_proj(attended if is_batched else attended.squeeze(1))
    if weights is not None:
        weights = _of_all_heads(weights, comm, attention.num_heads, name, average_attn_weights)
        weights = weights if is_batched else weights.squeeze(0)
    return out, weights


def _projected(
    attention: nn.MultiheadAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the queries, keys and values of the heads that are here."""
    bias: Any = attention.in_proj_bias
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    packed: Any = attention.in_proj_weight
    if packed is None:
        own = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
    elif query is key and key is value:
        return F.linear(query, packed, bias).chunk(3, dim=-1)
    else:
        own = packed.chunk(3)
    return tuple(map(F.linear, (query, key, value), own, biases))


def _heads(x: torch.Tensor, head_dim: int, *, is_batch_first: bool) -> torch.Tensor:
    """Return [batch, heads, length, head_dim] of [batch, length, width], or of others.

    What a projection makes, `x`, is in the order of the module's inputs: [batch, length, width]
    with `is_batch_first`, else [length, batch, width], or [length, width] of one sample.
    """
    if x.dim() == 2:
        x = x.unsqueeze(1)
    x = x.unflatten(-1, (-1, head_dim))
    return x.transpose(1, 2) if is_batch_first else x.permute(1, 2, 0, 3)


def _as_bias(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return what is added to scores: masks of torch's attention are true where nobody looks."""
    if mask.dtype is not torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -math.inf)


def _bias(
    mask: torch.Tensor | None, q: torch.Tensor, num_heads: int, index: int, name: str
) -> torch.Tensor | None:
    """Return what the mask adds to the scores of the heads that are here.

    `mask` is [queries, keys] or [batch * num_heads, queries, keys], where `num_heads` is of all
    ranks, and `q` is [batch, heads here, queries, head_dim].
    """
    if mask is None or mask.dim() == 2:
        return None if mask is None else _as_bias(mask, q)
    batch, here = q.shape[:2]
    if mask.dim() != 3 or mask.shape[0] != batch * num_heads:
        raise UserCodeError(
            f"{name}: attn_mask is {list(mask.shape)}, and has to be [queries, keys], or "
            f"[{batch * num_heads}, queries, keys], one of each sample and head"
        )
    of_heads = mask.unflatten(0, (batch, num_heads))
    return _as_bias(of_heads.narrow(1, index * here, here), q)


def _weights(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> torch.Tensor:
    """Return how much each query takes of each key: [batch, heads, queries, keys]."""
    scores = q * math.sqrt(1.0 / q.shape[-1]) @ k.transpose(-2, -1)
    weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
    return F.dropout(weights, dropout) if dropout else weights


def _of_all_heads(
    weights: torch.Tensor, comm: TensorComm | None, num_heads: int, name: str, average: bool
) -> torch.Tensor:
    """Return the weights of attention as the whole module does.

    `weights` is [batch, heads here, queries, keys], and `num_heads` is of all ranks. With `average`
    it is the mean over heads; else there is one of each.
    """
    what = f"weights of {name}"
    if average:
        part = weights.sum(1) / num_heads
        return part if comm is None else sum_out(part, comm, what)
    return weights if comm is None else gather_out(weights, comm, 1, what)
