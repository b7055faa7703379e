"""Totals of one optimizer step over all ranks, as they arrive on the host."""

from __future__ import annotations

from typing import NamedTuple

from zrun_core.checkpoint.checkpointer import SaveConsensus


class StepTotals(NamedTuple):
    """Totals of a step. The fields with a default are sums that only some loops send.

    Attributes:
        weight: of the samples, as the loss counts them; 0 if no rank had any.
        grad_norm: global 2-norm before clipping; not finite after an overflow.
        skipped: 1 if all ranks skipped the update.
        agreed: 1 if ranks that train the same parameters gathered the same modules.
        scale: loss scale of this step.
        loss: summed, not divided by `weight`.
        stop: ranks that a signal asked to stop.
        end: ranks of which a hook asked for the end.
        profile: 1 if `zrun profile` has asked rank 0.
        dropped: micro-batches that did not fit in a rank's memory.
        apart: 0 if ranks that share layers have computed the same losses: `LossGuard`.
        batches: 0 if ranks that compute the same samples have read the same: `BatchGuard`.
        written, settled, due, asked: those of `SaveConsensus`.
    """

    weight: float
    grad_norm: float
    skipped: float
    agreed: float
    scale: float
    loss: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0
    stop: float = 0.0
    end: float = 0.0
    profile: float = 0.0
    dropped: float = 0.0
    apart: float = 0.0
    batches: float = 0.0
    written: float = 0.0
    settled: float = 0.0
    due: float = 0.0
    asked: float = 0.0

    @property
    def consensus(self) -> SaveConsensus:
        """The sums that concern a save under way."""
        return SaveConsensus(self.written, self.settled, self.due, self.asked)
