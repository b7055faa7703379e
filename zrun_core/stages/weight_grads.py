"""Gradients of weights made later than those of inputs: what zero-bubble schedules fill waits with.

A linear of a block, y = x w', has two products in its backward. The other stages wait for one only:

    backward (B)     dx = dy w         and (x, dy) are kept
    weights (W)      dw = dy' x        later; until then x and dy take memory

Everything else that backward makes, such as the gradients of norms, waits with them: a unit's
gradients come together, in one order, and have the bits of a backward that makes them at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from zrun_core.tensor_parallel.regions import PRODUCT, product_without_bias


class WeightGrads:
    """Keeps what the gradients of a backward's weights are made of.

    Attributes:
        hold: takes a parameter, and what makes its gradient; None: they are made at once.
        params: whose gradients are held.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        """Let the linears of `blocks` keep what their weights' gradients are made of, in place.

        Not those whose weights others use too, and those with a forward of the user's own. Of a row
        linear of a tensor-parallel region it is the weight only: its bias comes after the sum.
        """
        self.hold: Callable[[nn.Parameter, Callable[[], torch.Tensor]], None] | None = None
        self.params: list[nn.Parameter] = []
        modules = {id(inner): inner for block in blocks for inner in block.modules()}
        owners = Counter(
            id(param) for inner in modules.values() for param in inner._parameters.values()
        )
        for inner in modules.values():
            is_row = PRODUCT in vars(inner)
            if not _is_linear(inner) or ("forward" in vars(inner) and not is_row):
                continue
            own = [param for param in inner._parameters.values() if param is not None]
            if not all(owners[id(param)] == 1 for param in own):
                continue
            self.params += own
            if is_row:
                vars(inner)[PRODUCT] = partial(_row_product, self)
            else:
                vars(inner)["forward"] = partial(_forward, inner, self)


def _is_linear(module: nn.Module) -> bool:
    """Return whether the module is torch's linear, or the transposed one of transformers."""
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return False  # as where a parametrization computes it
    is_torchs = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return is_torchs or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """Return whether it is transformers' Conv1D, of weight [inputs, outputs], which GPT-2 has."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _forward(module: nn.Module, grads: WeightGrads, x: torch.Tensor) -> torch.Tensor:
    if not _is_trained(module):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return _product(module, grads, x, module._parameters["bias"])


def _row_product(grads: WeightGrads, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if not _is_trained(module):
        return product_without_bias(module, x)
    return _product(module, grads, x, None)


def _is_trained(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and module.get_parameter("weight").requires_grad


def _product(
    module: nn.Module, grads: WeightGrads, x: torch.Tensor, bias: nn.Parameter | None
) -> torch.Tensor:
    """Return x w' + b, by a function whose backward may leave the weights' gradients for later."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    device = x.device.type
    used = weight
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
        used = weight.to(dtype)  # type: ignore[assignment]
    transposed = _is_transposed(module)
    y: torch.Tensor = _Product.apply(x, used, bias, (grads, weight, bias, transposed))  # type: ignore[no-untyped-call]
    return y


class _Product(torch.autograd.Function):
    """x w' + b, whose backward makes the gradients of w and b at once or keeps what they need."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, about: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.about = about
        transposed = about[3]
        if not transposed:
            return nn.functional.linear(x, weight, bias)
        rows = x.view(-1, x.shape[-1])
        y = rows.mm(weight) if bias is None else torch.addmm(bias, rows, weight)
        return y.view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, used = ctx.saved_tensors
        grads, weight, bias, transposed = ctx.about
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy.matmul(used.t() if transposed else used)
        of_weight = partial(_weight_grad, x, dy, transposed=transposed)
        if grads.hold is None:
            return dx, of_weight(), _bias_grad(dy) if ctx.needs_input_grad[2] else None, None
        if ctx.needs_input_grad[2]:
            grads.hold(bias, partial(_bias_grad, dy))
        grads.hold(weight, of_weight)
        return dx, None, None, None


def _weight_grad(x: torch.Tensor, dy: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    x = x.reshape(-1, x.shape[-1])
    dy = dy.reshape(-1, dy.shape[-1])
    return x.t().mm(dy) if transposed else dy.t().mm(x)


def _bias_grad(dy: torch.Tensor) -> torch.Tensor:
    return dy.reshape(-1, dy.shape[-1]).sum(0)
