"""Which evaluation is the best, and when none has been better for too long."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from zrun_core.checkpoint.best import Best, EarlyStop, is_better, value_of
from zrun_core.errors import JobError
from zrun_core.spine.sections.evaluation import EarlyStopConfig


def best(value: float, mode: Any = "min") -> Best:
    return Best(1, "loss", mode, value)


@pytest.mark.parametrize(
    ("value", "before", "min_delta", "better"),
    [
        (1.0, None, 0.0, True),
        (math.nan, None, 0.0, False),
        (-math.inf, best(1.0), 0.0, False),
        (1.0, best(1.0), 0.0, False),
        (0.9, best(1.0), 0.0, True),
        (0.9, best(1.0), 0.2, False),
        (0.7, best(1.0), 0.2, True),
        (1.1, best(1.0, "max"), 0.0, True),
        (1.1, best(1.0, "max"), 0.2, False),
        (0.9, best(1.0, "max"), 0.0, False),
    ],
)
def test_better_is_by_more_than_the_least_difference(
    value: float, before: Best | None, min_delta: float, better: bool
) -> None:
    mode = "min" if before is None else before.mode
    assert is_better(value, before, mode, min_delta) is better


def seen(stop: EarlyStop, *losses: float, first: int = 1) -> list[str | None]:
    return [stop.see(step, {"loss": loss}) for step, loss in enumerate(losses, start=first)]


def test_patience_counts_evaluations_in_a_row() -> None:
    stop = EarlyStop(EarlyStopConfig(patience=2))
    assert seen(stop, 3.0, 4.0, 2.5, 2.5) == [None] * 4
    assert seen(stop, math.nan, first=5) == [
        "loss did not improve in the last 2 evaluations; the best was 2.5 at step 3"
    ]
    assert seen(EarlyStop(EarlyStopConfig(patience=1)), math.nan) == [
        "loss did not improve in the last evaluation; it was never a finite number"
    ]


@pytest.mark.parametrize("cut", range(5))
def test_patience_goes_on_where_it_was(cut: int) -> None:
    losses = (3.0, 2.0, 2.5, 1.9, 2.0, 2.1)
    config = EarlyStopConfig(patience=2)
    whole = seen(EarlyStop(config), *losses)
    begun, rest = EarlyStop(config), EarlyStop(config)
    told = seen(begun, *losses[:cut])
    assert rest.resume(json.loads(json.dumps(begun.to_json())), had_ended=False)
    assert told + seen(rest, *losses[cut:], first=cut + 1) == whole
    assert whole[-1] is not None


def test_after_an_early_end_patience_is_new_and_the_best_is_not() -> None:
    stop = EarlyStop(EarlyStopConfig(patience=2))
    seen(stop, 1.0, 2.0, 2.0)
    rest = EarlyStop(EarlyStopConfig(patience=2))
    assert rest.resume(stop.to_json(), had_ended=True)
    assert [bool(why) for why in seen(rest, 1.5, 1.5)] == [False, True]
    other = EarlyStop(EarlyStopConfig(metric="accuracy"))
    assert not other.resume(stop.to_json(), had_ended=False)


def test_a_metric_that_was_not_evaluated_is_named_with_those_that_were() -> None:
    assert value_of("eval.stop.metric", "f1", {"loss": 2.0, "f1": 0.5}) == 0.5
    with pytest.raises(JobError) as caught:
        value_of("checkpoint.best.metric", "acuracy", {"loss": 2.0, "accuracy": 0.5})
    assert str(caught.value) == (
        "checkpoint.best.metric: the evaluation has no acuracy, but loss, accuracy: "
        "did you mean accuracy?"
    )
