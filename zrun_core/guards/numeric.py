"""Steps skipped for numbers that are not finite: how many in a row, because of which parameter.

A job (`NumericGuard`) and a loop of the user's own (`library/skips.py`) count and inspect with one
`SkipWatch`. What they tell, and in which words, is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from zrun_core.spine.config import JobConfig
from zrun_core.spine.events import Emitter
from zrun_core.telemetry.progress import Progress
from zrun_core.telemetry.step_totals import StepTotals
from zrun_core.zero.reduce.nonfinite import Culprit


class Inspected(Protocol):
    """The part of `ShardedModel` that names what is not finite."""

    def inspect_gradients(self, wanted: bool) -> None: ...
    def find_nonfinite(
        self, losses: Sequence[float] = (), is_late: bool = False
    ) -> Culprit | None: ...


class SkipCounts(Protocol):
    """The counters of skips in a row; `Progress` has them for a job."""

    skips_in_a_row: int
    unrecoverable_skips: int


# Returns which samples a rank read in the step, or in one of its micro-batches.
SamplesOf = Callable[[int, int | None], str]


class SkipWatch:
    """Counts skips in a row, and inspects gradients while the next skip may end the loop.

    After any skip the sums over ranks name the parameter, but not the rank that spoiled them. That
    takes a look at each rank's own gradient before it is summed: one more pass over all of it,
    which is made only while `is_close`.

    Every rank sees the same totals, so all of them count alike and agree without a message.

    Attributes:
        is_close: the next skip may end the loop, so its step must be read before the next begins.
    """

    def __init__(
        self, sharded: Inspected, max_skips: int | None, max_unrecoverable: int | None
    ) -> None:
        """
        Args:
            max_skips: skips in a row, of any kind, that end the loop; None: any number is allowed.
            max_unrecoverable: as `max_skips`, of those that no smaller loss scale can help.
        """
        self._sharded = sharded
        self._max_skips = max_skips
        self._max_unrecoverable = max_unrecoverable
        self.is_close = False
        self.look_closely(Progress())

    def count(self, counts: SkipCounts, totals: StepTotals, least_scale: float | None) -> None:
        """Add a step that was skipped because of its numbers.

        Args:
            least_scale: the loss scale never falls below this; None if the loss is not scaled.
        """
        # An overflow of fp16 may be cured by a smaller scale, unless the loss itself overflowed.
        is_recoverable = (
            least_scale is not None and math.isfinite(totals.loss) and totals.scale > least_scale
        )
        counts.skips_in_a_row += 1
        if is_recoverable:
            counts.unrecoverable_skips = 0
        else:
            counts.unrecoverable_skips += 1

    def reset(self, counts: SkipCounts) -> None:
        """Begin anew: the step was not skipped."""
        counts.skips_in_a_row = 0
        counts.unrecoverable_skips = 0

    def must_stop(self, counts: SkipCounts) -> bool:
        """Return whether there are too many skips in a row."""
        if self._max_skips is not None and counts.skips_in_a_row >= self._max_skips:
            return True
        limit = self._max_unrecoverable
        return limit is not None and counts.unrecoverable_skips >= limit

    def look_closely(self, counts: SkipCounts) -> None:
        """Inspect each rank's own gradient from now on if the next skip may end the loop."""
        # Two skips before the limit: gradients of the last one before it are inspected then.
        limit = self._max_skips
        is_near_limit = limit is not None and counts.skips_in_a_row + 2 >= limit
        ends_at_once = self._max_unrecoverable == 1
        self.is_close = is_near_limit or ends_at_once or counts.unrecoverable_skips > 0
        self._sharded.inspect_gradients(self.is_close)


class NumericGuard:
    """Follows the skips of a job: warns of them, and says when there are too many.

    Attributes:
        is_close: as `SkipWatch.is_close`.
    """

    def __init__(
        self, job: JobConfig, sharded: Inspected, emitter: Emitter, *, is_main: bool
    ) -> None:
        self._sharded = sharded
        self._emitter = emitter
        self._is_main = is_main
        self._is_clipped = job.optim.clip is not None
        self._least_scale: float | None = None
        if job.precision.compute == "fp16":
            self._least_scale = job.precision.loss_scale.min
        self._has_told_overflow = False
        self._skips = SkipWatch(sharded, job.guards.max_skips, job.guards.max_nonfinite)

    @property
    def is_close(self) -> bool:
        return self._skips.is_close

    def see(
        self,
        progress: Progress,
        step: int,
        totals: StepTotals,
        losses_of: Callable[[], Sequence[float]],
        samples_of: SamplesOf,
        *,
        is_late: bool = False,
    ) -> str | None:
        """Follow one step. Collective where it was skipped because of its numbers.

        Args:
            totals: of the step, over all ranks.
            losses_of: returns those of this rank's micro-batches, for which the host waits.
            is_late: the next step's gradient is there already, so only the unit can be named.

        Returns:
            Why the run must stop, or None.
        """
        if not totals.skipped:
            self._skips.reset(progress)
            self._skips.look_closely(progress)
            return None
        if totals.dropped or not totals.weight:  # it lacked memory or samples: no fault of numbers
            return None
        self._skips.count(progress, totals, self._least_scale)
        must_stop = self._skips.must_stop(progress)
        # An overflow that a smaller scale may cure is told once: fp16 begins with a few of them.
        if must_stop or progress.unrecoverable_skips or not self._has_told_overflow:
            self._has_told_overflow = True
            culprit = self._sharded.find_nonfinite(losses_of(), is_late=is_late)
            cause = _describe(culprit, samples_of)
            if must_stop:
                return self._why_stop(progress, step, totals.scale, cause, culprit)
            if self._is_main:
                message = f"step {step} was skipped on all ranks: {cause}"
                self._emitter.emit("warning", message=message)
        self._skips.look_closely(progress)
        return None

    def _why_stop(
        self, progress: Progress, step: int, scale: float, cause: str, culprit: Culprit | None
    ) -> str:
        many = "it was skipped"
        if progress.skips_in_a_row > 1:
            many = f"{progress.skips_in_a_row} steps in a row were skipped"
        text = f"step {step}: {many}: {cause}"
        if not progress.unrecoverable_skips:
            return (
                f"{text}, down to a loss scale of {scale:g}; "
                "write precision: bf16, or lower optim.lr"
            )
        # Clipping cannot help where every gradient is finite and only their norm overflows.
        norm_overflows = culprit is not None and culprit.size is not None
        if self._is_clipped or norm_overflows:
            return f"{text}; lower optim.lr, or look at the samples of this step"
        return f"{text}; lower optim.lr, set optim.clip, or look at the samples of this step"


def _describe(culprit: Culprit | None, samples_of: SamplesOf) -> str:
    """Return what was not finite, with the samples of the rank where that is known."""
    if culprit is None:
        return "the gradient was not finite"
    if culprit.rank is None:
        return str(culprit)
    return f"{culprit} ({samples_of(culprit.rank, culprit.micro)})"
