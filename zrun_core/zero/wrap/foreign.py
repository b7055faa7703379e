"""Parameters that another rank has: of a model that is cut between ranks, what is not here."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager

import torch
from torch import nn

_REMOVED = "_zrun_removed"  # attribute of a module: names of its parameters that are not here


def remove_param(module: nn.Module, key: str, stand_in: torch.Tensor) -> None:
    """Remove a parameter; code that looks at it finds `stand_in`.

    Args:
        stand_in: of the same shape, no parameter.
    """
    del module._parameters[key]
    vars(module)[key] = stand_in
    vars(module).setdefault(_REMOVED, []).append(key)


def had_params(module: nn.Module) -> bool:
    """Return whether a parameter of `module`, or of a module inside, is here or was removed."""
    return any(True for _ in module.parameters()) or lacks_params(module)


def lacks_params(module: nn.Module) -> bool:
    """Return whether a parameter of `module`, or of a module inside, was removed."""
    return any(_REMOVED in vars(inner) for inner in module.modules())


@contextmanager
def only_params(model: nn.Module, names: Container[str]) -> Iterator[None]:
    """Remove all parameters of `model` but these inside, and put them back.

    Args:
        names: first names of those that stay.
    """
    stay = {id(param) for name, param in model.named_parameters() if name in names}
    before = [(module, dict(module._parameters)) for module in model.modules()]
    try:
        for module, params in before:
            for key, param in params.items():
                if param is not None and id(param) not in stay:
                    remove_param(module, key, param.data)
        yield
    finally:
        for module, params in before:
            for key in vars(module).pop(_REMOVED, ()):
                del vars(module)[key]
            module._parameters.update(params)
            for key in params:  # in the order in which they were
                module._parameters[key] = module._parameters.pop(key)
