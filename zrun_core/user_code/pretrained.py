"""Recognise models of transformers by what they look like: the library need not be installed."""

from __future__ import annotations

from typing import Any

from torch import nn


def config_of(module: nn.Module) -> Any | None:
    """Return the config that a module of transformers has; None for any other module."""
    config = vars(module).get("config")
    has_type = isinstance(getattr(config, "model_type", None), str)
    return config if has_type and callable(getattr(config, "to_json_string", None)) else None


def outermost(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return name and module of the first model in `model` that `from_pretrained` can build.

    The name is "" where it is `model` itself. None: there is no such model.
    """
    for name, module in model.named_modules():
        is_loadable = callable(getattr(module, "from_pretrained", None))
        if is_loadable and config_of(module) is not None:
            return name, module
    return None
