"""The cache of keys and values that decoders of transformers fill in training too, unless they are told not to.

Their config says `use_cache: true` by default. A block that is recomputed in backward would append its keys and values
a second time, so the model's own gradient checkpointing leaves the cache out; and a compiled block would be compiled
once per layer, because each has a place of its own in the cache. Passes without gradients, such as those of
`model.generate`, and the config itself stay as the user has set them.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zrun_core.errors import UserCodeError
from zrun_core.spine.config import ActivationsConfig
from zrun_core.user_code.pretrained import config_of

_ARGUMENT = "use_cache"


def omit_cache(
    model: nn.Module, activations: ActivationsConfig, *, compile: bool
) -> list[RemovableHandle]:
    """Have passes of `model` that are differentiated keep no cache, if blocks are recomputed or compiled.

    A forward that is asked for its cache by an argument of its own still keeps one.

    Args:
        model: a model of transformers, or any module around some of these.
        activations: which blocks are recomputed.
        compile: whether blocks are compiled.

    Returns:
        The hooks that do it; none where the model would keep no cache.
    """
    if activations.checkpoint == "none" and not compile:
        return []
    hooks = []
    for module in filter(_is_on, model.modules()):
        places = list(inspect.signature(module.forward).parameters)
        if _ARGUMENT in places:
            hook = functools.partial(_without_cache, places.index(_ARGUMENT))
            hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    return hooks


def _is_on(module: nn.Module) -> bool:
    return getattr(config_of(module), _ARGUMENT, None) is True


def _without_cache(place: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """The hook: say what the config would not, where nobody has said anything."""
    is_asked = len(args) > place or kwargs.get(_ARGUMENT) is not None
    if is_asked or not torch.is_grad_enabled() or not _is_on(module):
        return None
    return args, {**kwargs, _ARGUMENT: False}


def refuse_cache(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Look at what the block `name`, which is recomputed, is called with: a pre-hook of its forward.

    Raises:
        UserCodeError: a cache is among it, to which the block would append twice.
    """
    if torch.is_grad_enabled() and any(map(_is_cache, (*args, *kwargs.values()))):
        raise UserCodeError(
            f"{name} is recomputed in backward, and was given a cache of keys and values, to which it would append "
            "twice: call the model with use_cache=False, or write activations.checkpoint: none"
        )


def _is_cache(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("get_seq_length", "update"))
