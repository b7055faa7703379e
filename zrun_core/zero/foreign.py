"""Parameters that another rank has: of a model that is cut between ranks, what is not here."""

from __future__ import annotations

import torch
from torch import nn

_REMOVED = "_zrun_removed"  # attribute of a module: names of its parameters that are not here


def remove_param(module: nn.Module, key: str, stand_in: torch.Tensor) -> None:
    """Remove a parameter; code that looks at it finds `stand_in`.

    Args:
        module: that has it.
        key: its name there.
        stand_in: of the same shape, no parameter.
    """
    del module._parameters[key]
    vars(module)[key] = stand_in
    vars(module).setdefault(_REMOVED, []).append(key)


def had_params(module: nn.Module) -> bool:
    """Return whether a parameter of `module`, or of a module inside, is here or was removed."""
    if any(True for _ in module.parameters()):
        return True
    return any(_REMOVED in vars(inner) for inner in module.modules())
