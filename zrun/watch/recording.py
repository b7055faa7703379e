"""The record of a run as it grows: its state at each moment so far, its curves, its messages."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from zrun.system.tail_file import FileTail
from zrun.watch.curves import Curves
from zrun.watch.panel_layout import Facts
from zrun.watch.plain import message_line
from zrun.watch.run_state import RunState, fold
from zrun_core.spine.events import Event

_MOST_MOMENTS = 2000
_MOST_MESSAGES = 2000
_HEAD_BYTES = 1 << 20  # of a record that is too long: it begins with what the run is
_MOST_BYTES = 128 << 20  # of which so much of its end is read


class Message(NamedTuple):
    """A line for a person.

    Attributes:
        time: unix seconds.
    """

    time: float
    text: str


@dataclass(frozen=True)
class Moment:
    """A run at one of its steps, as far as was known then."""

    time: float
    state: RunState


class Recording:
    """Reads `events.jsonl` of a run.

    Attributes:
        run_dir: of the run.
        curves: of all that was read.
        messages: the newest ones.
        moments: one for each step, or for every second, fourth, ... of a long run.
        now: the newest.
        is_cut: the record is so long that only its beginning and its end were read.
    """

    def __init__(self, run_dir: Path) -> None:
        """Begin at the beginning of the record, which need not be there yet."""
        self.run_dir = run_dir
        self.curves = Curves()
        self.messages: deque[Message] = deque(maxlen=_MOST_MESSAGES)
        self.moments: list[Moment] = []
        self.now = Moment(0.0, RunState())
        self.is_cut = False
        self._facts: Facts | None = None
        self._start: Event | None = None  # of which they are
        self._stride = 1
        self._num_steps = 0
        self._began: float | None = None  # by the clock of rank 0
        path = run_dir / "events.jsonl"
        size = 0
        with suppress(OSError):
            size = path.stat().st_size
        self._tail = FileTail(path)
        if size > _HEAD_BYTES + _MOST_BYTES:
            self.is_cut = True
            with suppress(OSError), path.open("rb") as file:
                self._take(file.read(_HEAD_BYTES).split(b"\n")[:-1])
            self._tail = FileTail(path, size - _MOST_BYTES)
            # Its first line lacks its beginning, and is skipped as no event.

    def read(self) -> bool:
        """Take in what is new; return whether there was anything."""
        return self._take(self._tail.lines())

    @property
    def facts(self) -> Facts:
        """What the run's plan says of its ranks, as of its newest start."""
        start = self.now.state.start
        if self._facts is None or start is not self._start:
            self._start = start
            self._facts = facts_of(self.run_dir, self.now.state)
        return self._facts

    def _take(self, lines: Iterable[bytes]) -> bool:
        """Take in these lines; return whether there was any."""
        is_new = False
        for line in lines:
            is_new = True
            # A line may be half written, of another version, or none of ours.
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                self._take_event(json.loads(line))
        return is_new

    def _take_event(self, event: Event) -> None:
        at = float(event["time"])
        state = fold(self.now.state, event)
        if event["type"] == "start":
            self._began = at
        if event["type"] == "step":
            began = at if self._began is None else self._began
            state = replace(state, elapsed_s=max(0.0, at - began))
        self.now = Moment(max(at, self.now.time), state)
        self.curves.take(event)
        if event["type"] != "metrics" and (text := message_line(event)):  # curves show those
            self.messages += [Message(at, line) for line in text.splitlines()]
        if event["type"] == "step":
            self._keep()

    def _keep(self) -> None:
        self._num_steps += 1
        if self._num_steps % self._stride == 0:
            self.moments.append(self.now)
        if len(self.moments) > _MOST_MOMENTS:
            self.moments = self.moments[1::2]
            self._stride *= 2


def facts_of(run_dir: Path, state: RunState) -> Facts:
    """Return a run as its plan tells of it; without a plan, as its events do."""
    from zrun.runs.listing import is_script
    from zrun_core.spine.spec import LaunchPlan

    job = str((state.start or {}).get("job") or run_dir.parent.name)
    with suppress(OSError, ValueError):
        plan = LaunchPlan.model_validate_json((run_dir / "plan.json").read_bytes())
        hosts = tuple(place.host for place in plan.ranks)
        places = tuple(filter(None, (plan.along_axes(place.rank) for place in plan.ranks)))
        return Facts(job, run_dir.name, hosts, places, is_script(run_dir))
    size = int((state.start or {}).get("world_size") or 1)
    return Facts(job, run_dir.name, ("",) * size)
