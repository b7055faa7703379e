"""Gradients of weights made later than those of inputs: what zero-bubble schedules fill waits with.

A linear of a block, y = x w', has two products in its backward. The other stages wait for one only:

    backward (B)     dx = dy w         and (x, dy) are kept
    weights (W)      dw = dy' x        later; until then x and dy take memory

Everything else that backward makes, such as the gradients of norms, waits with them: a unit's
gradients come together, in one order, and have the bits of a backward that makes them at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from zrun_core.tensor_parallel.linear_product import (
    PRODUCT,
    Hold,
    LatePlan,
    is_linear,
    late_product,
)
from zrun_core.user_code.forward_layers import Layer, wrap_forward
from zrun_core.user_code.grad_hooks import has_late_hooks, hooks_of


class WeightGrads:
    """Keeps what the gradients of a backward's weights are made of.

    Attributes:
        hold: takes a parameter, and what makes its gradient; None: they are made at once.
        params: whose gradients are held.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        """Let the linears of `blocks` keep what their weights' gradients are made of, in place.

        Not those whose weights others use too or have hooks of the user's on their gradients, and
        those with a forward of the user's own. Of a row linear of a tensor-parallel region it is
        the weight only: its bias comes after the sum.
        """
        self.hold: Hold | None = None
        self.params: list[nn.Parameter] = []
        modules = {id(inner): inner for block in blocks for inner in block.modules()}
        owners = Counter(
            id(param) for inner in modules.values() for param in inner._parameters.values()
        )
        for inner in modules.values():
            is_of_region = PRODUCT in vars(inner)
            if not is_linear(inner) or ("forward" in vars(inner) and not is_of_region):
                continue
            own = [param for param in inner._parameters.values() if param is not None]
            if not all(owners[id(param)] == 1 for param in own):
                continue
            if any(hooks_of(param) or has_late_hooks(param) for param in own):
                continue  # they get what autograd makes
            self.params += own
            if is_of_region:
                vars(inner)[PRODUCT] = self._product
            else:
                late = partial(self._late_weight_grads, inner)
                wrap_forward(inner, Layer.LATE_WEIGHT_GRADS, late)

    def _late_weight_grads(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self._product(module, x, module._parameters["bias"])

    def _product(
        self, module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return late_product(module, x, bias, LatePlan(lambda: self.hold))
