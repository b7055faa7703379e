"""Ranks that share layers must compute the same loss.

Outside of regions they compute the same from the same values, so the loss of a micro-batch has the
same bits on each. Where it has not, something of the user's has looked at this rank's slice of a
weight, or drawn from a generator that zrun does not know. The message of a step has one number for
it: see [Note: one number for all groups] in `batches.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.errors import DivergedError

APART = "apart"  # name of the number


class LossGuard:
    """Compares the losses of the ranks that share layers.

    Attributes:
        first_sums: what a step's sums begin with, where several share them.
    """

    def __init__(self, mesh: Mesh) -> None:
        group = mesh.tensor
        self._size = group.size
        self._weight = group.size - 1 if group.index == 0 else -1
        self.first_sums = {APART: 0.0} if group.size > 1 else {}

    def add(self, loss: torch.Tensor, sums: NamedVector) -> None:
        """Add the loss of a micro-batch to a step's sums.

        Args:
            loss: 0-d, without its graph.
        """
        if self._size == 1:
            return
        bits = torch.nan_to_num(loss.float()).view(torch.int32)  # a NaN has many
        sums.add(**{APART: bits.double() * self._weight})

    def check(self, apart: float, when: str, causes: Callable[[], str]) -> None:
        """Check what the numbers of all ranks add up to. Collective if losses differ.

        Args:
            causes: returns why, in words: see `loss_causes.py`.

        Raises:
            DivergedError: losses differ.
        """
        if apart:
            raise DivergedError(
                f"in {when} ranks that share layers (parallel.tp) computed different losses for "
                f"the same samples: {causes()}"
            )
