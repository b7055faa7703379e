"""A forward of the first micro-batch beside training, which leaves no trace.

Slices add up in another order, which in halves would hide as much as a mistake makes. So where
layers are divided it computes in fp32, with the values that halves have: see `InFp32`. Stages
compute with whole layers, whose bits are the same in any format.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from zrun_core.data.batch import MicroBatch, copied
from zrun_core.distributed.mesh import Mesh
from zrun_core.train.evaluator import evaluation_mode
from zrun_core.train.in_fp32 import InFp32
from zrun_core.user_code.loss import LossFunction, compute_loss
from zrun_core.user_code.trial import kept_attributes
from zrun_core.user_code.user import user_code
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.wrap.fakes import kept_buffers


class TrialForward:
    """Runs it, on the whole model or on what a rank has.

    Attributes:
        which: of the batches it is run with.
        loss: the user's loss function; None: the model returns its loss.
        precision: of training.
        widens: it computes in fp32 where training does not.
    """

    def __init__(
        self,
        batches: Sequence[MicroBatch],
        loss: LossFunction | None,
        precision: Precision,
        mesh: Mesh,
        *,
        is_compiled: bool = False,
    ) -> None:
        """
        Args:
            batches: the first one counts whose forward the whole model computes: few samples of
                this rank's first micro-batch, on its device, and all of it.
        """
        self.batches = batches
        self.which = 0
        self.loss = loss
        self.precision = precision
        self._has_slices = mesh.tensor.size > 1
        self.widens = self._has_slices and precision.compute != torch.float32
        self._is_compiled = is_compiled

    @property
    def batch(self) -> MicroBatch:
        return self.batches[self.which]

    def contexts(self, model: nn.Module) -> list[AbstractContextManager[Any]]:
        """Return what a forward runs in, from the outside in."""
        contexts: list[AbstractContextManager[Any]] = [
            kept_attributes(model, self.loss, self.batch.batch),
            kept_buffers(model),
        ]
        if self._has_slices:
            # Regions draw on each rank for itself, and a model in evaluation seldom draws at all.
            contexts.append(evaluation_mode(model))
        if self._is_compiled:  # for the run's own passes: not for these few
            contexts.append(torch.compiler.set_stance("force_eager"))
        return contexts

    def loss_of(self, model: nn.Module) -> torch.Tensor:
        batch = copied(self.batch.batch)
        in_fp32 = InFp32() if self.widens else nullcontext()
        with torch.no_grad(), user_code("forward failed"), in_fp32:
            loss = compute_loss(model, batch, self.loss, self.batch.num_samples)
        return loss.value.detach()
