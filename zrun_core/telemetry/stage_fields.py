"""Fields by which the events of a pipeline tell of its stages: their parts, times and waits."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from zrun_core.hardware.clock import Mark, Waits, seconds_between
from zrun_core.pipeline.actions import Action, max_in_flight

_DIGITS = 6  # of seconds


class ActionMarks(NamedTuple):
    """Where an action began and ended in the work of its device.

    Attributes:
        waits: for what other stages send.
    """

    action: Action
    begin: Mark
    end: Mark
    waits: Waits


class ActionTime(NamedTuple):
    """Times of an action.

    Attributes:
        begin, end: seconds of the device since the step's first action.
        waited: of these, for what other stages send.
    """

    action: Action
    begin: float
    end: float
    waited: float


def action_times(actions: Sequence[ActionMarks]) -> list[ActionTime]:
    """Return the times of the actions of a step, which the device has made."""
    return [
        ActionTime(
            action,
            seconds_between(actions[0].begin, begin),
            seconds_between(actions[0].begin, end),
            waits.seconds(),
        )
        for action, begin, end, waits in actions
    ]


class StageFacts(NamedTuple):
    """A stage of a pipeline.

    Attributes:
        stage: its number.
        stages: of the pipeline.
        virtual: chunks that it has.
        blocks: that it has, by name.
        model_params: of the whole model, each tied one once.
        model_trainable: of these, those that are trained.
    """

    stage: int
    stages: int
    virtual: int
    blocks: tuple[str, ...]
    model_params: int
    model_trainable: int


class StageUse(NamedTuple):
    """Times of a stage in a step, or with PipeDream in a window of them.

    Attributes:
        span_s: seconds from its first action to its last.
        waited_s: of these, for other stages.
        in_flight: micro-batches between forward and backward, at most.
    """

    span_s: float
    waited_s: float
    in_flight: int

    @classmethod
    def of(cls, times: Sequence[ActionTime]) -> StageUse:
        """Sum up the actions of a step."""
        waited = sum(time.waited for time in times)
        return cls(times[-1].end, waited, max_in_flight(time.action for time in times))


def use_fields(stage: int, uses: Sequence[StageUse]) -> dict[str, Any]:
    """Return the field `pipeline` of an event, of one step or of the mean of several."""
    return {
        "stage": stage,
        "span_s": fmean(use.span_s for use in uses),
        "waited_s": fmean(use.waited_s for use in uses),
        "in_flight": max(use.in_flight for use in uses),
    }


def action_fields(times: Sequence[ActionTime]) -> list[list[Any]]:
    """Return recorded actions for an event: kind, chunk, micro-batch, begin, end, waited."""
    return [
        [kind.value, chunk, micro, *(round(each, _DIGITS) for each in seconds)]
        for (kind, chunk, micro), *seconds in times
    ]
