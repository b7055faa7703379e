"""The time left of a run: its steps, and evaluations and saves, as long as these last took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zrun.watch.formatting import duration
from zrun.watch.run_state import RunState


@dataclass(frozen=True)
class Remaining:
    """Seconds until the last step is done, evaluated and saved.

    Attributes:
        is_least: an evaluation or a save is to come, and none has been timed yet.
    """

    seconds: float
    is_least: bool = False

    def __str__(self) -> str:
        if self.is_least:
            return f">{duration(self.seconds)}"
        return duration(self.seconds)


def remaining(state: RunState) -> Remaining | None:
    """Return how long the run goes on; None where its end is not known, or no step was timed."""
    if state.start is None or state.total_steps is None or state.step_s is None:
        return None
    begun = (state.resumed or {}).get("step") or 0
    last = {"eval": begun, "save": state.saved or begun}
    if state.evals:
        last["eval"] = state.evals[-1].step
    seconds = max(0, state.total_steps - state.step.step) * state.step_s
    is_least = False
    for kind, pause in (state.start.get("pauses") or {}).items():
        num_to_come = _num_to_come(pause, last.get(kind, begun), state.total_steps, seconds)
        is_least |= num_to_come > 0 and kind not in state.pause_s
        seconds += num_to_come * state.pause_s.get(kind, 0.0)
    return Remaining(seconds, is_least)


def _num_to_come(pause: Mapping[str, Any], last: int, total: int, seconds: float) -> int:
    """Return how many pauses of a kind are still to come.

    `pause` has `every` so many steps, and so many `minutes`, and `at_end`, as far as the job says.
    There was one after the step `last`; without more of them the run goes on for `seconds`.
    """
    every = pause.get("every")
    minutes = pause.get("minutes")
    count = 0
    if every:
        count += total // every - last // every
    if minutes:
        count += int(seconds / (60 * minutes))
    is_due_at_end = every and total % every == 0
    if pause.get("at_end") and last < total and not is_due_at_end:
        count += 1
    return count
