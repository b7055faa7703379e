"""What sections resolve their `auto` from, and how they tell of it: `LaunchFacts`, `AutoValue`.

    facts = job.launch_facts("cuda", num_ranks=8)
    batch, reasons = job.batch.resolve(facts)       # in numbers; AutoValue("batch.global", ...)

What takes hosts, an estimate or the model itself is resolved by those who have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AutoValue:
    """A key that the job left open, the value it got, and why."""

    key: str
    value: str
    why: str


@dataclass(frozen=True)
class LaunchFacts:
    """What is known of a launch when the sections of its job are asked.

    Attributes:
        device: that every rank trains on.
        num_ranks: on all hosts.
        model_ranks: that share one copy of the model: tp * pp.
        steps: of the run; None: not known yet.
        epochs: passes over data that nobody has opened yet; None: the job does not count in them.
    """

    device: Literal["cpu", "cuda"]
    num_ranks: int
    model_ranks: int
    steps: int | None
    epochs: int | None

    @property
    def dp(self) -> int:
        """Return the data-parallel ranks, once `parallel` has not refused the number of ranks."""
        return self.num_ranks // self.model_ranks
