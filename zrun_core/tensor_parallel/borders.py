"""The borders at which activations become slices, and whole again: Megatron's f and g.

    f     forward: nothing                  backward: sum over ranks of the gradient of x
    g     forward: sum over ranks of y      backward: nothing

(Shoeybi et al. 2019, Megatron-LM, section 3.) Outside of both all ranks compute the same.
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
