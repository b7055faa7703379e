"""Linears between whole activations, of which each rank has a slice.

    x ── f ──► rows of the weight ──► slices of y ── gather ──► y
    x ── split ──► columns of the weight ──► parts of y ── g ──► y

Where linears form a region, activations stay slices between them; these stand alone, because what
lies between needs whole activations, such as a norm over all heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from zrun_core.spine.sections.tensor_roles import Role
from zrun_core.tensor_parallel.borders import copy_in, gather_out, split_in, sum_out
from zrun_core.tensor_parallel.tensor_comm import TensorComm
from zrun_core.user_code.forward_layers import Layer, wrap_forward
from zrun_core.zero.passes.graph_breaks import outside_graphs

Forward = Callable[[torch.Tensor], torch.Tensor]


def divide_lone(linear: nn.Linear, role: Role, comm: TensorComm, name: str) -> None:
    """Let a linear compute with its slice, and give whole results.

    Args:
        linear: with the parameters of this rank. Its attributes stay those of the whole.
        role: one of `cuts.ALONE`.
        comm: of the ranks that have the other slices.
    """
    forward = _gathering if role is Role.COLWISE_GATHER_OUTPUT else _splitting
    wrap_forward(linear, Layer.LONE_LINEAR, forward(linear, comm, name))


def _gathering(linear: nn.Linear, comm: TensorComm, name: str) -> Forward:
    size = linear.out_features

    @outside_graphs
    def lone_linear(x: torch.Tensor) -> torch.Tensor:
        y = F.linear(copy_in(x, comm, f"input of {name}"), linear.weight, linear.bias)
        return gather_out(y, comm, -1, f"output of {name}").narrow(-1, 0, size)  # no padding

    return lone_linear


def _splitting(linear: nn.Linear, comm: TensorComm, name: str) -> Forward:
    @outside_graphs
    def lone_linear(x: torch.Tensor) -> torch.Tensor:
        own = split_in(x, comm, -1, f"input of {name}")
        y = sum_out(F.linear(own, linear.weight), comm, f"output of {name}")
        return y if linear.bias is None else y + linear.bias.to(y.dtype)

    return lone_linear
