"""Skipped steps in a loop of the user's own: warnings that name the parameter, then an error."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from zrun_core.errors import NumericError
from zrun_core.guards.numeric import SkipWatch
from zrun_core.telemetry.step_totals import StepTotals
from zrun_core.zero.sharded_model import ShardedModel

# Skips in a row that are explained. At the first one only the sums over ranks are known, which name
# the parameter; at the second each rank has looked at its own gradient, which names the rank.
_EXPLAINED = 2


@dataclass
class _Counts:
    """Skips in a row, as in `Progress`."""

    skips_in_a_row: int = 0
    unrecoverable_skips: int = 0


class LoopSkips:
    """Follows the skips of one optimizer.

    Attributes:
        is_close: as `SkipWatch.is_close`.
    """

    def __init__(self, sharded: ShardedModel, max_skips: int | None, *, is_main: bool) -> None:
        """
        Args:
            max_skips: skips in a row that are too many; None: any number is allowed.
            is_main: whether this rank warns.
        """
        self._sharded = sharded
        self._is_main = is_main
        self._counts = _Counts()
        self._watch = SkipWatch(sharded, max_skips, None)

    @property
    def is_close(self) -> bool:
        return self._watch.is_close

    def see(self, totals: StepTotals, least_scale: float | None, *, is_late: bool) -> None:
        """Follow one step. Collective where it was skipped.

        Args:
            totals: of the step, over all ranks.
            least_scale: the loss scale never falls below this; None if the loss was not scaled.
            is_late: the next step's gradient is there already, so only the unit can be named.

        Raises:
            NumericError: too many steps in a row were skipped.
        """
        counts = self._counts
        if not totals.skipped:
            self._watch.reset(counts)
        elif totals.weight == 0:  # it counts, as this loop may never end; numbers are not at fault
            counts.skips_in_a_row += 1
            counts.unrecoverable_skips = 0
        else:
            self._watch.count(counts, totals, least_scale)
        if self._watch.must_stop(counts):
            many = counts.skips_in_a_row
            counts.skips_in_a_row = 0  # a loop that catches the error has as many again
            raise NumericError(
                f"step(): {many} skipped in a row: {self._explain(totals.weight, is_late)}; "
                "look at the samples, or go back to the last checkpoint with a lower lr, "
                "with clip=..., or with bf16 where it was fp16"
            )
        if 0 < counts.unrecoverable_skips <= _EXPLAINED:
            cause = self._explain(totals.weight, is_late)
            if self._is_main:
                warnings.warn(f"step(): skipped on all ranks: {cause}", stacklevel=2)
        self._watch.look_closely(counts)

    def _explain(self, weight: float, is_late: bool) -> str:
        if weight == 0:
            return "the weights of all ranks are 0"
        culprit = self._sharded.find_nonfinite(is_late=is_late)  # this loop's losses are not known
        if culprit is not None:
            return str(culprit)
        if not math.isfinite(weight):
            return "a weight is not finite"
        return "the gradient was not finite"
