"""A job's model as one rank of a tensor group has it, divided in a process without any others.

The model is planned by its modules and divided as in training, over collectives that move nothing:
what they return has the right shape, and what they allocate is what they allocate in training. Each
appears in a trace as an operator of the family "collective", with its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from zrun_core.distributed.comm import Comm, direct_up_to
from zrun_core.distributed.transport import Group
from zrun_core.memory.layout import NO_PARTS
from zrun_core.memory.tensors import TENSOR, TensorPart
from zrun_core.spine.sections.parallel import ParallelConfig
from zrun_core.tensor_parallel.divide import Divided
from zrun_core.tensor_parallel.tensor_comm import TensorComm
from zrun_core.train.tensor_building import divide_model, planned

_LIBRARY = torch.library.Library("zrun_collective", "DEF")
for _name in ("summed", "gathered", "scattered"):
    _LIBRARY.define(f"{_name}(Tensor full) -> ()")
    for _device in ("CPU", "Meta"):
        _LIBRARY.impl(_name, lambda full: None, _device)
_MOVED = torch.ops.zrun_collective


def divide_alone(
    model: nn.Module, parallel: ParallelConfig, device: str, *, for_real: bool
) -> Mapping[str, TensorPart]:
    """Give a model the slices of the first rank of its tensor group, in place.

    That rank has at least as many elements as any other.

    Args:
        model: the user's, before it is transformed.
        device: type of what trains, "cpu" or "cuda".
        for_real: whether its parameters have values, which are cut.

    Returns:
        By name of a parameter, its part of a tensor of the whole model; none where tp is 1.

    Raises:
        JobError: it cannot be divided as the job says.
    """
    plan = planned(model, parallel)
    group = Group(TENSOR, tuple(range(parallel.tp)), 0, None)
    comm = TensorComm(comm_of_none(device), group)
    divided = divide_model(model, plan, parallel, comm, None)
    if divided is None:
        return NO_PARTS
    if for_real:
        _cut_values(model, divided)
    return divided.table


def comm_of_none(device: str) -> Comm:
    """Return collectives that move nothing, in a process without others.

    Args:
        device: type of what trains, "cpu" or "cuda".
    """
    return cast(Comm, _NoTraffic(device))


def _cut_values(model: nn.Module, divided: Divided) -> None:
    """Fill the parameters of a divided model with their parts of the whole values."""
    read = divided.read(lambda name, param: param.detach())
    for name, param in model.named_parameters():
        value = read(name, param)
        if value.data_ptr() != param.data_ptr():
            param.untyped_storage().resize_(param.numel() * param.element_size())
            param.data.copy_(value)


class _NoTraffic:
    """Stands for `Comm` where there are no other ranks: what arrives is whatever was there."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._direct_up_to = direct_up_to(device)

    def num_recv_shards(self, group: Group) -> int:
        return group.size - 1 if group.size <= self._direct_up_to else 1

    def all_reduce(self, full: torch.Tensor, *_: Any, **__: Any) -> _Done:
        _MOVED.summed(full)
        return _Done()

    def all_gather(self, full: torch.Tensor, *_: Any, **__: Any) -> _Done:
        _MOVED.gathered(full)
        return _Done()

    def reduce_scatter(self, full: torch.Tensor, *_: Any, **__: Any) -> _Done:
        _MOVED.scattered(full)
        return _Done()

    def settle(self) -> None:
        pass


class _Done:
    def wait(self) -> None:
        pass
