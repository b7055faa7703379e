"""What a launch has measured, from its events, one after the other: times, and its fullest rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from zrun_core.spine.events import Event

WARM_STEPS = 2  # whose times do not count: the first warms up, the second one's memory is measured
_BYTES = ("peak_bytes", "reserved_bytes", "process_bytes")


@dataclass
class MeasuredLaunch:
    """Times and memory of a launch so far.

    Attributes:
        start: its event.
        steps_s: seconds of each step.
    """

    start: Event = field(default_factory=dict)
    steps_s: list[float] = field(default_factory=list)
    _most: dict[str, int] = field(default_factory=dict)

    @property
    def timed(self) -> list[float]:
        """Seconds of the steps that are timed."""
        return self.steps_s[WARM_STEPS:]

    def most(self, name: str) -> int:
        """Return the most bytes that any rank has told of, 0 if none has.

        Args:
            name: `peak_bytes`, `reserved_bytes` or `process_bytes`.
        """
        return self._most.get(name, 0)

    def take(self, event: Event) -> None:
        """Take in an event."""
        match event.get("type"):
            case "step":
                self.steps_s.append(float(event["step_s"]))
            case "peak" | "memory":
                self._take_bytes(event)
            case "ranks":
                self._take_bytes(event["most"])

    def _take_bytes(self, told: Event) -> None:
        for name in _BYTES:
            self._most[name] = max(self.most(name), told.get(name) or 0)


def measured_of(events: Iterable[Event]) -> MeasuredLaunch | None:
    """Return what the newest launch of a record has measured; None: none began to train."""
    found = None
    for event in events:
        if event.get("type") == "start":
            found = MeasuredLaunch(event)
        elif found is not None:
            found.take(event)
    return found
