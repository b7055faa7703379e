"""Find the gradient or parameter that is not finite, and its rank, after a step had to be skipped.

The sums of all ranks are there after every step and name the parameter. They do not say whose
contribution spoiled them: while skips go on, each rank also inspects its own gradient before it is
summed.

Each rank puts what it found into a row of numbers, and one small all-reduce makes a table of them:

    loss             own gradient             its part of the sum      largest element, if all
    kind, micro      unit, parameter, kind    unit, parameter, kind    finite: unit, parameter, size

Kinds are 0 finite, 1 inf, 2 nan. Units and parameters are counted from 1: 0 is none.
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
_LOSS = slice(0, 2)
_OWN = slice(2, 5)
_SUMMED = slice(5, 8)
_LARGEST = slice(8, 11)
_Found = tuple[int, int, float]  # unit, parameter, and its kind or size
UnitNorms = list[tuple[list[FlatUnit], torch.Tensor]]  # with each unit, that of it or of a part
_STAGE = 1 << 20  # units of one stage of a pipeline, at most: those of an earlier one come first


@dataclass(frozen=True)
class Culprit:
    """The first parameter, in the order of units, whose gradient is not finite; or such a loss.

    Attributes:
        parameter: None if every gradient is finite.
        kind: inf or nan.
        rank: whose gradient or loss it is; None where only the sum over ranks is known.
        loss: inf or nan where a rank's loss was not finite already.
        micro: in which micro-batch of the step that loss is, from 0.
        size: of the gradient's largest element, where only the norm of all is not finite.
        unit: name of the unit that it is in, where no more is known.
        pipeline_stage: that has the parameter; None: there is no pipeline.
    """

    parameter: str | None
    kind: str | None
    rank: int | None
    loss: str | None = None
    micro: int | None = None
    size: float | None = None
    unit: str | None = None
    pipeline_stage: int | None = None

    @property
    def layer(self) -> str | None:
        """Name of the module that holds the parameter."""
        if self.parameter is None:
            return None
        return self.parameter.rpartition(".")[0] or "the model itself"

    def __str__(self) -> str:
        on_stage = "" if self.pipeline_stage is None else f", stage {self.pipeline_stage}"
        if self.unit is not None:
            return f"a gradient in {self.unit}{on_stage} is not finite"
        on_rank = "" if self.rank is None else f" on rank {self.rank}"
        loss = "" if self.loss is None else f"the loss is {self.loss}{on_rank}"
        if self.parameter is None:
            return loss or "the gradient is not finite"
        where = f"{self.parameter} (layer {self.layer}{on_stage})"
        gradient = f"the gradient of {where} is {self.kind}"
        if self.size is not None:
            gradient = (
                f"every gradient is finite, but that of {where} reaches {self.size:.2g}, and the "
                "norm of all overflows"
            )
        if loss:
            return f"{loss}, and {gradient}"
        return gradient + on_rank


def kind_of(value: float) -> int:
    """Return 0 for a finite number, 1 for an infinite one, 2 for NaN."""
    if math.isnan(value):
        return 2
    return 1 if math.isinf(value) else 0


def _first_row(rows: Sequence[Sequence[float]], part: slice) -> tuple[float, ...] | None:
    """Return the first find in this part of the rows, and its rank; None: there is none."""
    found = ((*row[part], rank) for rank, row in enumerate(rows) if any(row[part]))
    return min(found, default=None)


def _first_loss(losses: Sequence[float]) -> list[float]:
    """Return kind and position of the first loss that is not finite; zeros where all are."""
    for micro, loss in enumerate(losses):
        if not math.isfinite(loss):
            return [float(kind_of(loss)), float(micro)]
    return [0.0, 0.0]


def first_nonfinite(layout: UnitLayout, flat: torch.Tensor, start: int) -> tuple[int, int] | None:
    """Find the first parameter that is not finite in a range of a unit.

    Args:
        layout: of the unit.
        flat: [any length], its elements from `start` on, without padding.
        start: counted from the unit's beginning.

    Returns:
        The parameter's number in the unit, and its kind; None where all are finite.
    """
    if bool(torch.isfinite(flat).all()):
        return None
    for piece in layout.pieces(start, start + flat.numel()):
        part = flat[piece.start : piece.stop]
        if not bool(torch.isfinite(part).all()):
            kind = 2 if bool(torch.isnan(part).any()) else 1
            return piece.index, kind
    return None


def _unpadded(unit: FlatUnit, local: torch.Tensor) -> torch.Tensor:
    """Return `local` [updated range] without the padding at the unit's end."""
    return local[: max(0, unit.layout.numel - unit.updated_range[0])]


def _first(held: Iterable[tuple[FlatUnit, torch.Tensor]]) -> tuple[int, int, int] | None:
    """Return unit, parameter and kind of the first find in what a rank updates."""
    for unit, local in held:
        found = first_nonfinite(unit.layout, local, unit.updated_range[0])
        if found is not None:
            return unit.index, *found
    return None


class Inspector:
    """Inspects gradients: those summed over ranks, and those of this rank as `inspect` gets them.

    Attributes:
        norms: of the last step, lists of units with a norm of each, or of a part of each.
    """

    def __init__(self, units: Sequence[FlatUnit], comm: Comm, world: Group, pipe: Group) -> None:
        """
        Args:
            units: of this rank's model.
            comm: its collectives.
            world: all ranks.
            pipe: the stages of a pipeline, with other units each.
        """
        self._units = [unit for unit in units if unit.trainable]
        self._comm = comm
        self._world = world
        self._pipe = pipe
        self._first_number = 1 + pipe.index * _STAGE  # of a unit, in a row
        self._own: tuple[int, int, int] | None = None  # unit, parameter, kind
        self.norms: UnitNorms = []

    def begin_step(self) -> None:
        """Forget what was found in this rank's own gradients."""
        self._own = None

    def inspect(self, unit: FlatUnit, unsharded_grad: torch.Tensor) -> None:
        """Inspect this rank's gradient [padded_numel] of `unit`, which is about to be summed."""
        found = first_nonfinite(unit.layout, unsharded_grad[: unit.layout.numel], 0)
        if found is None:
            return
        if self._own is None or unit.index < self._own[0]:
            self._own = (unit.index, *found)

    def find(self, losses: Sequence[float]) -> Culprit | None:
        """Find what was not finite in the step that has just been skipped. Collective.

        Args:
            losses: of this rank's micro-batches.
        """
        summed = _first(self._grads())
        largest = None
        if self._own is None and summed is None and all(map(math.isfinite, losses)):
            largest = self._largest()
        row = _first_loss(losses)
        for found in (self._own, summed, largest):
            row += self._in_row(found)
        return self._judge(self._all_gather(row))

    def find_unit(self, losses: Sequence[float]) -> Culprit | None:
        """Find the unit, from the norms that the step was judged by, after its gradient is gone.

        Collective.

        Args:
            losses: of this rank's micro-batches.
        """
        bad = []
        for units, norms in self.norms:
            finite = torch.isfinite(norms).tolist()
            bad += [
                unit.index for unit, is_finite in zip(units, finite, strict=True) if not is_finite
            ]
        number = min(bad) + self._first_number if bad else 0
        rows = self._all_gather([*_first_loss(losses), number])
        for rank, (kind, micro, _) in enumerate(rows):
            if kind:
                return Culprit(None, None, rank, _KINDS[int(kind)], int(micro))
        first = _first_row(rows, slice(2, 3))
        if first is None:
            return None
        unit = self._name_known_to(int(first[-1]), lambda: self._unit(first[0]).name)
        return Culprit(None, None, None, unit=unit, pipeline_stage=self._stage(first[0]))

    def find_parameter(self) -> tuple[str, str] | None:
        """Return name and kind of the first parameter that is not finite itself. Collective."""
        found = _first(self._params())
        first = _first_row(self._all_gather(self._in_row(found)), slice(0, 3))
        if first is None:
            return None
        kind = _KINDS[int(first[2])]
        assert kind is not None
        return self._name(first), kind

    def _all_gather(self, row: Sequence[float]) -> list[list[float]]:
        """Return every rank's row, by rank."""
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
                yield unit, _unpadded(unit, unit.grad.fetch())
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
        """Return the name of the tensor that a rank has found.

        Args:
            found: (unit, parameter, ..., rank), as `_first_row` returns it.
        """

        def of_unit() -> str:
            slot = self._unit(found[0]).layout.slots[int(found[1]) - 1]
            return slot.part.tensor

        return self._name_known_to(int(found[-1]), of_unit)

    def _unit(self, number: float) -> FlatUnit:
        index = int(number) - self._first_number
        return next(unit for unit in self._units if unit.index == index)

    def _stage(self, number: float) -> int | None:
        """Return the stage that has a unit, given its number in a row; None: no pipeline."""
        return None if self._pipe.size == 1 else int(number) // _STAGE

    def _name_known_to(self, rank: int, name_of: Callable[[], str]) -> str:
        """Return a name that `rank` knows; ranks of other stages may not have that unit.

        Args:
            rank: that has found it.
            name_of: returns the name, on that rank.
        """
        if self._pipe.size == 1:
            return name_of()
        name = name_of().encode() if rank == self._world.index else b""
        return self._comm.all_gather_bytes(name, self._world, name="skipped step")[rank].decode()

    def _judge(self, rows: list[list[float]]) -> Culprit | None:
        """Return the culprit that all rows together show; the same on every rank."""
        own = _first_row(rows, _OWN)
        first = own or _first_row(rows, _SUMMED)
        parameter = None
        kind = None
        rank = None
        stage = None
        if first is not None:
            parameter = self._name(first)
            kind = _KINDS[int(first[2])]
            stage = self._stage(first[0])
            if own or len(rows) == 1:  # a sum does not say whose addend it was
                rank = int(first[3])
        for each, row in enumerate(rows):
            loss, micro = row[_LOSS]
            if loss:
                return Culprit(
                    parameter, kind, each, _KINDS[int(loss)], int(micro), pipeline_stage=stage
                )
        if first is not None:
            return Culprit(parameter, kind, rank, pipeline_stage=stage)
        return self._judge_largest(rows)

    def _judge_largest(self, rows: list[list[float]]) -> Culprit | None:
        found = [(*row[_LARGEST], rank) for rank, row in enumerate(rows) if any(row[_LARGEST])]
        if not found:
            return None
        largest = max(found, key=lambda each: each[2])
        stage = self._stage(largest[0])
        return Culprit(self._name(largest), None, None, size=largest[2], pipeline_stage=stage)
