"""Arguments of `zrun_core.optimizer`: the class, its options, and the parameter groups."""

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
    """Return the optimizer that the arguments ask for, after a look at the options of each group.

    Args:
        name: of a class, or a class.
        options: keyword arguments of the class.
        groups: parameter groups, which may have options of their own.
        moments: fp32 or bf16.
        device: of the model.

    Raises:
        JobError: there is no such optimizer, it does not take the arguments, or it cannot work on
            shards.
    """
    if moments not in MOMENTS:
        raise JobError(f"optimizer(moments={moments!r}): write fp32 or bf16")
    try:
        return _choose(name, options, groups, moments, device)
    except JobError as error:
        raise JobError(f"optimizer(): {error.problem}") from None


def _choose(
    name: str | Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    groups: Sequence[Mapping[str, Any]],
    moments: str,
    device: torch.device,
) -> OptimizerSpec:
    build: Any = name
    title = getattr(name, "__name__", str(name))
    if isinstance(name, str):
        build = find_class(name, _no_reference, moments='moments="bf16"')
        title = name
    if not callable(build):
        raise JobError(f"{title} is no optimizer: pass a name, or a class")
    if moments == "bf16":
        build = with_bf16_moments(title, build)
    accepted = arguments_of(build)
    _check_options(title, options, accepted)
    dtype = MOMENTS[moments]
    chosen = spec_of(title, build, options, device, dtype)
    for own in _own_options(chosen, groups, accepted):
        # One kernel for all groups: fused only if it can be with the options of each.
        in_group = spec_of(title, build, options | own, device, dtype)
        if "fused" in chosen.kwargs and "fused" not in in_group.kwargs:
            chosen = spec_of(title, build, {**options, "fused": False}, device)
    return chosen


def _check_options(
    title: str, options: Mapping[str, Any], accepted: Mapping[str, inspect.Parameter]
) -> None:
    """Refuse an option that the class does not take.

    Raises:
        JobError: it does not take one.
    """
    if any(param.kind is inspect.Parameter.VAR_KEYWORD for param in accepted.values()):
        return
    for key in options:
        if key in accepted:
            continue
        near = difflib.get_close_matches(key, [*accepted, "moments"], 1)
        hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(accepted)}"
        raise JobError(f"{title} has no argument {key!r}; {hint}")


def _own_options(
    chosen: OptimizerSpec, groups: Sequence[Mapping[str, Any]], accepted: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of the optimizer that a group sets, for each group that sets any.

    Raises:
        JobError: it sets one that holds for all groups.
    """
    defaults = chosen.make([nn.Parameter(torch.zeros(1))]).defaults
    for number, group in enumerate(groups):
        own = {key: value for key, value in group.items() if key in accepted}
        shared = sorted(own.keys() - defaults.keys())
        if shared:
            raise JobError(
                f"groups[{number}] has {shared[0]!r}, which holds for all groups: "
                f"write optimizer(..., {shared[0]}=...)"
            )
        if own:
            yield own


def _no_reference(reference: str) -> NoReturn:
    raise JobError(f"{reference}: pass the class itself")


def make_groups(
    model: nn.Module, groups: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return the groups with their parameters as lists.

    Args:
        model: whose parameters they are to hold, each in one group.
        groups: as torch takes them; None: one group of all that require a gradient.

    Raises:
        UserCodeError: they are no groups, or not of this model's parameters.
    """
    if groups is None:
        return [{"params": [param for param in model.parameters() if param.requires_grad]}]
    if not isinstance(groups, Iterable):
        raise UserCodeError(
            f"optimizer(groups={groups!r}): write a list of parameter groups, as torch takes them"
        )
    names = {id(param): name for name, param in model.named_parameters() if param.requires_grad}
    seen: set[int] = set()
    made = []
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise UserCodeError(f'optimizer(): groups[{number}] is no mapping with "params"')
        params = group["params"]
        members = [params] if isinstance(params, torch.Tensor) else list(_iterable(params, number))
        for place, param in enumerate(members):
            if id(param) not in names:
                raise _not_of_the_model(number, place, param)
            if id(param) in seen:
                raise UserCodeError(
                    f"optimizer(): {names[id(param)]} is in two groups: leave it in one"
                )
            seen.add(id(param))
        made.append({**group, "params": members})
    missing = [name for key, name in names.items() if key not in seen]
    if missing:
        raise UserCodeError(
            f"optimizer(): {len(missing)} parameters are in no group, {missing[0]} first: "
            "add them, or call requires_grad_(False) on them before shard()"
        )
    return made


def _not_of_the_model(number: int, place: int, param: object) -> UserCodeError:
    what = repr(param)
    if isinstance(param, torch.Tensor):
        what = f"a parameter of shape {tuple(param.shape)}"
    return UserCodeError(
        f"optimizer(): groups[{number}] holds {what} (number {place}) that is none of this "
        "model's, or requires no gradient: take them from model.named_parameters() after shard()"
    )


def _iterable(params: Any, number: int) -> Iterable[Any]:
    if not isinstance(params, Iterable):
        raise UserCodeError(
            f'optimizer(): groups[{number}]["params"] is {type(params).__name__}, not parameters'
        )
    return params
