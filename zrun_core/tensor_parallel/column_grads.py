"""Gradients of column linears' weights, made while ranks add up the gradient of their input.

    backward of a region      dx of q + k + v ──► sum over ranks of dx begins ──► waits for it
                              (x, dy) are kept         dw of q, k, v meanwhile

What is kept are tensors that backward has anyway. The weights are inputs of the node at which a
region begins, f: its backward, the last one of the region, returns their gradients with that of x.
Each column linear takes a tensor without values from f, so that f waits for it whatever else it is
given. (As Megatron-LM overlaps the two.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from zrun_core.tensor_parallel.borders import Border
from zrun_core.tensor_parallel.linear_product import (
    PRODUCT,
    LatePlan,
    Make,
    is_linear,
    late_product,
    plain_product,
)
from zrun_core.tensor_parallel.second_grads import refuse_second_grads
from zrun_core.user_code.forward_layers import Layer, wrap_forward


class _Pass(NamedTuple):
    """One pass through the columns of a region.

    Attributes:
        first: a tensor without values, of the node at which the region begins.
        kept: parameters, each with what makes a part of its gradient; filled in backward.
    """

    first: torch.Tensor
    kept: list[tuple[nn.Parameter, Make]]


class ColumnGrads:
    """Column linears that are given what one module is given, where a region begins."""

    def __init__(self, columns: Iterable[nn.Module]) -> None:
        """Let column linears leave the gradients of their weights to `enter`'s node, in place.

        Others keep their forward, such as modules with a forward of the user's own.
        """
        self._columns = [
            column for column in columns if is_linear(column) and "forward" not in vars(column)
        ]
        self._pass: _Pass | None = None
        for column in self._columns:
            vars(column)[PRODUCT] = self._product
            wrap_forward(column, Layer.COLUMN, partial(_column, column))

    def enter(
        self, tensors: Sequence[torch.Tensor], borders: Sequence[Border]
    ) -> list[torch.Tensor]:
        """Return what tensors are inside of the region.

        Args:
            tensors: outside of it, each once.
            borders: for each, what happens to it there.
        """
        self._pass = None
        crossing = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
        inside = {
            number: border.there(tensor)
            for number, (tensor, border) in enumerate(zip(tensors, borders, strict=True))
            if not crossing[number]
        }
        if any(crossing):
            kept: list[tuple[nn.Parameter, Make]] = []
            params = self._late_params()
            numbers = [number for number, crosses in enumerate(crossing) if crosses]
            moves = [borders[number] for number in numbers]
            first, *moved = _Begin.apply(  # type: ignore[no-untyped-call]
                moves, kept, self.leave, params, *(tensors[number] for number in numbers), *params
            )
            inside.update(zip(numbers, moved, strict=True))
            if params:
                self._pass = _Pass(first, kept)
        return [inside[number] for number in range(len(tensors))]

    def leave(self) -> None:
        """End the pass: column linears that are called from now on are on their own."""
        self._pass = None

    def _late_params(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are left to `enter`'s node."""
        return [
            param
            for column in self._columns
            if vars(column)[PRODUCT] == self._product  # no schedule has taken it over
            for param in column.parameters()
            if param.requires_grad
        ]

    def _product(
        self, linear: nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self._pass is None:
            return plain_product(linear, x, bias)
        first, kept = self._pass
        return late_product(linear, x, bias, LatePlan(lambda: partial(_keep, kept), (first,)))


def _column(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    bias = linear._parameters["bias"]
    if torch.compiler.is_compiling():
        return plain_product(linear, x, bias)
    y: torch.Tensor = vars(linear)[PRODUCT](linear, x, bias)
    return y


def _keep(kept: list[tuple[nn.Parameter, Make]], param: nn.Parameter, make: Make) -> None:
    kept.append((param, make))


class _Begin(torch.autograd.Function):
    """Moves tensors into a region; its backward moves gradients out, and makes the weights'."""

    @staticmethod
    def forward(
        ctx: Any,
        borders: Sequence[Border],
        kept: list[tuple[nn.Parameter, Make]],
        leave: Callable[[], None],
        params: Sequence[nn.Parameter],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.borders = borders
        ctx.kept = kept
        ctx.leave = leave
        ctx.params = params
        moved = [border.there(x) for x, border in zip(inputs, borders, strict=False)]
        return inputs[0].new_empty(0), *moved

    @staticmethod
    def backward(ctx: Any, _: None, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        refuse_second_grads()
        moved: list[torch.Tensor | None] = [None] * len(grads)
        wait: Callable[[], torch.Tensor] | None = None
        last = -1
        for number, grad in enumerate(grads):
            if grad is None:
                continue
            if wait is not None:
                moved[last] = wait()  # one at a time: all have the same tag
            wait = ctx.borders[number].begin_back(grad)
            last = number
        ctx.leave()  # a recomputation, which stops within the region, would hold on to its graph
        made = _made(ctx.kept)
        if wait is not None:
            moved[last] = wait()
        return None, None, None, None, *moved, *(made.get(id(param)) for param in ctx.params)


def _made(kept: list[tuple[nn.Parameter, Make]]) -> dict[int, torch.Tensor]:
    """Make the gradients that are kept, by identity of their parameter, and keep them no longer."""
    made: dict[int, torch.Tensor] = {}
    for param, make in kept:
        part = make()
        earlier = made.get(id(param))
        made[id(param)] = part if earlier is None else earlier + part
    kept.clear()
    return made
