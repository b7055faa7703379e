"""The stages of a pipeline in words: what each has, does and waits for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from zrun.watch import formatting
from zrun.watch.rank_digest import stages_of
from zrun.watch.run_state import RunState
from zrun.watch.stragglers import tolerance
from zrun_core.sizes import several
from zrun_core.spine.events import Event

if TYPE_CHECKING:
    from zrun_core.pipeline.actions import Action


class Box(NamedTuple):
    """A recorded action, without what it waited for others at its beginning."""

    action: Action
    begin: float
    end: float
    waited: float


def stage_rows(state: RunState) -> list[tuple[str, str]]:
    """Return a row for each stage, and one for how long all of them wait, as names and texts."""
    if not state.stages:
        return []
    told = _told_by_stage(state)
    busy, span = _busy(told)
    rows = []
    for number, stage in sorted(state.stages.items()):
        words = [_blocks(stage), f"{formatting.count(stage['params'])} parameters"]
        if number in busy:
            words.append(f"busy {busy[number] / span:.0%}")
        in_flight = told.get(number, {}).get("in_flight")
        if in_flight is not None:
            words.append(f"{in_flight} in flight")
        rows.append((f"stage {number}", ", ".join(words)))
    rows.append(("bubble", _bubble(state)))
    rows.append(("slow stage", _slow(busy, span)))
    return [(name, text) for name, text in rows if text]


def _told_by_stage(state: RunState) -> dict[int, Mapping[str, Any]]:
    """Return by stage how its ranks have lately spent a step, as of a `ranks` event."""
    return {each["stage"]: each for each in stages_of(state) if each["stage"] in state.stages}


def _busy(told: Mapping[int, Mapping[str, Any]]) -> tuple[dict[int, float], float]:
    """Return by stage the seconds of a step in which it did not wait for others; and of all."""
    spans = [use["span_s"] for use in told.values() if use["span_s"] is not None]
    span = max(spans, default=0.0)
    if not span:
        return {}, span
    busy = {stage: use["busy_s"] for stage, use in told.items() if use["busy_s"] is not None}
    return busy, span


def _blocks(stage: Event) -> str:
    blocks = stage["blocks"]
    if not blocks:
        return "no block"
    names = str(blocks[0])
    if len(blocks) > 1:
        names += f" to {blocks[-1]}"
    return f"{several(len(blocks), 'block')} ({names})"


def _slow(busy: Mapping[int, float], span: float) -> str:
    """Name the stage that computes much longer than the mean.

    `busy` has the seconds of each stage; `span` is the seconds of a step.
    """
    if not busy:
        return ""
    slowest = max(busy, key=lambda stage: busy[stage])
    mean = fmean(busy.values())
    if busy[slowest] <= mean + tolerance(mean, span):
        return ""
    longer = busy[slowest] / mean - 1
    return (
        f"stage {slowest} computes {longer:.0%} longer than the mean, and the others wait for it: "
        "move the borders with parallel.split"
    )


def _bubble(state: RunState) -> str:
    """Return how long stages waited in the recorded step, beside what its times would need."""
    from zrun_core.pipeline.grid import bubble

    rows = recorded(state)
    if not rows:
        return ""
    boxes = [box for row in rows for box in row]
    computing = sum(box.end - box.begin for box in boxes)
    idle = 1 - computing / (len(rows) * max(box.end for box in boxes))
    step = state.schedules[0]["step"]
    text = f"stages were idle for {idle:.0%} of step {step}"
    replayed = _replayed(rows)
    if replayed is None:
        return text
    stage = state.stages[0]
    micro_batches = 1 + max(box.action.micro for box in boxes)
    equal = bubble(stage["schedule"], len(rows), stage["virtual"], micro_batches)
    by_lists = 1 - computing / (len(rows) * replayed)
    return f"{text} (replayed {by_lists:.0%}, with equal stages {equal:.0%})"


def recorded(state: RunState) -> list[list[Box]]:
    """Return the actions of one step by stage; nothing unless all stages have told of it."""
    schedules = [state.schedules.get(stage) for stage in range(len(state.stages))]
    steps = {None if event is None else event["step"] for event in schedules}
    if len(steps) != 1 or None in steps:
        return []
    return [_boxes(event) for event in schedules if event is not None]


def _boxes(event: Event) -> list[Box]:
    from zrun_core.pipeline.actions import Action, ActionKind

    return [
        Box(Action(ActionKind(kind), chunk, micro), begin + waited, end, waited)
        for kind, chunk, micro, begin, end, waited in event["actions"]
    ]


def _replayed(rows: list[list[Box]]) -> float | None:
    """Return the seconds of a step whose messages take no time; None: it cannot be replayed."""
    from zrun_core.pipeline.actions import ends_of

    seconds = {box.action: box.end - box.begin for row in rows for box in row}
    with suppress(ValueError):
        return max(ends_of([[box.action for box in row] for row in rows], seconds).values())
    return None
