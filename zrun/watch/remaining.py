"""How long a run goes on: its steps, and the evaluations and saves between them, as long as they last took."""

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
        return f"{'>' if self.is_least else ''}{duration(self.seconds)}"


def remaining(state: RunState) -> Remaining | None:
    """Return how long the run goes on; None where its end is not known, or no step was timed."""
    if state.start is None or state.total_steps is None or state.step_s is None:
        return None
    begun = (state.resumed or {}).get("step") or 0
    last = {"eval": state.evals[-1].step if state.evals else begun, "save": state.saved or begun}
    seconds, is_least = max(0, state.total_steps - state.step.step) * state.step_s, False
    for kind, pause in (state.start.get("pauses") or {}).items():
        num_to_come = _num_to_come(pause, last.get(kind, begun), state.total_steps, seconds)
        is_least |= num_to_come > 0 and kind not in state.pause_s
        seconds += num_to_come * state.pause_s.get(kind, 0.0)
    return Remaining(seconds, is_least)


def _num_to_come(pause: Mapping[str, Any], last: int, total: int, seconds: float) -> int:
    """Return how many pauses of a kind are still to come.

    Args:
        pause: `every` so many steps, and so many `minutes`, and `at_end`, as far as the job says.
        last: the step after which there was one.
        total: steps of the run.
        seconds: that it goes on without them.
    """
    every, minutes = pause.get("every"), pause.get("minutes")
    count = total // every - last // every if every else 0
    if minutes:
        count += int(seconds / (60 * minutes))
    comes_last = pause.get("at_end") and last < total and (not every or total % every)
    return count + 1 if comes_last else count
