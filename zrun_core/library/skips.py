"""Skipped steps in a user's own loop: whose gradient it was, and when there are too many in a row."""

from __future__ import annotations

import math
import warnings

from zrun_core.errors import NumericError
from zrun_core.zero.sharded_model import ShardedModel

_NAMED = 2  # skips in a row that are told: the sums name the parameter at once, each rank's own gradient only then


class Skips:
    """Follows the skips of one optimizer. Every rank sees the same numbers, so that all judge alike."""

    def __init__(self, sharded: ShardedModel, limit: int | None, *, is_main: bool) -> None:
        """`limit` is how many in a row are too many; None: never."""
        self._sharded, self._limit, self._is_main = sharded, limit, is_main
        self._in_a_row = self._num_helpless = 0
        self._inspect(helpless=False)

    def see(self, *, skipped: bool, weight: float, helpless: bool) -> None:
        """Take in one step, whose gradients are still there. Collective where it was skipped.

        Args:
            skipped: on all ranks.
            weight: sum over all ranks.
            helpless: no loss scale can help.

        Raises:
            NumericError: too many steps in a row were skipped.
        """
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        self._num_helpless = self._num_helpless + 1 if skipped and helpless and weight else 0
        if self._limit is not None and self._in_a_row >= self._limit:
            many, self._in_a_row = self._in_a_row, 0
            raise NumericError(
                f"step(): {many} skipped in a row: {self._why(weight)}; look at the samples, or go back to the last "
                "checkpoint with a lower lr, with clip=..., or with bf16 where it was fp16"
            )
        if 0 < self._num_helpless <= _NAMED:
            why = self._why(weight)
            if self._is_main:
                warnings.warn(f"step(): skipped on all ranks: {why}", stacklevel=2)
        self._inspect(helpless=self._num_helpless > 0)

    def _why(self, weight: float) -> str:
        if weight == 0:
            return "the weights of all ranks are 0"
        culprit = self._sharded.find_nonfinite()  # of losses nothing is known here
        return f"{culprit or ('the gradient was not finite' if math.isfinite(weight) else 'a weight is not finite')}"

    def _inspect(self, *, helpless: bool) -> None:
        """Look more closely at what may end the loop soon: whose gradient is it?"""
        is_near = self._limit is not None and self._in_a_row + _NAMED >= self._limit
        self._sharded.inspect_gradients(helpless or is_near)
