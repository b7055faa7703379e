"""The memory of a model whose ranks push gradients and pull parameters by themselves.

    every rank      gradients()     what its last backward has left, to be pushed
                    parameters()    where what it pulls goes
    first rank      apply           update by one gradient, or by the sum of all ranks' gradients
                    copy_to         copy the newest parameters, to be sent
                    show            what passes compute with

On the first rank two threads or more are at work: one computes, and whichever has received a
gradient updates by it. So its trained parameters have two versions, each with memory of its own:

    windows[0]      the newest: masters are these, or are cast to these; saves and evaluations read
    windows[1]      what its own passes use, copied from the newest between two of them

`FlatUnit.full` is always the newest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zrun_core.distributed.collectives import store_sum
from zrun_core.zero.reduce.model_grad import square_norm_of
from zrun_core.zero.reduce.nonfinite import UnitNorms
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.unit_grad import norms_of


class Applied(NamedTuple):
    """Result of an update.

    Attributes:
        norm: of the gradient before clipping, divided.
        skipped: the update was not made: the norm is not finite.
        norms: of the units, by which the culprit can be found.
    """

    norm: float
    skipped: bool
    norms: UnitNorms


class PushPull:
    """The memory of one rank's trained units.

    Attributes:
        num_params: trained ones; each has a byte that says whether it got a gradient.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self._units = [unit for unit in sharded.units if unit.trainable]
        self.num_params = sum(len(unit.params) for unit in self._units)
        # By version, each unit's parameters; the last one is what passes use.
        self._views = [
            [unit.views_of(unit.param.windows[number].full) for unit in self._units]
            for number in range(len(self._units[0].param.windows) if self._units else 1)
        ]

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's gradient of each unit, [padded_numel] in reduce dtype."""
        return [unit.grad.home.at() for unit in self._units]

    def parameters(self) -> list[torch.Tensor]:
        """Return the newest parameters of each unit, [padded_numel] in compute dtype."""
        return [unit.param.full for unit in self._units]

    def has_grad(self) -> bytes:
        """Return for each trained parameter whether this rank has a gradient of it."""
        return self._sharded.grad.has_grad_here()

    def take_room(self, num_ranks: int) -> list[list[torch.Tensor]]:
        """Return memory for the gradients of other ranks, for good.

        Returns:
            By rank as `gradients`.
        """
        sizes = [unit.layout.padded_numel for unit in self._units]
        dtype = self._sharded.settings.precision.reduce
        flat = self._sharded.reducer.ring.take(num_ranks * sum(sizes), dtype, grow=True)
        assert flat is not None
        return [list(part.split(sizes)) for part in flat.view(num_ranks, sum(sizes)).unbind()]

    # On the first rank

    def show(self, *, newest: bool) -> None:
        """Let the module compute with the newest parameters, or with the version of its passes."""
        shown = self._views[0 if newest else -1]
        for unit, views in zip(self._units, shown, strict=True):
            for param, view in zip(unit.params, views, strict=True):
                param.data = view

    def refresh(self) -> None:
        """Copy the newest parameters to the version of this rank's passes."""
        for unit in self._units:
            if len(unit.param.windows) > 1:
                unit.param.windows[-1].full.copy_(unit.param.full)

    def parameters_in(self, room: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return views for the parameters of each unit in the memory of gradients that were used.

        Args:
            room: one of `take_room`: a gradient takes no fewer bytes than its parameters.
        """
        return [
            used.view(unit.layout.dtype)[: unit.layout.padded_numel]
            for unit, used in zip(self._units, room, strict=True)
        ]

    def copy_to(self, parameters: Sequence[torch.Tensor]) -> None:
        """Copy the newest parameters of each unit."""
        for unit, copied in zip(self._units, parameters, strict=True):
            copied.copy_(unit.param.full)

    def apply(
        self,
        gradients: Sequence[Sequence[torch.Tensor]],
        has_grad: Sequence[bytes],
        lr: float,
        divisor: float,
        *,
        is_finite: bool,
    ) -> Applied:
        """Update by the sum of some ranks' gradients, unless it is not finite.

        Args:
            gradients: by rank as `gradients`, in the order in which they are added; undefined
                afterwards.
            has_grad: by rank.
        """
        sharded = self._sharded
        with torch.no_grad():
            summed = dict(zip(self._units, gradients[0], strict=True))
            for parts in zip(*gradients, strict=True):
                store_sum(list(parts), parts[0], accumulate=False)
            square, norms = square_norm_of(
                self._units,
                lambda unit, part: norms_of(summed[unit][slice(*unit.layout.part_range(part))]),
                sharded.comm.device,
            )
            norm = square.sqrt() / divisor
            if not (is_finite and bool(torch.isfinite(square))):
                return Applied(float(norm), True, norms)
            scale = torch.tensor(divisor, dtype=torch.float64)
            clip = sharded.settings.clip
            if clip is not None:
                scale = scale * (norm / clip).clamp(min=1.0)
            counts = torch.tensor([list(each) for each in has_grad]).sum(0).double()
            by_unit = sharded.grad.has_grad_anywhere(has_grad[0], counts)
            narrow = scale.float()
            sharded.optimizer.step_by(summed, lr, by_unit, None if float(narrow) == 1.0 else narrow)
        return Applied(float(norm), False, norms)
