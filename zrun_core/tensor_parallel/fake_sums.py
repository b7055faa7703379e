"""Over how many values an operation of torch's sums, and whether over several tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from zrun_core.zero.passes.module_hooks import tensors_in

# Where an operation has the dimension along which it goes; -1 if it is not said.
_DIMS = {
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort"), 1),
    **dict.fromkeys(("cummax", "cummin", "median", "nanmedian", "mode"), 1),
    **dict.fromkeys(("topk", "kthvalue"), 2),
}
PRODUCTS = ("bmm", "baddbmm")
_NORMS = ("native_layer_norm", "_fused_rms_norm")
_REDUCTIONS = {
    *("sum", "mean", "var", "var_mean", "std", "prod", "amax", "amin", "max", "min"),
    *("argmax", "argmin", "logsumexp", "linalg_vector_norm", "norm", "any", "all", "aminmax"),
}


_MIXERS = ("convolution", "native_batch_norm", "_native_batch_norm_legit", *PRODUCTS)


def looks_at_tokens(name: str, args: Any, out: Any) -> bool:
    """Return whether an operation makes something of more than one token.

    Tokens are [batch, sequence, width] or [batch * sequence, width], so what goes along the last
    dimension does not.

    Args:
        name: of the operation, as torch calls it.
    """
    if name in _MIXERS or name.startswith("_scaled_dot_product"):
        return True
    if name in _DIMS and not _is_of_all(name, args):
        position = _DIMS[name]
        dim = args[position] if len(args) > position else -1
        return dim not in (-1, args[0].dim() - 1)
    if (name in _REDUCTIONS or _is_of_all(name, args)) and args[0].dim() > 1 and args[0].numel():
        rows = args[0].numel() // args[0].shape[-1]
        return bool(tensors_in(out)[0].numel() != rows)
    return False


def picks_tokens(name: str, args: Any) -> bool:
    """Return whether an operation takes so many tokens as values say: others on each rank."""
    if name != "index":
        return name in ("nonzero", "masked_select")
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def summed_over(name: str, args: Any, out: Any) -> Iterator[int]:
    """Yield over how many values an operation sums, beside products with parameters.

    Args:
        name: of the operation, as torch calls it.
    """
    if name in PRODUCTS:
        yield args[-2].shape[-1]
    elif name.startswith("_scaled_dot_product"):
        query, key, value = args[:3]
        yield from (query.shape[-1], key.shape[-2], value.shape[-1])
    elif name in _DIMS and not _is_of_all(name, args):
        position = _DIMS[name]
        yield args[0].shape[args[position] if len(args) > position else -1]
    elif name in _NORMS:
        yield math.prod(args[1])
    elif name in _REDUCTIONS or _is_of_all(name, args):
        yield args[0].numel() // max(1, tensors_in(out)[0].numel())


def _is_of_all(name: str, args: Any) -> bool:
    """Return whether it is a median of all values, which has no dimension."""
    return name in ("median", "nanmedian") and len(args) == 1
