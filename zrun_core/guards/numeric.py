"""Steps whose numbers are not finite: told with the parameter's name, and when there are too many, the run's end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from zrun_core.spine.config import JobConfig
from zrun_core.spine.events import Emitter
from zrun_core.telemetry.recorder import Progress, StepTotals
from zrun_core.zero.nonfinite import Culprit


class Inspected(Protocol):
    """What looking for names needs of `ShardedModel`."""

    def inspect_gradients(self, wanted: bool) -> None: ...
    def find_nonfinite(self, losses: Sequence[float], is_late: bool = False) -> Culprit | None: ...


# Says what a rank read in the step, or in one of its micro-batches.
SamplesOf = Callable[[int, int | None], str]


class NumericGuard:
    """Follows the skips of a run. Every rank sees the same numbers, so that all judge alike.

    Attributes:
        is_close: the next skip may end the run: its step is to be seen before the one after it begins.
    """

    def __init__(
        self, job: JobConfig, sharded: Inspected, emitter: Emitter, *, is_main: bool
    ) -> None:
        self._config = job.guards
        self._sharded, self._emitter, self._is_main = sharded, emitter, is_main
        self._is_scaled = job.precision.compute == "fp16"
        self._least_scale = job.precision.loss_scale.min
        self._has_told_overflow = False
        self._is_clipped = job.optim.clip is not None
        self.is_close = False
        self._look_closely(Progress())

    def see(
        self,
        progress: Progress,
        step: int,
        numbers: StepTotals,
        losses: Sequence[float],
        samples_of: SamplesOf,
        *,
        is_late: bool = False,
    ) -> str | None:
        """Take in one step. Collective where it was skipped because of its numbers.

        Args:
            progress: counts the skips in a row.
            losses: of this rank's micro-batches.
            samples_of: says in words which samples were read.
            is_late: the next step's gradient is there already.

        Returns:
            Why the run must stop, or None.
        """
        if not numbers.skipped:
            progress.skips_in_a_row = progress.unrecoverable_skips = 0
            self._look_closely(progress)
            return None
        if numbers.dropped or not numbers.weight:  # for want of memory, or of samples
            return None
        can_scale_help = (
            self._is_scaled and math.isfinite(numbers.loss) and numbers.scale > self._least_scale
        )
        progress.skips_in_a_row += 1
        progress.unrecoverable_skips = 0 if can_scale_help else progress.unrecoverable_skips + 1
        must_stop = (
            progress.skips_in_a_row >= self._config.max_skips
            or progress.unrecoverable_skips >= self._config.max_nonfinite
        )
        if must_stop or progress.unrecoverable_skips or not self._has_told_overflow:
            culprit = self._sharded.find_nonfinite(losses, is_late=is_late)
            what = str(culprit or "the gradient was not finite")
            if culprit is not None and culprit.rank is not None:
                what += f" ({samples_of(culprit.rank, culprit.micro)})"
            self._has_told_overflow = True
            if must_stop:
                would_clip = not self._is_clipped and (culprit is None or culprit.size is None)
                return self._why(progress, step, numbers.scale, what, would_clip)
            if self._is_main:
                self._emitter.emit(
                    "warning", message=f"step {step} was skipped on all ranks: {what}"
                )
        self._look_closely(progress)
        return None

    def _look_closely(self, progress: Progress) -> None:
        """Where the next skip may end the run, each rank looks at its own gradient: whose is it?"""
        is_near = (
            progress.unrecoverable_skips > 0
            or progress.skips_in_a_row + 2 >= self._config.max_skips
        )
        self.is_close = is_near or self._config.max_nonfinite == 1
        self._sharded.inspect_gradients(self.is_close)

    def _why(self, progress: Progress, step: int, scale: float, what: str, would_clip: bool) -> str:
        many = f"{progress.skips_in_a_row} steps in a row were skipped"
        text = f"step {step}: {many if progress.skips_in_a_row > 1 else 'it was skipped'}: {what}"
        if not progress.unrecoverable_skips:
            return f"{text}, down to a loss scale of {scale:g}; write precision: bf16, or lower optim.lr"
        return f"{text}; lower optim.lr, {'set optim.clip, ' * would_clip}or look at the samples of this step"
