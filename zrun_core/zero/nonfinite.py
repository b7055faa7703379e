"""Which gradient is not finite, and on which rank: looked for only after a step had to be skipped.

The sums of all ranks are there after every step and name the parameter. They do not say whose contribution spoiled
them; so while skips go on, each rank also looks at its own gradient before it is summed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zrun_core.comm import Comm, Group
from zrun_core.layout import UnitLayout
from zrun_core.zero.unit import FlatUnit

_KINDS = (None, "inf", "nan")
_FIELDS = 7  # of a rank's row: loss; unit, parameter and kind in its own gradient; the same in its part of the sum


@dataclass(frozen=True)
class Culprit:
    """The first parameter, in the order of units, whose gradient is not finite; or a loss that is not.

    Attributes:
        parameter: None if every gradient is finite.
        kind: inf or nan.
        rank: whose gradient or loss it is; None where only the sum over ranks is known.
        loss: inf or nan where a rank's loss was not finite already.
    """

    parameter: str | None
    kind: str | None
    rank: int | None
    loss: str | None = None

    @property
    def layer(self) -> str | None:
        """The module that holds the parameter."""
        return None if self.parameter is None else self.parameter.rpartition(".")[0] or "the model itself"

    def __str__(self) -> str:
        whose = "" if self.rank is None else f" on rank {self.rank}"
        loss = f"the loss is {self.loss}{whose}" if self.loss is not None else ""
        if self.parameter is None:
            return loss or "the gradient is not finite"
        gradient = f"the gradient of {self.parameter} (layer {self.layer}) is {self.kind}"
        return f"{loss}, and {gradient}" if loss else gradient + whose


def kind_of(value: float) -> int:
    """0 finite, 1 infinite, 2 not a number."""
    return 2 if math.isnan(value) else int(math.isinf(value))


def first_nonfinite(layout: UnitLayout, flat: torch.Tensor, start: int) -> tuple[int, int] | None:
    """(parameter's place in the unit, kind) of the first one that is not finite in `flat`, elements from `start` on."""
    if bool(torch.isfinite(flat).all()):
        return None
    for piece in layout.pieces(start, start + flat.numel()):
        part = flat[piece.start : piece.stop]
        if not bool(torch.isfinite(part).all()):
            return piece.index, 2 if bool(torch.isnan(part).any()) else 1
    return None


class Inspector:
    """Looks at gradients: those of this rank, as far as `see` is told of them, and those summed over ranks."""

    def __init__(self, units: Sequence[FlatUnit], comm: Comm, world: Group) -> None:
        self._units, self._comm, self._world = [unit for unit in units if unit.trainable], comm, world
        self._own: tuple[int, int, int] | None = None  # unit, parameter, kind

    def begin_step(self) -> None:
        self._own = None

    def see(self, unit: FlatUnit, whole: torch.Tensor) -> None:
        """This rank's gradient `whole` of `unit` is about to be summed."""
        found = first_nonfinite(unit.layout, whole[: unit.layout.numel], 0)
        if found is not None and (self._own is None or unit.index < self._own[0]):
            self._own = unit.index, *found

    def find(self, own_loss: float) -> Culprit | None:
        """What was not finite in the step that has just been skipped. Collective.

        Args:
            own_loss: of this rank, summed over the step.
        """
        row = torch.zeros(self._world.size, _FIELDS, dtype=torch.float64)
        mine = row[self._world.index]
        mine[0] = kind_of(own_loss)
        for place, found in ((1, self._own), (4, self._in_the_sum())):
            if found is not None:
                mine[place : place + 3] = torch.tensor(found, dtype=torch.float64) + torch.tensor([1.0, 1.0, 0.0])
        table = self._comm.sum_small(row.view(-1).to(self._comm.device), self._world, name="skipped step")
        rows = [[int(field) for field in fields] for fields in table.view(-1, _FIELDS).tolist()]
        return self._judge(rows)

    def _in_the_sum(self) -> tuple[int, int, int] | None:
        for unit in self._units:
            start, stop = unit.owned
            held = unit.grad[: min(stop, unit.layout.numel) - start] if start < unit.layout.numel else unit.grad[:0]
            found = first_nonfinite(unit.layout, held, start)
            if found is not None:
                return unit.index, *found
        return None

    def _judge(self, rows: list[list[int]]) -> Culprit | None:
        ranks = range(len(rows))
        own = min(((*rows[rank][1:3], rank) for rank in ranks if rows[rank][1]), default=None)
        summed = min(((*rows[rank][4:6], rank) for rank in ranks if rows[rank][4]), default=None)
        first = own or summed
        parameter = kind = rank = None
        if first is not None:
            unit = next(unit for unit in self._units if unit.index == first[0] - 1)
            parameter = unit.layout.slots[first[1] - 1].name
            kind = _KINDS[rows[first[2]][3 if own else 6]]
            rank = first[2] if own or len(rows) == 1 else None
        spoiled = [each for each in ranks if rows[each][0]]
        if spoiled:
            return Culprit(parameter, kind, spoiled[0], _KINDS[rows[spoiled[0]][0]])
        return None if first is None else Culprit(parameter, kind, rank)
