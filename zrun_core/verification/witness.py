"""Records what a rank does in a run, as a watcher of its trainer: see `record.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from zrun_core.data.batch import MicroBatch, digest
from zrun_core.distributed.rng import Streams
from zrun_core.telemetry.recorder import IssuedStep
from zrun_core.telemetry.step_totals import StepTotals
from zrun_core.train.trainer import Trainer
from zrun_core.verification.record import (
    BUFFER,
    GRAD,
    VALUE,
    StepNumbers,
    TensorShape,
    Writer,
    tensor_key,
)
from zrun_core.zero.unit.flat_unit import FlatUnit


class Witness:
    """Writes a file at the beginning of a run, and one after each step."""

    def __init__(self, trainer: Trainer, streams: Streams, run_dir: Path, rank: int) -> None:
        """
        Args:
            run_dir: whose folder `record` is written to.
        """
        self._trainer = trainer
        self._sharded = trainer.sharded
        self._streams = streams
        self._writer = Writer(run_dir, rank)
        self._has_begun = False
        self._batches: list[tuple[str, int]] = []
        self._positions = range(0)
        self._grads: dict[str, torch.Tensor] = {}
        self._divisor = torch.ones(())
        self._without_grad: list[str] = []
        trainer.watcher = self
        self._sharded.updates.watcher = self._see_update

    def begin_step(self, micro_batches: Sequence[MicroBatch], positions: range) -> None:
        """See what the step is made of; write the beginning if it is the first."""
        if not self._has_begun:
            self._has_begun = True
            numbers = StepNumbers(self._trainer.progress.steps, self._tensors())
            self._writer.write(numbers, self._state(with_frozen=True))
        self._batches = [(digest(each.batch), each.num_samples) for each in micro_batches]
        self._positions = positions

    def _see_update(self, divisor: torch.Tensor, has_grad: Sequence[bytes]) -> None:
        self._grads = {}
        self._without_grad = []
        self._divisor = divisor
        units = [unit for unit in self._sharded.units if unit.trainable]
        for unit, of_unit in zip(units, has_grad, strict=True):
            pairs = zip(unit.layout.slots, of_unit, strict=True)
            self._without_grad += [slot.part.tensor for slot, has_one in pairs if not has_one]
            self._grads |= _ranges(GRAD, unit, unit.copied_grad(), unit.updated_range[0])

    def end_step(self, issued: IssuedStep, totals: StepTotals) -> None:
        """Write what the step has come to."""
        self._sharded.settle_updates()
        weight = totals.weight
        numbers = StepNumbers(
            step=issued.step,
            positions=(self._positions.start, self._positions.stop),
            batches=self._batches,
            loss=totals.loss / weight if weight else 0.0,
            weight=weight,
            norm=totals.grad_norm,
            divisor=float(self._divisor),
            scale=totals.scale,
            skipped=bool(totals.skipped),
            lr=issued.lr,
            without_grad=self._without_grad,
            draws_apart=self._streams.has_drawn_inside,
        )
        self._writer.write(numbers, self._grads | self._state(with_frozen=False))
        self._grads = {}

    def _tensors(self) -> dict[str, TensorShape]:
        found = {}
        for unit in self._sharded.units:
            dtype = str(unit.layout.dtype).removeprefix("torch.")
            for slot in unit.layout.slots:
                part = slot.part
                found[part.tensor] = TensorShape(tuple(part.shape), tuple(part.stride), dtype)
        return found

    def _state(self, *, with_frozen: bool) -> dict[str, torch.Tensor]:
        """Return the values and buffers that this rank has."""
        found: dict[str, torch.Tensor] = {}
        for unit in self._sharded.units:
            if unit.trainable or with_frozen:
                flat, first = unit.values()
                values = flat.detach().to("cpu", torch.float32, copy=True)
                unit.drop_values()
                found |= _ranges(VALUE, unit, values, first)
        for name, buffer in self._sharded.module.named_buffers():
            if buffer.numel() and not buffer.is_meta and type(buffer) is torch.Tensor:
                found[tensor_key(BUFFER, 0, name)] = buffer.detach().cpu().clone().contiguous()
        return found


def _ranges(kind: str, unit: FlatUnit, flat: torch.Tensor, first: int) -> dict[str, torch.Tensor]:
    """Return what a rank has of a unit, by its name in the file.

    `flat` has the values, 1-D on the CPU, which begin with element `first` of the unit.
    """
    found = {}
    for each in unit.layout.tensor_ranges(first, first + len(flat)):
        key = tensor_key(kind, each.first, each.part.tensor)
        found[key] = flat[each.start : each.stop].clone()
    return found
