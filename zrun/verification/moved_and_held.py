"""What rank 0 of a trial has sent and held, beside what was planned of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zrun.runs.listing import parse_events
from zrun_core.sizes import format_size


@dataclass(frozen=True)
class PlannedBytes:
    """Bytes of one kind.

    Attributes:
        measured: that were sent, or held.
        planned: that the runtime's formulas give; None: there is none for this kind.
    """

    measured: int
    planned: int | None

    @property
    def differs(self) -> bool:
        return self.planned is not None and self.measured != self.planned


@dataclass(frozen=True)
class MovedAndHeld:
    """Bytes of rank 0, over the steps of a trial.

    Attributes:
        sent: to other ranks, by kind of collective.
        held: by parameters, gradients, optimizer, slots and buffers; None: it was not told.
    """

    sent: Mapping[str, PlannedBytes]
    held: PlannedBytes | None

    @property
    def in_words(self) -> Iterator[str]:
        """What differs from the plan, a line each; or the sum of what does not."""
        named = [(f"sent in {kind}", each) for kind, each in self.sent.items()]
        if self.held is not None:
            named.append(("held", self.held))
        differing = [(what, each) for what, each in named if each.differs]
        for what, each in differing:
            planned = format_size(each.planned or 0)
            yield f"rank 0 {what} {format_size(each.measured)}, and {planned} were planned"
        if not differing and self.held is not None:
            sent = format_size(sum(each.measured for each in self.sent.values()))
            held = format_size(self.held.measured)
            yield f"rank 0 sent {sent} and held {held}, to the byte as planned"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def moved_and_held(run_dir: Path) -> MovedAndHeld | None:
    """Return what a trial tells of its bytes at its end; None: it has not come there."""
    with (run_dir / "events.jsonl").open("rb") as lines:
        ends = [event for event in parse_events(lines) if event.get("type") == "end"]
    if not ends:
        return None
    end = ends[-1]
    sent = {
        kind: PlannedBytes(each["measured_bytes"], each.get("expected_bytes"))
        for kind, each in (end.get("traffic") or {}).items()
    }
    memory = end.get("memory") or {}
    held = None
    if "measured_bytes" in memory:
        held = PlannedBytes(memory["measured_bytes"], memory.get("planned_bytes"))
    return MovedAndHeld(sent, held)
