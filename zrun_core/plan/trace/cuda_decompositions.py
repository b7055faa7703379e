"""Make a trace on fake CPU tensors follow what CUDA's kernels keep for backward.

Fake tensors on `cuda` need a torch that is built for it. Instead, operators that are composed of
others before autograd sees them get the composition of the other device, in this process only. That
is where the two differ in what backward keeps: CUDA draws dropout into a mask of one byte per
element, has a fused RMSNorm, attends by flash or memory-efficient kernels also under dropout or a
mask, and its autocast computes norms, softmax and losses in fp32.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten
_LOW = (torch.float16, torch.bfloat16)
# What autocast computes in fp32 on CUDA, as torch's documentation lists it ("CUDA Ops that can
# autocast to float32").
_IN_FP32 = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "rms_norm",
    "native_layer_norm",
    "group_norm",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "cdist",
    "renorm",
    "logsumexp",
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "sum",
    "sum.dim_IntList",
    "norm.Scalar",
)
_libraries: list[torch.library.Library] = []  # what they register ends with them


def follow_cuda() -> None:
    """Compose operators as on CUDA from now on, in this process."""
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they override a kernel
        for name in _IN_FP32:
            op: Any = functools.reduce(getattr, name.split("."), _ATEN)
            op = op if "." in name else op.default
            library.impl(name, functools.partial(_in_fp32, op), "AutocastCPU")
        library.impl("dropout", _dropout, "CompositeImplicitAutograd")
        library.impl("_fused_rms_norm", _fused_rms_norm, "CompositeImplicitAutograd")
        library.impl("rms_norm", _rms_norm, "CompositeImplicitAutograd")
        library.impl("scaled_dot_product_attention", _attention, "CompositeImplicitAutograd")


def _in_fp32(op: Any, *args: Any, **kwargs: Any) -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        wide_kwargs = {key: _wide(value) for key, value in kwargs.items()}
        return op(*(_wide(arg) for arg in args), **wide_kwargs)


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in _LOW:
        return value.float()
    return value


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or not x.numel():
        return x
    return _ATEN.native_dropout(x, p, train)[0]  # type: ignore[no-any-return]


class _RmsNorm(torch.autograd.Function):
    """Keeps the input and a factor per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = x.shape[: x.dim() - dims]
        factor = x.new_empty((*rows, *[1] * dims), dtype=torch.float32)
        ctx.save_for_backward(x, weight, factor)
        ctx.dims = dims
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        weight_grad = None
        if weight is not None and ctx.needs_input_grad[1]:
            weight_grad = torch.empty_like(weight)
        return torch.empty_like(x), weight_grad, None


def _rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _RmsNorm.apply(x, weight, len(shape))  # type: ignore[no-any-return, no-untyped-call]


def _fused_rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    dims = len(shape)
    factor = x.new_empty((*x.shape[: x.dim() - dims], *[1] * dims), dtype=torch.float32)
    return _rms_norm(x, shape, weight, eps), factor


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as torch chooses on a recent GPU: flash, memory-efficient, or matrices of scores.

    `query` is [batch, heads, positions, size], and `key` and `value` are [batch, kv heads,
    positions, size]; `attn_mask` broadcasts to [batch, heads, positions, positions]. A `scale` of
    None is 1 / sqrt(size). With `enable_gqa` there are fewer heads of keys and values than of
    queries.
    """
    is_low = query.dtype in _LOW
    size = query.shape[-1]
    is_batch = query.dim() == key.dim() == value.dim() == 4
    can_flash = is_low and attn_mask is None and size == value.shape[-1] <= 256
    if is_batch and can_flash:
        padding = -size % 8
        if padding:
            query, key, value = (
                torch.nn.functional.pad(each, (0, padding)) for each in (query, key, value)
            )
        out = _ATEN._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return out[..., :size] if padding else out  # type: ignore[no-any-return]
    has_learnt_mask = attn_mask is not None and attn_mask.requires_grad
    can_be_efficient = query.dtype in (*_LOW, torch.float32) and not has_learnt_mask
    if is_batch and can_be_efficient:
        if enable_gqa and key.shape[1] != query.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(repeats, 1)
            value = value.repeat_interleave(repeats, 1)
        bias = None
        if attn_mask is not None:
            bias = attn_mask
            if bias.dtype == torch.bool:
                bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                    attn_mask.logical_not(), -torch.inf
                )
            bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        out = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
        )
        return out[0]  # type: ignore[no-any-return]
    return _ATEN._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
