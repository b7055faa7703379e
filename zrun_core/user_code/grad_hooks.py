"""Hooks of the user's on the gradients of parameters (`Tensor.register_hook`).

In a plain loop a hook gets all of a parameter's gradient of a micro-batch at once. Where a part of
the runtime gets it in several parts, h(a) + h(b) must be h(a + b): it is for a hook that scales or
only looks, and not for one that takes a norm or clamps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from zrun_core.errors import JobError
from zrun_core.spine.tracebacks import first_line

Hook = Callable[[torch.Tensor], object]


def hooks_of(param: nn.Parameter) -> list[Hook]:
    """Return the user's hooks on the gradient of a parameter, in the order in which they run."""
    return [hook for hook in (param._backward_hooks or {}).values() if not _is_ours(hook)]


def has_late_hooks(param: nn.Parameter) -> bool:
    """Return whether a hook of the user's runs once `param.grad` is there."""
    hooks = param._post_accumulate_grad_hooks or {}
    return not all(_is_ours(hook) for hook in hooks.values())


def _is_ours(hook: object) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("zrun_core.")


def made_by(hook: Hook, grad: torch.Tensor) -> torch.Tensor:
    """Return what a hook makes of a gradient, which it may change in place."""
    made = hook(grad)
    return made if isinstance(made, torch.Tensor) else grad


def check_of_parts(
    name: str, param: nn.Parameter, shape: Sequence[int], *, key: str, parts: str, instead: str
) -> None:
    """Check that the hooks on a parameter make of two parts of a gradient what they make of both.

    Args:
        key: of the job, that makes parts.
        parts: how they come about, for the message.
        instead: what else the user may write.

    Raises:
        JobError: one does not, or runs once all of the gradient is there.
    """
    if has_late_hooks(param):
        raise JobError(
            f"{key}: {name} has a hook that runs once its gradient is there, and {parts}: use "
            f"Tensor.register_hook, or {instead}"
        )
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cpu") if param.is_meta else param.device  # meta: not read yet
    for hook in hooks_of(param):
        one, two = (torch.randn(*shape, generator=generator).to(device) for _ in range(2))
        try:
            of_sum = made_by(hook, one + two)
            sum_of_both = made_by(hook, one.clone()) + made_by(hook, two.clone())
        except Exception as error:
            raise JobError(
                f"{key}: a hook on {name} fails on a random gradient ({first_line(error)}), and "
                f"{parts}, so what it makes of parts must be known: {instead}"
            ) from error
        if not torch.allclose(of_sum, sum_of_both, rtol=1e-4, atol=1e-5):
            raise JobError(
                f"{key}: a hook on {name} makes something else of two parts of its gradient than "
                f"of their sum, as a norm or clamp() does, and {parts}: have it scale the gradient "
                f"only, or {instead}"
            )
