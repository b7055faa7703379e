"""A model without the user's code: modules and parameters by name, on the meta device, to be cut as the model is."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zrun_core.plan.trace.profile import ModuleInfo, Profile


class _Plain(nn.Module):
    """Stands for a module of any class."""


def skeleton_of(profile: Profile) -> nn.Module:
    """The module tree that `profile` describes: its names, classes told apart, parameters tied as they were.

    Raises:
        ValueError: the profile has no module tree.
    """
    if not profile.modules:
        raise ValueError("the profile has no module tree")
    params = {
        info.name: nn.Parameter(
            torch.empty_strided(
                info.shape, info.stride, device="meta", dtype=getattr(torch, info.dtype)
            ),
            requires_grad=info.trainable,
        )
        for info in profile.params
    }
    kinds: dict[tuple[int, bool], type[nn.Module]] = {}
    made: dict[str, nn.Module] = {}
    for info in profile.modules:
        module = made[info.same_as] if info.same_as else _make(info, kinds)
        made[info.name] = module
        if info.name:
            parent, _, attribute = info.name.rpartition(".")
            made[parent]._modules[attribute] = module
        if not info.same_as:
            for attribute, name in info.params:
                module._parameters[attribute] = params[name]
    return made[""]


def _make(info: ModuleInfo, kinds: dict[tuple[int, bool], type[nn.Module]]) -> nn.Module:
    if info.container == "list":
        base: type[nn.Module] = nn.ModuleList
    elif info.container == "sequential":
        base = nn.Sequential
    else:
        base = _NormBase if info.running else _Plain
    kind = kinds.setdefault((info.kind, info.running), type(f"Kind{info.kind}", (base,), {}))
    if not info.running:
        return kind()
    norm = kind.__new__(kind)
    nn.Module.__init__(norm)
    vars(norm)["track_running_stats"] = True
    return norm
