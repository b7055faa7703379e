"""The step's message: the few numbers that ranks tell each other before an update.

It is short and waits for all ranks, so all that a step has to say travels in it. Only this module
knows what lies where in it. Where all ranks train the same parameters it is one message over the
world:

    sums ...  |  squared norm  |  equality terms of the schedule  |  got a gradient, per parameter

With tensor or pipeline parallelism what concerns parameters means something among the ranks that
train the same ones only. The right half travels over those first, in a message of its own, and one
number that says whether they differ takes its place in the message over the world.

A stage of PipeDream does not wait for the others: its update has a message of its own among the
ranks that train the same parameters, without sums. See `all_reduce_stage`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zrun_core.distributed.comm import NUM_EQUALITY_TERMS, Comm, equality_terms, terms_agree
from zrun_core.distributed.named_vector import NamedVector, on_device
from zrun_core.distributed.transport import Group


@dataclass(frozen=True)
class StepContribution:
    """One rank's part of the message.

    Attributes:
        sums: to be summed over all ranks.
        square: 0-d float64, this rank's part of the squared norm of the gradient.
        schedule: a digest of what it gathered, which must be equal on ranks that train the same
            parameters.
        has_grad: a byte for each of its parameters: 1 if it got a gradient here.
        has_grad_elsewhere: [parameters] float64 on the device, on how many other stages of a
            pipeline each got one; None: no other stage has any of them.
    """

    sums: NamedVector
    square: torch.Tensor
    schedule: int
    has_grad: bytes
    has_grad_elsewhere: torch.Tensor | None = None


@dataclass(frozen=True)
class ReducedStep:
    """The message summed over ranks, on the device.

    Attributes:
        sums: over all ranks.
        square: 0-d float64, the squared norm of the whole gradient.
        agreed: 0-d bool: ranks that train the same parameters gathered the same.
        num_with_grad: [parameters of this rank] on how many ranks each got a gradient, those of
            other stages among them.
    """

    sums: NamedVector
    square: torch.Tensor
    agreed: torch.Tensor
    num_with_grad: torch.Tensor


def all_reduce_step(own: StepContribution, data: Group, world: Group, comm: Comm) -> ReducedStep:
    """Sum the step's message over ranks. Collective; the host does not wait for a device here.

    Args:
        data: the ranks that train the same parameters as this one.
    """
    over_world, over_data = _pack(own, comm.device)
    if data.size == world.size:
        summed = comm.all_reduce_small(torch.cat([over_world, over_data]), world, name="step")
        over_world, over_data = summed.split([len(over_world), len(over_data)])
        agreed = terms_agree(over_data[:NUM_EQUALITY_TERMS], data.size)
    else:
        over_data = comm.all_reduce_small(over_data, data, name="step of the same parameters")
        differ = ~terms_agree(over_data[:NUM_EQUALITY_TERMS], data.size)
        message = torch.cat([over_world, differ.double().view(1)])
        summed = comm.all_reduce_small(message, world, name="step")
        over_world = summed[:-1]
        agreed = summed[-1] == 0
    return _unpack(own.sums.names, over_world, over_data, agreed)


def all_reduce_stage(
    square: torch.Tensor, has_grad: bytes, data: Group, comm: Comm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over a stage's ranks what its update has to know. Collective over them.

    Args:
        square, has_grad: as of `StepContribution`.
        data: the ranks that train the same parameters as this one.

    Returns:
        The squared norm of the stage's gradient, 0-d float64, and on how many ranks each of its
        parameters got one, [parameters].
    """
    own = torch.cat([square.view(1), on_device([*has_grad], comm.device)])
    if data.size > 1:
        own = comm.all_reduce_small(own, data, name="update of a stage")
    return own[0], own[1:]


def _pack(own: StepContribution, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is summed over all ranks, and what over those with the same parameters."""
    over_world = torch.cat([own.sums.values, own.square.view(1)])
    over_data = on_device([*equality_terms(own.schedule), *own.has_grad], device)
    if own.has_grad_elsewhere is not None:
        over_data[NUM_EQUALITY_TERMS:] += own.has_grad_elsewhere
    return over_world, over_data


def _unpack(
    names: tuple[str, ...],
    over_world: torch.Tensor,
    over_data: torch.Tensor,
    agreed: torch.Tensor,
) -> ReducedStep:
    """Name what lies where `_pack` has put it, now summed."""
    return ReducedStep(
        sums=NamedVector(names, over_world[:-1]),
        square=over_world[-1],
        agreed=agreed,
        num_with_grad=over_data[NUM_EQUALITY_TERMS:],
    )
