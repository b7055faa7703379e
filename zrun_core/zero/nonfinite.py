"""Which gradient or parameter is not finite, and on which rank: looked for only after a step had to be skipped.

The sums of all ranks are there after every step and name the parameter. They do not say whose contribution spoiled
them; so while skips go on, each rank also looks at its own gradient before it is summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import Group
from zrun_core.memory.layout import UnitLayout
from zrun_core.zero.unit import FlatUnit

_KINDS = (None, "inf", "nan")
# A rank's row: kind of its loss, and in which micro-batch; unit, parameter and kind in its own
# gradient; the same in its part of the sum; unit, parameter and size of the largest element of
# that part, where everything is finite.
_LOSS, _OWN, _SUMMED, _LARGEST = slice(0, 2), slice(2, 5), slice(5, 8), slice(8, 11)
_Found = tuple[int, int, float]  # unit, parameter, and its kind or size
_STAGE = 1 << 20  # units of one stage of a pipeline, at most: those of an earlier one come first


@dataclass(frozen=True)
class Culprit:
    """The first parameter, in the order of units, whose gradient is not finite; or a loss that is not.

    Attributes:
        parameter: None if every gradient is finite.
        kind: inf or nan.
        rank: whose gradient or loss it is; None where only the sum over ranks is known.
        loss: inf or nan where a rank's loss was not finite already.
        micro: in which micro-batch of the step that loss is, from 0.
        size: of the gradient's largest element, where every one is finite and only their norm is not.
        unit: the parameters among which it is, where no more is known.
    """

    parameter: str | None
    kind: str | None
    rank: int | None
    loss: str | None = None
    micro: int | None = None
    size: float | None = None
    unit: str | None = None

    @property
    def layer(self) -> str | None:
        """The module that holds the parameter."""
        return (
            None
            if self.parameter is None
            else self.parameter.rpartition(".")[0] or "the model itself"
        )

    def __str__(self) -> str:
        whose = "" if self.rank is None else f" on rank {self.rank}"
        loss = f"the loss is {self.loss}{whose}" if self.loss is not None else ""
        if self.unit is not None:
            return f"a gradient in {self.unit} is not finite"
        if self.parameter is None:
            return loss or "the gradient is not finite"
        gradient = f"the gradient of {self.parameter} (layer {self.layer}) is {self.kind}"
        if self.size is not None:
            gradient = (
                f"every gradient is finite, but that of {self.parameter} (layer {self.layer}) reaches {self.size:.2g}, "
                "and the norm of all overflows"
            )
        return f"{loss}, and {gradient}" if loss else gradient + whose


def kind_of(value: float) -> int:
    """0 finite, 1 infinite, 2 not a number."""
    return 2 if math.isnan(value) else int(math.isinf(value))


def _first_row(rows: Sequence[Sequence[float]], part: slice) -> tuple[float, ...] | None:
    """What was found first in this part of the rows, and by which rank; None: nothing."""
    found = ((*row[part], rank) for rank, row in enumerate(rows) if any(row[part]))
    return min(found, default=None)


def _first_loss(losses: Sequence[float]) -> list[float]:
    """The kind of the first loss that is not finite, and its place; zeros where all are."""
    found = next((each for each in enumerate(losses) if not math.isfinite(each[1])), None)
    return [0.0, 0.0] if found is None else [float(kind_of(found[1])), float(found[0])]


def first_nonfinite(layout: UnitLayout, flat: torch.Tensor, start: int) -> tuple[int, int] | None:
    """(parameter's place in the unit, kind) of the first one that is not finite in `flat`, elements from `start` on."""
    if bool(torch.isfinite(flat).all()):
        return None
    for piece in layout.pieces(start, start + flat.numel()):
        part = flat[piece.start : piece.stop]
        if not bool(torch.isfinite(part).all()):
            return piece.index, 2 if bool(torch.isnan(part).any()) else 1
    return None


def _unpadded(unit: FlatUnit, local: torch.Tensor) -> torch.Tensor:
    return local[: max(0, unit.layout.numel - unit.updated_range[0])]


def _first(held: Iterable[tuple[FlatUnit, torch.Tensor]]) -> tuple[int, int, int] | None:
    """Unit, parameter and kind of what is not finite first, of elements that a rank updates."""
    for unit, local in held:
        found = first_nonfinite(unit.layout, local, unit.updated_range[0])
        if found is not None:
            return unit.index, *found
    return None


class Inspector:
    """Looks at gradients: those of this rank, as far as `inspect` is told of them, and those summed over ranks."""

    def __init__(self, units: Sequence[FlatUnit], comm: Comm, world: Group, pipe: Group) -> None:
        self._units, self._comm = [unit for unit in units if unit.trainable], comm
        self._world, self._pipe = world, pipe
        self._first_number = 1 + pipe.index * _STAGE  # of a unit, in a row; 0 is none
        self._own: tuple[int, int, int] | None = None  # unit, parameter, kind
        self.norms: list[
            tuple[list[FlatUnit], torch.Tensor]
        ] = []  # units, and of each the norm, or one of a part

    def begin_step(self) -> None:
        self._own = None

    def inspect(self, unit: FlatUnit, whole: torch.Tensor) -> None:
        """This rank's gradient `whole` of `unit` is about to be summed."""
        found = first_nonfinite(unit.layout, whole[: unit.layout.numel], 0)
        if found is not None and (self._own is None or unit.index < self._own[0]):
            self._own = unit.index, *found

    def find(self, losses: Sequence[float]) -> Culprit | None:
        """What was not finite in the step that has just been skipped. Collective.

        Args:
            losses: of this rank's micro-batches.
        """
        summed = _first(self._grads())
        is_finite = self._own is None and summed is None and all(map(math.isfinite, losses))
        row = _first_loss(losses)
        for found in (self._own, summed, self._largest() if is_finite else None):
            row += self._in_row(found)
        return self._judge(self._exchange(row))

    def find_unit(self, losses: Sequence[float]) -> Culprit | None:
        """As `find`, from the norms that the step was judged by, after its gradient is gone."""
        bad = [
            unit.index
            for units, norms in self.norms
            for unit, is_finite in zip(units, torch.isfinite(norms).tolist(), strict=True)
            if not is_finite
        ]
        number = min(bad) + self._first_number if bad else 0
        rows = self._exchange([*_first_loss(losses), number])
        for rank, (kind, micro, _) in enumerate(rows):
            if kind:
                return Culprit(None, None, rank, _KINDS[int(kind)], int(micro))
        first = _first_row(rows, slice(2, 3))
        if first is None:
            return None
        unit = self._told(int(first[-1]), lambda: self._unit(first[0]).name)
        return Culprit(None, None, None, unit=unit)

    def find_parameter(self) -> tuple[str, str] | None:
        """Name and kind (inf, nan) of the first parameter in training that is not finite itself. Collective."""
        found = _first(self._params())
        first = _first_row(self._exchange(self._in_row(found)), slice(0, 3))
        if first is None:
            return None
        kind = _KINDS[int(first[2])]
        assert kind is not None
        return self._name(first), kind

    def _exchange(self, row: Sequence[float]) -> list[list[float]]:
        """Every rank's row, by rank."""
        table = torch.zeros(self._world.size, len(row), dtype=torch.float64)
        table[self._world.index] = torch.tensor(row, dtype=torch.float64)
        summed = self._comm.all_reduce_small(
            table.view(-1).to(self._comm.device), self._world, name="skipped step"
        )
        rows: list[list[float]] = summed.view(-1, len(row)).tolist()
        return rows

    def _largest(self) -> _Found | None:
        """Return where the largest element of this rank's sums is, if their norm overflows."""
        found: list[_Found] = []
        for unit, held in self._grads():
            for piece in unit.layout.pieces(
                unit.updated_range[0], unit.updated_range[0] + held.numel()
            ):
                size = torch.linalg.vector_norm(held[piece.start : piece.stop], math.inf)
                found.append((unit.index, piece.index, float(size)))
        largest = max(found, key=lambda each: each[2], default=None)
        num_elements = sum(unit.layout.numel for unit in self._units)
        too_large = torch.finfo(torch.float32).max  # in which norms are taken
        if largest is None or largest[2] ** 2 * num_elements < too_large:
            return None
        return largest

    def _grads(self) -> Iterator[tuple[FlatUnit, torch.Tensor]]:
        """Yield the units, and the gradient of the elements that this rank updates of each."""
        for unit in self._units:
            try:
                yield unit, _unpadded(unit, unit.fetch_grad())
            finally:
                unit.grad.drop()

    def _params(self) -> Iterator[tuple[FlatUnit, torch.Tensor]]:
        """Yield the units, and the elements that this rank updates of each."""
        for unit in self._units:
            try:
                yield unit, _unpadded(unit, unit.fetch_local_param())
            finally:
                unit.param.drop()

    def _in_row(self, found: _Found | None) -> list[float]:
        if found is None:
            return [0.0, 0.0, 0.0]
        return [found[0] + self._first_number, found[1] + 1.0, found[2]]

    def _name(self, found: Sequence[float]) -> str:
        """Return the tensor of what a rank has found: (unit, parameter, ..., rank) of its row."""

        def own() -> str:
            slot = self._unit(found[0]).layout.slots[int(found[1]) - 1]
            return slot.part.tensor

        return self._told(int(found[-1]), own)

    def _unit(self, number: float) -> FlatUnit:
        index = int(number) - self._first_number
        return next(unit for unit in self._units if unit.index == index)

    def _told(self, rank: int, own: Callable[[], str]) -> str:
        """Return the name of what `rank` has found, which other stages may not have."""
        if self._pipe.size == 1:
            return own()
        name = own().encode() if rank == self._world.index else b""
        return self._comm.all_gather_bytes(name, self._world, name="skipped step")[rank].decode()

    def _judge(self, rows: list[list[float]]) -> Culprit | None:
        ranks = range(len(rows))
        own = _first_row(rows, _OWN)
        summed = _first_row(rows, _SUMMED)
        first = own or summed
        parameter = kind = rank = None
        if first is not None:
            parameter, kind, holder = self._name(first), _KINDS[int(first[2])], int(first[3])
            rank = holder if own or len(rows) == 1 else None
        for each in ranks:
            loss, micro = rows[each][_LOSS]
            if loss:
                return Culprit(parameter, kind, each, _KINDS[int(loss)], int(micro))
        if first is not None:
            return Culprit(parameter, kind, rank)
        largest = ((*row[_LARGEST], rank) for rank, row in enumerate(rows) if any(row[_LARGEST]))
        large = max(largest, key=lambda each: each[2], default=None)
        if large is None:
            return None
        return Culprit(self._name(large), None, None, size=large[2])
