"""Give a built model its values for a trial, all of them at once or those of a block at a time.

all at once        embed  blocks.0  blocks.1  blocks.2  head
by block           embed  blocks.0                      head     while blocks.0 runs
                   embed            blocks.1            head     while blocks.1 runs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from zrun_core.checkpoint.model_state import persistent_buffers
from zrun_core.checkpoint.whole_values import WholeValues
from zrun_core.user_code.build import Built
from zrun_core.zero.wrap.auto_wrap import repeated_blocks, running_norm_params


class TrialBytes(NamedTuple):
    """What the parameters of a model take in the format of a trial.

    Attributes:
        whole: all of them.
        around: those that are outside of its blocks.
        block: of the largest block, those that are not.
    """

    whole: int
    around: int
    block: int

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype) -> TrialBytes:
        """Count them."""
        numels = {id(param): param.numel() for param in model.parameters()}
        around = _around_blocks(model)
        of_blocks = [
            sum(numels[each] for each in {id(param) for param in block.parameters()} - around)
            for _, block in repeated_blocks(model)
        ]
        counts = sum(numels.values()), sum(numels[each] for each in around), max(of_blocks or [0])
        return cls(*(count * dtype.itemsize for count in counts))


@contextmanager
def with_values(
    built: Built,
    dtype: torch.dtype,
    device: torch.device,
    values: WholeValues | None,
    *,
    by_block: bool = False,
) -> Iterator[None]:
    """Give a built model its values, and its buffers, on the device inside.

    They are those of files, if `values` has them.

    Args:
        by_block: a block has its own while it runs. At another time they have no values, and what
            is computed with them fails.
    """
    model = built.module
    names = {id(param): name for name, param in model.named_parameters()}
    in_fp32 = running_norm_params(model)
    before = [
        (module, dict(module._parameters), dict(module._buffers)) for module in model.modules()
    ]

    def value_of(param: nn.Parameter) -> nn.Parameter:
        name = names[id(param)]
        read = None if values is None else values.read(name, param)
        value = built.read(name, param) if read is None else read
        own = torch.float32 if id(param) in in_fp32 else dtype
        return nn.Parameter(value.detach().to(device, own), requires_grad=param.requires_grad)

    blocks = [block for _, block in repeated_blocks(model)] if by_block else []
    lent = {id(param) for block in blocks for param in block.parameters()} - _around_blocks(model)
    given = {
        id(param): _without_value(param) if id(param) in lent else value_of(param)
        for param in model.parameters()
    }
    saved: dict[int, torch.Tensor] = {}  # buffers in files
    for name, buffer in persistent_buffers(model):
        read = None if values is None else values.read(name, buffer)
        if read is not None:
            saved[id(buffer)] = read
    try:
        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(_lending(block, lent, value_of))
            for module, params, buffers in before:
                module._parameters.update(
                    {key: None if p is None else given[id(p)] for key, p in params.items()}
                )
                module._buffers.update(
                    {
                        key: None if b is None else saved.get(id(b), b).to(device)
                        for key, b in buffers.items()
                    }
                )
            yield
    finally:
        for module, params, buffers in before:
            module._parameters.update(params)
            module._buffers.update(buffers)


@contextmanager
def _lending(
    block: nn.Module, lent: set[int], value_of: Callable[[nn.Parameter], nn.Parameter]
) -> Iterator[None]:
    """Have a block hold values of its own parameters inside, while it runs.

    Those are the parameters that it has when this is entered, if `lent` has their identities.
    """
    own = [
        (module, key, param)
        for module in block.modules()
        for key, param in module._parameters.items()
        if param is not None and id(param) in lent
    ]
    hollow: list[nn.Parameter | None] = []

    def enter(_: nn.Module, args: Any) -> None:
        hollow[:] = [module._parameters[key] for module, key, _ in own]
        values: dict[int, nn.Parameter] = {}
        with _disable_current_modes():  # one of formats would change that of values
            for module, key, param in own:
                if id(param) not in values:
                    values[id(param)] = value_of(param)
                module._parameters[key] = values[id(param)]

    def leave(_: nn.Module, args: Any, out: Any) -> None:
        for (module, key, _param), without in zip(own, hollow, strict=False):
            module._parameters[key] = without
        hollow.clear()

    begin = block.register_forward_pre_hook(enter, prepend=True)
    end = block.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        begin.remove()
        end.remove()


def _around_blocks(model: nn.Module) -> set[int]:
    """Return the identities of the parameters of modules that are in no block."""
    inside = {id(module) for _, block in repeated_blocks(model) for module in block.modules()}
    return {
        id(param)
        for module in model.modules()
        if id(module) not in inside
        for param in module.parameters(recurse=False)
    }


def _without_value(param: nn.Parameter) -> nn.Parameter:
    hollow = torch.empty_like(param, device="meta")
    return nn.Parameter(hollow, requires_grad=param.requires_grad)
