"""Torch's optimizers without torch's compiler.

The first optimizer that is built imports `torch._dynamo`, only to keep itself out of compiled graphs: about a second,
and 75 MB of every rank's memory. Nothing here compiles an optimizer, so both decorators that do so are passed by. They
are details of torch: where a release has other ones, the import happens, and nothing else changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch


def build(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    params: Sequence[torch.Tensor],
    kwargs: dict[str, Any],
) -> torch.optim.Optimizer:
    """`optimizer_class(params, **kwargs)`."""
    undecorated = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if undecorated is not None:
        undecorated.__dict__.setdefault(
            "__dynamo_disable", undecorated
        )  # what the decorator would import it for
    return optimizer_class(list(params), **kwargs)


def step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`."""
    if type(optimizer).__module__.startswith("torch.optim."):
        with torch.no_grad():  # as the decorator would
            inspect.unwrap(type(optimizer).step)(optimizer)
    else:
        optimizer.step()
