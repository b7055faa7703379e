"""The class, the options and the parameter groups that `zrun_core.optimizer` is given, looked at where they enter."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from zrun_core.errors import JobError, UserCodeError
from zrun_core.optim.resolve import (
    MOMENTS,
    OptimizerSpec,
    arguments_of,
    find_class,
    spec_of,
    with_bf16_moments,
)


def choose(
    name: str | Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    groups: Sequence[Mapping[str, Any]],
    moments: str,
    device: torch.device,
) -> OptimizerSpec:
    """What `name` and `options` ask for; the options of each group are looked at too.

    Raises:
        JobError: no such optimizer, arguments that it does not take, or one that cannot work on shards.
    """
    if moments not in MOMENTS:
        raise JobError(f"optimizer(moments={moments!r}): write fp32 or bf16")
    try:
        build = find_class(name, _no_reference) if isinstance(name, str) else name
        title = name if isinstance(name, str) else getattr(name, "__name__", str(name))
        if not callable(build):
            raise JobError(f"{title} is no optimizer: pass a name, or a class")
        if moments == "bf16":
            build = with_bf16_moments(title, build)
        accepted = arguments_of(build)
        takes_all = any(param.kind is inspect.Parameter.VAR_KEYWORD for param in accepted.values())
        for key in options if not takes_all else ():
            if key not in accepted:
                near = difflib.get_close_matches(key, [*accepted, "moments"], 1)
                hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(accepted)}"
                raise JobError(f"{title} has no argument {key!r}; {hint}")
        chosen = spec_of(title, build, options, device, MOMENTS[moments])
        for own in _own_options(chosen, groups, accepted):
            in_group = spec_of(title, build, options | own, device, MOMENTS[moments])
            if "fused" in chosen.kwargs and "fused" not in in_group.kwargs:
                chosen = spec_of(title, build, {**options, "fused": False}, device)
        return chosen
    except JobError as error:
        text = str(error).removeprefix("optim.name: ").removeprefix("optim: ")
        text = text.replace("optim.moments: bf16", 'moments="bf16"')
        raise JobError(f"optimizer(): {text}") from None


def _own_options(
    chosen: OptimizerSpec, groups: Sequence[Mapping[str, Any]], accepted: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """What each group sets of the optimizer's arguments, where it sets any.

    Raises:
        JobError: it sets one that holds for all groups.
    """
    defaults = chosen.make([nn.Parameter(torch.zeros(1))]).defaults
    for number, group in enumerate(groups):
        own = {key: value for key, value in group.items() if key in accepted}
        if shared := own.keys() - defaults.keys():
            key = sorted(shared)[0]
            raise JobError(
                f"groups[{number}] has {key!r}, which holds for all groups: write optimizer(..., {key}=...)"
            )
        if own:
            yield own


def _no_reference(reference: str) -> NoReturn:
    raise JobError(f"{reference}: pass the class itself")


def make_groups(
    model: nn.Module, groups: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """`groups` with their parameters as lists, each checked to be one of the model's own, and in one group only."""
    names = {id(param): name for name, param in model.named_parameters() if param.requires_grad}
    if groups is None:
        return [{"params": [param for param in model.parameters() if param.requires_grad]}]
    if not isinstance(groups, Iterable):
        raise UserCodeError(
            f"optimizer(groups={groups!r}): write a list of parameter groups, as torch takes them"
        )
    seen: set[int] = set()
    made = []
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise UserCodeError(f'optimizer(): groups[{number}] is no mapping with "params"')
        params = group["params"]
        members = [params] if isinstance(params, torch.Tensor) else list(_iterable(params, number))
        for place, param in enumerate(members):
            if id(param) not in names:
                what = (
                    f"a parameter of shape {tuple(param.shape)}"
                    if isinstance(param, torch.Tensor)
                    else repr(param)
                )
                raise UserCodeError(
                    f"optimizer(): groups[{number}] holds {what} (number {place}) that is none of this model's, or "
                    "requires no gradient: take them from model.named_parameters() after shard()"
                )
            if id(param) in seen:
                raise UserCodeError(
                    f"optimizer(): {names[id(param)]} is in two groups: leave it in one"
                )
            seen.add(id(param))
        made.append({**group, "params": members})
    if missing := [name for key, name in names.items() if key not in seen]:
        raise UserCodeError(
            f"optimizer(): {len(missing)} parameters are in no group, {missing[0]} first: add them, or call "
            "requires_grad_(False) on them before shard()"
        )
    return made


def _iterable(params: Any, number: int) -> Iterable[Any]:
    if not isinstance(params, Iterable):
        raise UserCodeError(
            f'optimizer(): groups[{number}]["params"] is {type(params).__name__}, not parameters'
        )
    return params
