"""The borders at which activations become slices, and whole again: Megatron's f and g.

    f     forward: nothing                  backward: sum over ranks of the gradient of x
    g     forward: sum over ranks of y      backward: nothing
    split_in      forward: a slice of x     backward: gather of its gradient
    gather_out    forward: gather of y      backward: a slice of its gradient

(Shoeybi et al. 2019, Megatron-LM, section 3.) Outside of them all ranks compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from zrun_core.tensor_parallel.second_grads import refuse_second_grads
from zrun_core.tensor_parallel.tensor_comm import TensorComm

Move = Callable[[torch.Tensor], torch.Tensor]  # between what ranks have
Begin = Callable[[torch.Tensor], Callable[[], torch.Tensor]]  # begins a move; a call waits for it


class Border(NamedTuple):
    """Where a region begins: what its input becomes, and what the gradient of that becomes.

    Attributes:
        there: of the input, in forward.
        begin_back: of the gradient, in backward.
    """

    there: Move
    begin_back: Begin


class _Border(torch.autograd.Function):
    """A move of activations in forward, and one of their gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Move, back: Move) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        refuse_second_grads()
        return ctx.back(grad), None, None


def cross(x: torch.Tensor, there: Move, back: Move) -> torch.Tensor:
    """Return what `there` makes of `x`; its gradient is what `back` makes of the result's."""
    moved: torch.Tensor = _Border.apply(x, there, back)  # type: ignore[no-untyped-call]
    return moved


def copy_border(comm: TensorComm, name: str) -> Border:
    """Return f: the same on all ranks, and its gradient is summed over them."""
    return Border(_same, partial(comm.begin_all_reduce, name=name))


def copy_in(x: torch.Tensor, comm: TensorComm, name: str) -> torch.Tensor:
    """Return `x`, whose gradient is summed over ranks.

    Args:
        x: the same on all ranks.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return cross(x, _same, partial(comm.all_reduce, name=name))


def sum_out(y: torch.Tensor, comm: TensorComm, name: str) -> torch.Tensor:
    """Return the sum of `y` over ranks. Its gradient is the same on all of them.

    Args:
        y: of one shape on all ranks.
    """
    return cross(y, partial(comm.all_reduce, name=name), _same)


def split_in(x: torch.Tensor, comm: TensorComm, dim: int, name: str) -> torch.Tensor:
    """Return this rank's slice of `x`.

    Args:
        x: the same on all ranks.
        comm: of the ranks, whose number divides the length of `dim`.
    """
    return cross(x, partial(_own, comm, dim), partial(comm.all_gather, dim=dim, name=name))


def gather_out(y: torch.Tensor, comm: TensorComm, dim: int, name: str) -> torch.Tensor:
    """Return the slices of all ranks, one after the other. All compute the same with them.

    Args:
        y: of one shape on all ranks.
        dim: along which they follow each other.
    """
    return cross(y, partial(comm.all_gather, dim=dim, name=name), partial(_own, comm, dim))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _own(comm: TensorComm, dim: int, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of what all have."""
    return x.chunk(comm.size, dim)[comm.index].contiguous()
