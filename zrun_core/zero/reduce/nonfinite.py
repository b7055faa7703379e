"""Find the gradient or parameter that is not finite, and its rank, after a step had to be skipped.

The sums of all ranks are there after every step and name the parameter. They do not say whose
contribution spoiled them: while skips go on, each rank also inspects its own gradient before it is
summed.

Each rank puts what it found into a row of numbers, and one small all-reduce makes a table of them:

    loss             own gradient             its part of the sum      largest element, if all
    kind, micro      unit, parameter, kind    unit, parameter, kind    finite: unit, parameter, size

Kinds are 0 finite, 1 inf, 2 nan. Units and parameters are counted from 1: 0 is none.

Named is the last parameter in the order of units, which is that of a forward in most models: what
goes wrong in a backward spoils the gradients of all layers in front of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import sent_to
from zrun_core.hardware import accelerator
from zrun_core.memory.layout import UnitLayout
from zrun_core.memory.tensors import TIED
from zrun_core.zero.unit.flat_unit import FlatUnit

_KINDS = (None, "inf", "nan")
_LOSS = slice(0, 2)
_OWN = slice(2, 5)
_SUMMED = slice(5, 8)
_LARGEST = slice(8, 11)
_Found = tuple[int, int, float]  # number of the unit, parameter, and its kind or size
UnitNorms = list[tuple[list[FlatUnit], torch.Tensor]]  # with each unit, that of it or of a part
_CHUNK = 1 << 20  # units of a chunk of a pipeline, at most: those of an earlier one come first
_NAMED = 4  # ranks at most, of which one has spoiled a sum


@dataclass(frozen=True)
class Culprit:
    """The last parameter, in the order of units, whose gradient is not finite; or such a loss.

    Attributes:
        parameter: None if every gradient is finite.
        kind: inf or nan.
        rank: whose gradient or loss it is; None where only the sum over ranks is known.
        ranks: whose sum it is, where that are not all.
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
    ranks: tuple[int, ...] = ()

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
        if self.rank is None and 0 < len(self.ranks) <= _NAMED:
            on_rank = f" on rank {' or '.join(map(str, self.ranks))}"
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


class _Last(NamedTuple):
    """The last find of all ranks.

    Attributes:
        number: of the unit, in the order of all stages.
        place: of the parameter in the unit, from 1.
        kind: or the size, of the first of `ranks`.
        ranks: that have found it, each in what it updates.
    """

    number: int
    place: int
    kind: float
    ranks: tuple[int, ...]


def _last_row(rows: Sequence[Sequence[float]], part: slice) -> _Last | None:
    """Return the last find in this part of the rows; None: there is none."""
    found = {rank: tuple(row[part]) for rank, row in enumerate(rows) if any(row[part])}
    if not found:
        return None
    last = max(own[:2] for own in found.values())
    ranks = tuple(rank for rank, own in found.items() if own[:2] == last)
    return _Last(int(last[0]), int(last[1]), found[ranks[0]][2], ranks)


def _first_loss(losses: Sequence[float]) -> list[float]:
    """Return kind and position of the first loss that is not finite; zeros where all are."""
    for micro, loss in enumerate(losses):
        if not math.isfinite(loss):
            return [float(kind_of(loss)), float(micro)]
    return [0.0, 0.0]


def last_nonfinite(layout: UnitLayout, flat: torch.Tensor, start: int) -> tuple[int, int] | None:
    """Find the last parameter that is not finite in a range of a unit.

    Args:
        flat: [any length], its elements from `start` on, without padding.
        start: counted from the unit's beginning.

    Returns:
        The parameter's number in the unit, and its kind; None where all are finite.
    """
    if bool(torch.isfinite(flat).all()):
        return None
    for piece in reversed(list(layout.pieces(start, start + flat.numel()))):
        part = flat[piece.start : piece.stop]
        if not bool(torch.isfinite(part).all()):
            kind = 2 if bool(torch.isnan(part).any()) else 1
            return piece.index, kind
    return None


def _in_row(found: _Found | None) -> list[float]:
    """Return a find as numbers of a row."""
    if found is None:
        return [0.0, 0.0, 0.0]
    return [float(found[0]), found[1] + 1.0, found[2]]


def _unpadded(unit: FlatUnit, local: torch.Tensor) -> torch.Tensor:
    """Return `local` [updated range] without the padding at the unit's end."""
    return local[: max(0, unit.layout.numel - unit.updated_range[0])]


class Inspector:
    """Inspects gradients: those summed over ranks, and those of this rank as `inspect` gets them.

    Attributes:
        norms: of the last step, lists of units with a norm of each, or of a part of each.
    """

    def __init__(self, units: Sequence[FlatUnit], comm: Comm, mesh: Mesh) -> None:
        self._units = [unit for unit in units if unit.trainable]
        self._comm = comm
        self._world = mesh.world
        self._data = mesh.data
        self._pipe = mesh.pipe
        self._numbered = {self._number(unit): unit for unit in self._units}
        self._own: _Found | None = None
        self.norms: UnitNorms = []

    def begin_step(self) -> None:
        """Forget what was found in this rank's own gradients."""
        self._own = None

    def inspect(self, unit: FlatUnit, unsharded_grad: torch.Tensor) -> None:
        """Inspect this rank's gradient [padded_numel] of `unit`, which is about to be summed."""
        found = last_nonfinite(unit.layout, unsharded_grad[: unit.layout.numel], 0)
        if found is not None:
            own = (self._number(unit), *found)
            self._own = own if self._own is None else max(self._own, own)

    def _number(self, unit: FlatUnit) -> int:
        """Return the number of a unit in a row, in the order of all stages."""
        chunk = unit.layout.chunk * self._pipe.size + self._pipe.index
        return 1 + chunk * _CHUNK + unit.index

    def _last(self, held: Iterable[tuple[FlatUnit, torch.Tensor]]) -> _Found | None:
        """Return the last find in what this rank updates."""
        found = []
        for unit, local in held:
            in_unit = last_nonfinite(unit.layout, local, unit.updated_range[0])
            if in_unit is not None:
                found.append((self._number(unit), *in_unit))
        return max(found, default=None)

    def find(self, losses: Sequence[float]) -> Culprit | None:
        """Find what was not finite in the step that has just been skipped. Collective."""
        summed = self._last(self._grads())
        largest = None
        if self._own is None and summed is None and all(map(math.isfinite, losses)):
            largest = self._largest()
        row = _first_loss(losses)
        for found in (self._own, summed, largest):
            row += _in_row(found)
        return self._judge(self._all_gather(row))

    def find_unit(self, losses: Sequence[float]) -> Culprit | None:
        """Find the unit, from the norms that the step was judged by, after its gradient is gone.

        Collective.
        """
        bad = []
        for units, norms in self.norms:
            finite = accelerator.fetch(torch.isfinite(norms)).tolist()
            bad += [
                self._number(unit)
                for unit, is_finite in zip(units, finite, strict=True)
                if not is_finite
            ]
        rows = self._all_gather([*_first_loss(losses), max(bad, default=0), 0.0, 0.0])
        for rank, (kind, micro, *_) in enumerate(rows):
            if kind:
                return Culprit(None, None, rank, _KINDS[int(kind)], int(micro))
        last = _last_row(rows, slice(2, 5))
        if last is None:
            return None
        unit, _ = self._told(last)
        return Culprit(None, None, None, unit=unit, pipeline_stage=self._stage(last.number))

    def find_parameter(self) -> tuple[str, str] | None:
        """Return name and kind of the last parameter that is not finite itself. Collective."""
        rows = self._all_gather(_in_row(self._last(self._params())))
        last = _last_row(rows, slice(0, 3))
        if last is None:
            return None
        kind = _KINDS[int(last.kind)]
        assert kind is not None
        return self._told(last)[0], kind

    def _all_gather(self, row: Sequence[float]) -> list[list[float]]:
        """Return every rank's row, by rank."""
        table = torch.zeros(self._world.size, len(row), dtype=torch.float64)
        table[self._world.index] = torch.tensor(row, dtype=torch.float64)
        summed = self._comm.all_reduce_small(
            sent_to(self._comm.device, table.view(-1)), self._world, name="skipped step"
        )
        with self._comm.waiting():
            rows: list[list[float]] = accelerator.fetch(summed).view(-1, len(row)).tolist()
        return rows

    def _largest(self) -> _Found | None:
        """Return where the largest element of this rank's sums is, if their norm overflows."""
        found: list[_Found] = []
        for unit, held in self._grads():
            for piece in unit.layout.pieces(
                unit.updated_range[0], unit.updated_range[0] + held.numel()
            ):
                size = torch.linalg.vector_norm(held[piece.start : piece.stop], math.inf)
                found.append((self._number(unit), piece.index, float(size)))
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
                yield unit, _unpadded(unit, unit.param.fetch())
            finally:
                unit.param.home.drop()

    def _stage(self, number: int) -> int | None:
        """Return the stage that has a unit, given its number in a row; None: no pipeline."""
        return None if self._pipe.size == 1 else (number - 1) // _CHUNK % self._pipe.size

    def _told(self, last: _Last) -> tuple[str, tuple[int, ...]]:
        """Return the name of what ranks have found, and the ranks whose sum it is. Collective.

        Without a parameter it is that of the unit. Ranks that have not found it may not have it.

        Returns:
            The name, and ranks where they are known, and not all.
        """
        if self._data.size == self._world.size:
            return self._name(last), ()
        told = ""
        if self._world.index in last.ranks:
            is_tied = TIED in self._numbered[last.number].layout.replicated_over
            told = json.dumps([self._name(last), () if is_tied else self._data.ranks])
        everyones = self._comm.all_gather_bytes(told.encode(), self._world, name="skipped step")
        names, summed = zip(*(json.loads(everyones[rank]) for rank in last.ranks), strict=True)
        return names[0], tuple(sorted({rank for ranks in summed for rank in ranks}))

    def _name(self, last: _Last) -> str:
        unit = self._numbered[last.number]
        return unit.layout.slots[last.place - 1].part.tensor if last.place else unit.name

    def _judge(self, rows: list[list[float]]) -> Culprit | None:
        """Return the culprit that all rows together show; the same on every rank."""
        own = _last_row(rows, _OWN)
        last = own or _last_row(rows, _SUMMED)
        parameter = None
        kind = None
        stage = None
        ranks: tuple[int, ...] = ()
        if last is not None:
            parameter, ranks = self._told(last)
            kind = _KINDS[int(last.kind)]
            stage = self._stage(last.number)
        if own is not None:  # of ranks that train different slices, one has spoiled the others'
            is_same = self._data.size == self._world.size
            ranks = own.ranks[:1] if is_same else own.ranks
        elif len(rows) == 1:
            ranks = (0,)
        rank = ranks[0] if len(ranks) == 1 else None
        for each, row in enumerate(rows):
            loss, micro = row[_LOSS]
            if loss:
                return Culprit(
                    parameter, kind, each, _KINDS[int(loss)], int(micro), pipeline_stage=stage
                )
        if last is not None:
            return Culprit(parameter, kind, rank, pipeline_stage=stage, ranks=ranks)
        return self._judge_largest(rows)

    def _judge_largest(self, rows: list[list[float]]) -> Culprit | None:
        sizes = {rank: row[_LARGEST][2] for rank, row in enumerate(rows)}
        rank = max(sizes, key=sizes.__getitem__)
        if not sizes[rank]:
            return None
        number, place, size = rows[rank][_LARGEST]
        largest = _Last(int(number), int(place), size, (rank,))
        name, _ = self._told(largest)
        return Culprit(name, None, None, size=size, pipeline_stage=self._stage(largest.number))
