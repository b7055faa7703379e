"""A linear's product, x w' + b, whose weights' gradients may be made later than its input's.

    backward     dx = dy w          at once
                 dw = dy' x         at once, or when whoever keeps (x, dy) asks for it

Made later or not, they have the same bits, those of torch's own linear.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

Make = Callable[[], torch.Tensor]
Hold = Callable[[nn.Parameter, Make], None]

# Attribute of a linear: computes (linear, x, bias or None) -> x w' + bias in its forward.
PRODUCT = "_zrun_product"


class LatePlan(NamedTuple):
    """How the weights' gradients of a product are made.

    Attributes:
        hold: asked in backward: takes a parameter and what makes its gradient; None: at once.
        after: tensors without values, whose own backward comes after this product's.
    """

    hold: Callable[[], Hold | None]
    after: tuple[torch.Tensor, ...] = ()


def is_linear(module: nn.Module) -> bool:
    """Return whether the module is torch's linear, or the transposed one of transformers."""
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return False  # as where a parametrization computes it
    is_torchs = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return is_torchs or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """Return whether it is transformers' Conv1D, of weight [inputs, outputs], which GPT-2 has."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def plain_product(linear: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x w' + bias by torch's own operators.

    Args:
        x: [..., inputs].
        bias: of the linear, or None to leave it out.
    """
    weight = linear.get_parameter("weight")
    if isinstance(linear, nn.Linear):
        return nn.functional.linear(x, weight, bias)
    if bias is None:
        return x @ weight  # transformers' Conv1D has it transposed
    y = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
    return y.view(*x.shape[:-1], weight.shape[1])


def late_product(
    linear: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, plan: LatePlan
) -> torch.Tensor:
    """Return x w' + bias; the gradients of w and bias are made as `plan` says.

    Args:
        linear: with the weight; see `is_linear`.
        x: [..., inputs].
        bias: of the linear, or None to leave it out.
    """
    weight = linear.get_parameter("weight")
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return plain_product(linear, x, bias)
    device = x.device.type
    used: torch.Tensor = weight
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
        used = weight.to(dtype)
    about = _About(plan.hold, weight, bias, _is_transposed(linear))
    y: torch.Tensor = _Product.apply(x, used, bias, about, *plan.after)  # type: ignore[no-untyped-call]
    return y


class _About(NamedTuple):
    hold: Callable[[], Hold | None]
    weight: nn.Parameter
    bias: Any
    transposed: bool


class _Product(torch.autograd.Function):
    """x w' + b, whose backward makes the gradients of w and b at once or lets them be held."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        about: _About,
        *after: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.about = about
        ctx.none_of_after = (None,) * len(after)
        if not about.transposed:
            return nn.functional.linear(x, weight, bias)
        rows = x.view(-1, x.shape[-1])
        y = rows.mm(weight) if bias is None else torch.addmm(bias, rows, weight)
        return y.view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, used = ctx.saved_tensors
        about: _About = ctx.about
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy.matmul(used.t() if about.transposed else used)
        has_bias = ctx.needs_input_grad[2]
        of_weight = partial(_weight_grad, x, dy, transposed=about.transposed)
        hold = about.hold()
        if hold is None:
            of_bias = _bias_grad(dy) if has_bias else None
            return dx, of_weight(), of_bias, None, *ctx.none_of_after
        if has_bias:
            hold(about.bias, partial(_bias_grad, dy))
        hold(about.weight, of_weight)
        return dx, None, None, None, *ctx.none_of_after


def _weight_grad(x: torch.Tensor, dy: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    x = x.reshape(-1, x.shape[-1])
    dy = dy.reshape(-1, dy.shape[-1])
    return x.t().mm(dy) if transposed else dy.t().mm(x)


def _bias_grad(dy: torch.Tensor) -> torch.Tensor:
    return dy.reshape(-1, dy.shape[-1]).sum(0)
