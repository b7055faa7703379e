"""Check in the first step that forwards in turns come to what they come to one after the other.

In layer-major order every micro-batch begins before the first one ends:

    one after the other    begin 0   end 0   begin 1   end 1     begin 1 reads what end 0 has left
    in turns               begin 0   begin 1   end 0   end 1     it reads what there was before

What a forward leaves behind, such as a running mean of losses, its next beginning may read. So if
the first one leaves something, those of the first step run one after the other too, without
gradients and without a trace, and their losses are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from zrun_core.data.batch import MicroBatch, copied
from zrun_core.distributed.rng import TurnStream, kept_position
from zrun_core.errors import JobError
from zrun_core.user_code.loss import Loss, LossFunction
from zrun_core.user_code.trial import kept_attributes, watched_state
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.wrap.fakes import kept_buffers

# Relative differences that other kernels make, which may run where nothing needs a gradient.
_ROUNDING = 1e-5
_ROUNDING_OF_HALVES = 2e-3
_MOST_NAMES = 3


class ForwardOrder:
    """Losses of the first step's micro-batches, one after the other."""

    def __init__(
        self,
        sharded: ShardedModel,
        loss: LossFunction | None,
        loss_of: Callable[[MicroBatch], Loss],
        key: str,
        instead: str,
    ) -> None:
        """
        Args:
            loss: the user's loss function, which may have attributes.
            loss_of: computes the loss of a micro-batch.
            key: of the job, which has forwards take turns; what to write `instead`.
        """
        self._sharded = sharded
        self._loss = loss
        self._loss_of = loss_of
        self._key = key
        self._instead = instead
        self._expected: list[float] = []
        self._left: list[str] = []  # names of what the first forward leaves behind

    def look_ahead(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Compute the losses of a step's micro-batches. Collective; it leaves no trace."""
        sharded, comm = self._sharded, self._sharded.comm
        model = sharded.module
        own = [copied(batch.batch) for batch in micro_batches]
        copies = [
            replace(batch, batch=each) for batch, each in zip(micro_batches, own, strict=True)
        ]
        with ExitStack() as stack:
            stack.enter_context(kept_attributes(model, self._loss, own))
            stack.enter_context(kept_buffers(model))
            stack.enter_context(kept_position(comm.device))
            stack.enter_context(sharded.evaluation())
            names_of_changed = watched_state(model, self._loss)
            # They draw what those in turns will.
            streams = [TurnStream(comm.device) for _ in copies]
            for number, (stream, batch) in enumerate(zip(streams, copies, strict=True)):
                with stream.turn():
                    loss = self._loss_of(batch)
                self._expected.append(float(loss.detached().total))
                if number == 0:
                    self._left = names_of_changed()
                    mine = b"1" if self._left else b""
                    told = comm.all_gather_bytes(mine, sharded.mesh.world, name="left by a forward")
                    if not any(told):
                        break
        if not self._left:
            self._expected = []

    def check(self, number: int, loss: Loss) -> None:
        """Check the loss of a micro-batch of that step, whose forward took turns with others.

        Raises:
            JobError: it is another.
        """
        if number >= len(self._expected):
            return
        expected, found = self._expected[number], float(loss.detached().total)
        compute = self._sharded.settings.precision.compute
        rounding = _ROUNDING if compute == torch.float32 else _ROUNDING_OF_HALVES
        both_finite = math.isfinite(expected) and math.isfinite(found)
        if not both_finite or math.isclose(expected, found, rel_tol=rounding, abs_tol=1e-9):
            return
        names = ", ".join(f"`{name}`" for name in self._left[:_MOST_NAMES])
        if len(self._left) > _MOST_NAMES:
            names += " or another"
        raise JobError(
            f"{self._key}: the loss of micro-batch {number} is {found:.6g}, and {expected:.6g} "
            f"after the forward of the one before has ended: a forward leaves {names} behind, "
            "which the next one reads in front of the part that changes it, and here all of them "
            f"begin before the first one ends: change it where it is read, or {self._instead}"
        )
