"""What a rank and the server tell each other: a few numbers in front of gradients or parameters.

    push      Push numbers, a byte per parameter      gradients of all units      rank -> server
    reply     Reply numbers                           parameters of all units     server -> rank

Both are sent through a `Line`, with the tags of the units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zrun_core.distributed.transport import SMALL_TAG, gather_tag, reduce_tag


class Push(NamedTuple):
    """A push, as far as the server needs to know it besides the gradient.

    Attributes:
        step, part: the share that it is of.
        weight: of its samples, as the loss counts them.
        samples: of them that count.
        loss: summed.
        asks_to_stop: a signal has asked this rank to.
        has_grad: a byte for each trained parameter: 1 if it got a gradient.
    """

    step: int
    part: int
    weight: float
    samples: int
    loss: float
    asks_to_stop: bool
    has_grad: bytes

    def packed(self) -> torch.Tensor:
        """Return its numbers, [n] float64."""
        numbers = [float(number) for number in self[:-1]]
        return torch.tensor([*numbers, *self.has_grad], dtype=torch.float64)

    @classmethod
    def unpacked(cls, numbers: torch.Tensor) -> Push:
        """Return the push that `packed` has made."""
        step, part, weight, samples, loss, stop, *has_grad = numbers.tolist()
        return cls(
            int(step),
            int(part),
            weight,
            int(samples),
            loss,
            bool(stop),
            bytes(int(each) for each in has_grad),
        )

    @staticmethod
    def room(num_params: int) -> torch.Tensor:
        """Return memory for the numbers of a push."""
        return torch.empty(len(Push._fields) - 1 + num_params, dtype=torch.float64)


OVER, OVERDUE = -1, -2


class Reply(NamedTuple):
    """The server's answer to a push.

    Attributes:
        step, part: the share to compute next; step -1: the window is over, and these parameters
            are its result; step -2: no parameters follow, since the rank of number `part` does not
            push.
        num_steps: of the window that were made, once it is over.
        was_skipped: the update that had this push was not made.
    """

    step: int
    part: int
    num_steps: int
    was_skipped: bool

    def packed(self) -> torch.Tensor:
        """Return its numbers, [4] float64."""
        return torch.tensor([float(number) for number in self], dtype=torch.float64)

    @classmethod
    def unpacked(cls, numbers: torch.Tensor) -> Reply:
        """Return the reply that `packed` has made."""
        step, part, num_steps, was_skipped = numbers.tolist()
        return cls(int(step), int(part), int(num_steps), bool(was_skipped))

    @staticmethod
    def room() -> torch.Tensor:
        """Return memory for the numbers of a reply."""
        return torch.empty(len(Reply._fields), dtype=torch.float64)


def numbers_by_tag(numbers: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the numbers of a message by their tag."""
    return {SMALL_TAG: numbers}


def gradients_by_tag(units: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the gradients of units by their tags."""
    return {reduce_tag(number): unit for number, unit in enumerate(units)}


def parameters_by_tag(units: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the parameters of units by their tags."""
    return {gather_tag(number): unit for number, unit in enumerate(units)}
