"""Dropout that drops nothing.

Inside of layers that tensor parallelism divides each rank draws for its own slice, so no other
layout can draw the same. A run that is to be compared leaves dropout out on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

_FUNCTIONS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


@contextmanager
def without_dropout() -> Iterator[None]:
    """Have all dropout of torch's functions return its input inside."""
    attend = F.scaled_dot_product_attention

    def without(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **options: Any,
    ) -> Any:
        return attend(query, key, value, attn_mask, 0.0, *args, **options)

    with ExitStack() as stack:
        for name in _FUNCTIONS:
            stack.enter_context(patch.object(F, name, _as_is))
        stack.enter_context(patch.object(torch, "dropout", _as_is))
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", without))
        yield


def has_dropout(model: nn.Module) -> bool:
    """Return whether a module of the model drops something in training."""
    return any(
        getattr(module, "p", 0) or getattr(module, "dropout", 0)
        for module in model.modules()
        if isinstance(module, nn.modules.dropout._DropoutNd | nn.MultiheadAttention)
    )


def _as_is(input: Any, *_: Any, **__: Any) -> Any:
    return input
