"""The borders at which activations become slices, and whole again: Megatron's f and g.

    f     forward: nothing                  backward: sum over ranks of the gradient of x
    g     forward: sum over ranks of y      backward: nothing
    split_in      forward: a slice of x     backward: gather of its gradient
    gather_out    forward: gather of y      backward: a slice of its gradient

(Shoeybi et al. 2019, Megatron-LM, section 3.) Outside of them all ranks compute the same.
"""

from __future__ import annotations

from typing import Any

import torch

from zrun_core.tensor_parallel.tensor_comm import TensorComm


class _CopyIn(torch.autograd.Function):
    """Megatron's f."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: TensorComm, name: str) -> torch.Tensor:
        ctx.comm = comm
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.comm.all_reduce(grad, ctx.name), None, None


class _SumOut(torch.autograd.Function):
    """Megatron's g."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, comm: TensorComm, name: str) -> torch.Tensor:
        return comm.all_reduce(y, name)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class _SplitIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: TensorComm, dim: int, name: str) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.name = comm, dim, name
        return x.chunk(comm.size, dim)[comm.index].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.comm.all_gather(grad, ctx.dim, ctx.name), None, None, None


class _GatherOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, comm: TensorComm, dim: int, name: str) -> torch.Tensor:
        ctx.comm, ctx.dim = comm, dim
        return comm.all_gather(y, dim, name)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        own = grad.chunk(ctx.comm.size, ctx.dim)[ctx.comm.index].contiguous()
        return own, None, None, None


def copy_in(x: torch.Tensor, comm: TensorComm, name: str) -> torch.Tensor:
    """Return `x`, whose gradient is summed over ranks.

    Args:
        x: the same on all ranks.
        comm: of the ranks.
        name: what it is, for messages.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _CopyIn.apply(x, comm, name)  # type: ignore[no-any-return, no-untyped-call]


def sum_out(y: torch.Tensor, comm: TensorComm, name: str) -> torch.Tensor:
    """Return the sum of `y` over ranks. Its gradient is the same on all of them.

    Args:
        y: of one shape on all ranks.
        comm: of the ranks.
        name: what it is, for messages.
    """
    return _SumOut.apply(y, comm, name)  # type: ignore[no-any-return, no-untyped-call]


def split_in(x: torch.Tensor, comm: TensorComm, dim: int, name: str) -> torch.Tensor:
    """Return this rank's slice of `x`.

    Args:
        x: the same on all ranks.
        comm: of the ranks, whose number divides the length of `dim`.
        dim: along which it is divided.
        name: what it is, for messages.
    """
    return _SplitIn.apply(x, comm, dim, name)  # type: ignore[no-any-return, no-untyped-call]


def gather_out(y: torch.Tensor, comm: TensorComm, dim: int, name: str) -> torch.Tensor:
    """Return the slices of all ranks, one after the other. All compute the same with them.

    Args:
        y: of one shape on all ranks.
        comm: of the ranks.
        dim: along which they follow each other.
        name: what it is, for messages.
    """
    return _GatherOut.apply(y, comm, dim, name)  # type: ignore[no-any-return, no-untyped-call]
