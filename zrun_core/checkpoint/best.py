"""The best value of a metric so far: `checkpoint.best` keeps it, `eval.stop` waits for it.

All ranks see the same numbers of an evaluation, so that all judge alike without a message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, Literal

from zrun_core.checkpoint.manifest_fields import Count, Number, Text, exact_keys
from zrun_core.errors import JobError
from zrun_core.spine.sections.evaluation import EarlyStopConfig, Goal

Mode = Literal["min", "max"]


@exact_keys
@dataclass(frozen=True)
class Best:
    """The best evaluation so far.

    Attributes:
        step: optimizer steps made before it.
        mode: whether lower or higher values are better.
    """

    step: Count
    metric: Text
    mode: Mode
    value: Number

    def is_of(self, goal: Goal) -> bool:
        """Return whether `goal` asks for the same metric in the same direction."""
        return (self.metric, self.mode) == (goal.metric, goal.mode)


def is_better(value: float, best: Best | None, mode: Mode, min_delta: float = 0.0) -> bool:
    """Return whether `value` improves on `best` by more than `min_delta`; nan and inf never do."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    if mode == "min":
        return value < best.value - min_delta
    return value > best.value + min_delta


def value_of(key: str, metric: str, values: Mapping[str, float]) -> float:
    """Return the value of `metric` in an evaluation; `key` is where the job names it.

    Raises:
        JobError: nothing of this name was evaluated.
    """
    if metric not in values:
        near = get_close_matches(metric, values, 1)
        advice = f"did you mean {near[0]}?" if near else "name one of these"
        known = ", ".join(values)
        raise JobError(f"{key}: the evaluation has no {metric}, but {known}: {advice}")
    return values[metric]


class EarlyStop:
    """Counts the evaluations in a row that brought nothing better."""

    def __init__(self, config: EarlyStopConfig) -> None:
        self._config = config
        self._best: Best | None = None
        self._num_worse = 0

    def see(self, step: int, values: Mapping[str, float]) -> str | None:
        """Take in an evaluation.

        Returns:
            Why the run ends; None: it goes on.

        Raises:
            JobError: the metric is not among `values`.
        """
        config = self._config
        value = value_of("eval.stop.metric", config.metric, values)
        if is_better(value, self._best, config.mode, config.min_delta):
            self._best = Best(step, config.metric, config.mode, value)
            self._num_worse = 0
            return None
        self._num_worse += 1
        if self._num_worse < config.patience:
            return None
        known = "it was never a finite number"
        if self._best is not None:
            known = f"the best was {self._best.value:.6g} at step {self._best.step}"
        times = "evaluation" if self._num_worse == 1 else f"{self._num_worse} evaluations"
        return f"{config.metric} did not improve in the last {times}; {known}"

    def to_json(self) -> dict[str, Any]:
        """Return what `resume` takes."""
        best = None if self._best is None else asdict(self._best)
        return {"best": best, "num_worse": self._num_worse}

    def resume(self, found: Mapping[str, Any], *, had_ended: bool) -> bool:
        """Go on from what `to_json` returned; return whether it was of the same metric.

        Args:
            had_ended: the run had ended early: it has its patience anew.
        """
        best = None if found["best"] is None else Best(**found["best"])
        if best is not None and not best.is_of(self._config):
            return False
        self._best = best
        self._num_worse = 0 if had_ended else found["num_worse"]
        return True
