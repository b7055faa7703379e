"""The step's message: the few numbers that ranks tell each other before an update.

It is short and waits for everyone, so all that a step has to say travels in it. Nobody but this
module knows where in it what lies. Where all ranks train the same parameters it is one message
over the world. With tensor or pipeline parallelism what concerns parameters means something among
the ranks that train the same ones only: it travels over those first, in a message of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zrun_core.distributed.comm import NUM_EQUALITY_TERMS, Comm, equality_terms, terms_agree
from zrun_core.distributed.named_vector import NamedVector, on_device
from zrun_core.distributed.transport import Group


@dataclass(frozen=True)
class StepContribution:
    """What one rank has to say.

    Attributes:
        sums: to be summed over all ranks.
        square: 0-d float64, this rank's part of the squared norm of the gradient.
        schedule: a digest of what it gathered, which must be equal on ranks that train the same
            parameters.
        got: a byte for each of its parameters: 1 if it got a gradient here.
    """

    sums: NamedVector
    square: torch.Tensor
    schedule: int
    got: bytes


@dataclass(frozen=True)
class ReducedStep:
    """What all ranks have said, on the device.

    Attributes:
        sums: over all ranks.
        square: 0-d float64, the squared norm of the whole gradient.
        agreed: 0-d bool: ranks that train the same parameters gathered the same.
        num_got: [parameters of this rank] on how many ranks each got a gradient.
    """

    sums: NamedVector
    square: torch.Tensor
    agreed: torch.Tensor
    num_got: torch.Tensor


def all_reduce_step(said: StepContribution, data: Group, world: Group, comm: Comm) -> ReducedStep:
    """Tell the others, and return what they say. Collective; a device makes nobody wait here.

    Args:
        data: the ranks that train the same parameters as this one.
        world: all ranks.
    """
    over_world, over_data = _pack(said, comm.device)
    if data.size == world.size:
        summed = comm.all_reduce_small(torch.cat([over_world, over_data]), world, name="step")
        over_world, over_data = summed.split([len(over_world), len(over_data)])
        agreed = terms_agree(over_data[:NUM_EQUALITY_TERMS], data.size)
    else:
        over_data = comm.all_reduce_small(over_data, data, name="step of the same parameters")
        differ = ~terms_agree(over_data[:NUM_EQUALITY_TERMS], data.size)
        own = torch.cat([over_world, differ.double().view(1)])
        summed = comm.all_reduce_small(own, world, name="step")
        over_world, agreed = summed[:-1], summed[-1] == 0
    return _unpack(said.sums.names, over_world, over_data, agreed)


def _pack(said: StepContribution, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is summed over all ranks, and what over those with the same parameters."""
    over_world = torch.cat([said.sums.values, said.square.view(1)])
    return over_world, on_device([*equality_terms(said.schedule), *said.got], device)


def _unpack(
    names: tuple[str, ...],
    over_world: torch.Tensor,
    over_data: torch.Tensor,
    agreed: torch.Tensor,
) -> ReducedStep:
    """Name what lies where `_pack` has put it, now summed."""
    sums = NamedVector(names, over_world[:-1])
    return ReducedStep(sums, over_world[-1], agreed, over_data[NUM_EQUALITY_TERMS:])
