"""A model's parameters and modules as data, and a module tree made of them again.

`describe_params` and `describe_modules` are what a profile keeps; `skeleton_of` makes a tree of it
on the meta device, without the user's code, which is cut into the same units as the model.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zrun_core.memory.layout import dense_stride
from zrun_core.plan.trace.profile import ModuleInfo, ParamInfo, Profile
from zrun_core.zero.wrap.auto_wrap import repeated_blocks, running_norm_params
from zrun_core.zero.wrap.tiled_linear import TiledLinear


def describe_params(model: nn.Module, compute: torch.dtype) -> tuple[ParamInfo, ...]:
    """Return every parameter, under its first name, in the dtype in which it is computed with."""
    in_fp32 = running_norm_params(model)
    block_of = {
        id(param): number
        for number, (_, block) in reversed([*enumerate(repeated_blocks(model))])
        for param in block.parameters()
    }
    found = []
    for name, param in model.named_parameters():
        dtype = torch.float32 if id(param) in in_fp32 else compute
        found.append(
            ParamInfo(
                name,
                tuple(param.shape),
                str(dtype).removeprefix("torch."),
                param.requires_grad,
                block_of.get(id(param), -1),
                tuple(dense_stride(param)),
            )
        )
    return tuple(found)


def describe_modules(model: nn.Module) -> tuple[ModuleInfo, ...]:
    """Return the module tree, parents before children, as `skeleton_of` builds it again."""
    names = {id(param): name for name, param in model.named_parameters()}
    kinds: dict[type, int] = {}
    first: dict[int, str] = {}
    found: list[ModuleInfo] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in first:
            is_inside_another = any(
                name.startswith(f"{info.name}.") for info in found if info.same_as
            )
            if not is_inside_another:
                found.append(ModuleInfo(name, 0, same_as=first[id(module)]))
            continue
        first[id(module)] = name
        container = ""
        if isinstance(module, nn.ModuleList):
            container = "list"
        elif isinstance(module, nn.Sequential):
            container = "sequential"
        elif isinstance(module, TiledLinear):
            container = f"tiles of dimension {module.dim}"
        own = [(key, param) for key, param in module._parameters.items() if param is not None]
        info = ModuleInfo(
            name,
            kinds.setdefault(type(module), len(kinds)),
            container,
            running=isinstance(module, _NormBase) and bool(module.track_running_stats),
            params=tuple((key, names[id(param)]) for key, param in own),
        )
        found.append(info)
    return tuple(found)


class _Plain(nn.Module):
    """Stands for a module of any class."""


def skeleton_of(profile: Profile) -> nn.Module:
    """Return the module tree that `profile` describes.

    Its names are the same, its classes are told apart, and its parameters are tied as they were.

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
    for module in made.values():
        if isinstance(module, TiledLinear):
            weights = [tile.get_parameter("weight") for tile in module.children()]
            vars(module)["sizes"] = [weight.shape[module.dim] for weight in weights]
    return made[""]


def _make(info: ModuleInfo, kinds: dict[tuple[int, bool], type[nn.Module]]) -> nn.Module:
    base: type[nn.Module] = _Plain
    if info.container == "list":
        base = nn.ModuleList
    elif info.container == "sequential":
        base = nn.Sequential
    elif info.running:
        base = _NormBase
    elif info.container:
        base = TiledLinear
    kind = kinds.setdefault((info.kind, info.running), type(f"Kind{info.kind}", (base,), {}))
    if base not in (_NormBase, TiledLinear):
        return kind()
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    if base is TiledLinear:
        vars(module)["dim"] = int(info.container.rpartition(" ")[2])
    else:
        vars(module)["track_running_stats"] = True
    return module
