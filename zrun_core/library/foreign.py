"""Refusal of torch functions that would find no gradients on sharded parameters and do nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zrun_core.errors import UserCodeError

_OWNED = "_zrun_owned"  # attribute of our optimizers, and of sharded models' parameters
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")

_is_watching = False


def own(module: nn.Module) -> None:
    """Mark the parameters of a sharded model as ours, and refuse foreign functions on them."""
    global _is_watching
    for param in module.parameters():
        setattr(param, _OWNED, True)
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_refuse_step)
        for name in _CLIPPING:
            _refuse_clipping(name)


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, _OWNED, False):
        return
    if any(_is_owned(group["params"]) for group in optimizer.param_groups):
        name = type(optimizer).__name__
        raise UserCodeError(
            f"{name}.step(): its parameters belong to a sharded model, which keeps the gradients "
            f"elsewhere: write optimizer = zrun_core.optimizer(model, torch.optim.{name}, lr=...) "
            "after shard()"
        )


def _refuse_clipping(name: str) -> None:
    """Put a check in front of one of torch's clipping functions.

    A script may have imported it already: a wrapper that runs the function without gradients. So
    the function inside the wrapper is replaced. Another torch may have no wrapper: then the names
    in its modules are replaced.
    """
    function = getattr(torch.nn.utils, name)
    inner = getattr(function, "__wrapped__", None)
    for cell in getattr(function, "__closure__", None) or ():
        if inner is not None and cell.cell_contents is inner:
            cell.cell_contents = _checking(name, inner)
            return
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        setattr(module, name, _checking(name, function))


def _checking(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        found = list(parameters)
        if _is_owned(found):
            limit = "max_norm" if name == "clip_grad_norm_" else "..."
            raise UserCodeError(
                f"{name}(): these parameters belong to a sharded model, which keeps the gradients "
                "elsewhere: nothing would be clipped. "
                f"Write zrun_core.optimizer(model, ..., clip={limit}), "
                "which clips the global norm; optimizer.grad_norm tells it"
            )
        return function(found, *args, **kwargs)

    return checked


def _is_owned(params: Iterable[Any]) -> bool:
    return any(getattr(param, _OWNED, False) for param in params)
