"""What has happened to a run beside its steps: starts, saves, warnings. In constant memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from zrun.watch.plain import message_line
from zrun_core.spine.events import Event

_MOST = 100  # of each kind of event that are kept, the newest


@dataclass
class Stretch:
    """Steps that one launch has made.

    Attributes:
        offset: of its `start` in the record, in bytes.
        time: of its `start`, by the clock of rank 0, in unix seconds.
        after: the step that it went on from.
        step: the newest one.
        versions: of zrun, torch and python, as it told them.
        end: its event; None: it did not reach its end.
    """

    offset: int
    time: float
    after: int
    step: int
    versions: dict[str, Any]
    end: Event | None = None


@dataclass
class History:
    """What is kept of a record beside its numbers.

    Attributes:
        stretches: the newest ones.
        saves: `save` events, the newest ones.
        notices: the newest warnings and requests to stop, as (step then, event, text).
        num_stretches, num_saves, num_notices: how many there were of each.
        peaks: `peak` events by rank.
    """

    stretches: deque[Stretch] = field(default_factory=lambda: deque(maxlen=_MOST))
    saves: deque[Event] = field(default_factory=lambda: deque(maxlen=_MOST))
    notices: deque[tuple[int, Event, str]] = field(default_factory=lambda: deque(maxlen=_MOST))
    num_stretches: int = 0
    num_saves: int = 0
    num_notices: int = 0
    peaks: dict[int, Event] = field(default_factory=dict)
    _step: int = 0

    def take(self, event: Event, offset: int) -> None:
        """Take in an event of the run.

        Args:
            offset: where it begins in the record, in bytes.
        """
        match event["type"]:
            case "start":
                self._start(event, offset)
            case "step":
                self._step = event["step"]
                if self.stretches:
                    self.stretches[-1].step = self._step
            case "end" if self.stretches:
                self.stretches[-1].end = event
            case "save":
                self.saves.append(event)
                self.num_saves += 1
            case "peak":
                self.peaks[event["rank"]] = event
            case "warning" | "stop":
                text = message_line(event)
                if text:
                    self.notices.append((self._step, event, text))
                    self.num_notices += 1

    def _start(self, event: Event, offset: int) -> None:
        after = (event.get("resumed") or {}).get("step", 0)
        versions = dict(event.get("versions") or {})
        self.stretches.append(Stretch(offset, float(event["time"]), after, after, versions))
        self.num_stretches += 1
        self.peaks = {}
        self._step = after
