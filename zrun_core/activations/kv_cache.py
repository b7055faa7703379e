"""Leave out the cache of keys and values that decoders of transformers fill in training too.

Their config says `use_cache: true` by default, and each block then keeps a copy of its keys and
values. A block that is recomputed in backward would append them a second time, so the model's own
gradient checkpointing leaves the cache out; a compiled block would be compiled once per layer,
because each has a place of its own in it; and it would go around the borders of a pipeline.
Passes without gradients, such as those of `model.generate`, and the config itself stay as the user
has set them; in a pipeline those of an evaluation keep no cache either, as nobody asks for it.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zrun_core.errors import UserCodeError
from zrun_core.user_code.pretrained import config_of

_ARGUMENT = "use_cache"


def omit_cache(model: nn.Module, *, only_with_gradients: bool = True) -> list[RemovableHandle]:
    """Have differentiated passes of `model` keep no cache.

    A forward that is asked for its cache by an argument of its own still keeps one.

    Args:
        model: a model of transformers, or any module around some of these.
        only_with_gradients: passes without gradients stay as they are.

    Returns:
        the hooks that do it; none where the model would keep no cache.
    """
    hooks = []
    for module in filter(_is_on, model.modules()):
        places = list(inspect.signature(module.forward).parameters)
        if _ARGUMENT in places:
            hook = functools.partial(_without_cache, places.index(_ARGUMENT), only_with_gradients)
            hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    return hooks


def _is_on(module: nn.Module) -> bool:
    return getattr(config_of(module), _ARGUMENT, None) is True


def _without_cache(
    place: int, only_with_gradients: bool, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Pre-forward hook: pass `use_cache=False` unless the caller has passed something.

    `place` is that of the argument among the positional ones of `forward`.
    """
    is_given = len(args) > place or kwargs.get(_ARGUMENT) is not None
    if is_given:
        return None
    is_left = only_with_gradients and not torch.is_grad_enabled()
    if is_left or not _is_on(module):
        return None
    return args, {**kwargs, _ARGUMENT: False}


def refuse_cache(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Pre-forward hook of a recomputed block: refuse a cache, to which it would append twice.

    Raises:
        UserCodeError: a cache is among its arguments.
    """
    if not torch.is_grad_enabled():
        return
    if any(_is_cache(value) for value in (*args, *kwargs.values())):
        raise UserCodeError(
            f"{name} is recomputed in backward, and was given a cache of keys and values, to which "
            "it would append twice: call the model with use_cache=False, or write "
            "activations.checkpoint: none"
        )


def _is_cache(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("get_seq_length", "update"))
