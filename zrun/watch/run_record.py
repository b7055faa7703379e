"""All that the files of a run tell of it, read at once: `record = read_record(run_dir)`.

`zrun.watch.recording` reads the same events as they come, and can look back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zrun.watch.curves import Curves
from zrun.watch.gpu_course import GpuCourse
from zrun.watch.history import History
from zrun.watch.panel_layout import Facts
from zrun.watch.rank_times import RankTimes
from zrun.watch.recording import facts_of
from zrun.watch.run_state import RunState, Step, fold
from zrun_core.spine.events import Event

# A record of up to this size is read as a whole, in some seconds; this much of a longer one is.
_MOST_BYTES = 128 << 20
_PARTS = 512
_UNUSED = b'{"type":"output"'  # by far the longest of some records


@dataclass
class RunRecord:
    """A run.

    Attributes:
        run_dir: its directory.
        facts: which run it is.
        state: what the events since its newest `start` tell.
        curves: of the whole run, earlier launches included.
        history: what has happened beside its steps.
        ranks: which ranks were waited for.
        gpus: what GPUs said of themselves.
        num_events: that were read.
        num_skipped: lines that are no events.
        is_sampled: the record is so long that only parts of it were read, evenly spaced.
    """

    run_dir: Path
    facts: Facts
    state: RunState = field(default_factory=RunState)
    curves: Curves = field(default_factory=Curves)
    history: History = field(default_factory=History)
    ranks: RankTimes = field(default_factory=RankTimes)
    gpus: GpuCourse = field(default_factory=GpuCourse)
    num_events: int = 0
    num_skipped: int = 0
    is_sampled: bool = False

    def take(self, event: Event, offset: int = 0) -> None:
        """Take in an event, which begins at `offset` bytes of the record.

        What the parts do not understand of it they leave out, each by itself.
        """
        with suppress(*_MISUNDERSTOOD):
            self.state = _of_its_launch(self.state, event)
        with suppress(*_MISUNDERSTOOD):
            self.state = fold(self.state, event)
        with suppress(*_MISUNDERSTOOD):
            self.curves.take(event)
        with suppress(*_MISUNDERSTOOD):
            self.history.take(event, offset)
        with suppress(*_MISUNDERSTOOD):
            self.ranks.take(event)
        with suppress(*_MISUNDERSTOOD):
            self.gpus.take(event)
        self.num_events += 1


def _of_its_launch(state: RunState, event: Event) -> RunState:
    """Return what was known before an event of the launch that it is of.

    A launch begins with a `start`, or before it with what the stages of its pipeline have.
    """
    if event["type"] == "start":
        step = (event.get("resumed") or {}).get("step", 0)
        went_on_from = state.step if step == state.step.step else Step(step=step)
        stages = {} if state.first.step else state.stages
        return RunState(step=went_on_from, stages=stages)
    if event["type"] == "stage":
        stages = {
            number: each
            for number, each in state.stages.items()
            if each["stages"] == event["stages"] and not state.first.step
        }
        if state.first.step:
            return RunState(step=state.step, stages=stages)
        return replace(state, stages=stages)
    return state


# What a field of another version or of a damaged line may lead to.
_MISUNDERSTOOD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


def read_record(run_dir: Path) -> RunRecord:
    """Read `events.jsonl` of a run, and its plan.

    Raises:
        OSError: the record cannot be read.
    """
    record = RunRecord(run_dir, facts_of(run_dir, RunState()))
    path = run_dir / "events.jsonl"
    size = path.stat().st_size
    record.is_sampled = size > _MOST_BYTES
    for offset, line in _lines(path, size):
        if line.startswith(_UNUSED) or line.isspace():
            continue
        event = _event(line)
        if event is None:
            record.num_skipped += 1
        else:
            record.take(event, offset)
    if record.is_sampled:  # what was summed up lacks what was not read
        record.state = replace(record.state, traffic_bytes=0, tier_waits={}, update_lag=0.0)
    record.facts = facts_of(run_dir, record.state)
    return record


def _event(line: bytes) -> Event | None:
    """Return the event of a line; None: it is half written, or none."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        return None
    is_placed = _is_count(event.get("rank")) and _is_count(event.get("step", 0))
    time = event.get("time")
    is_timed = isinstance(time, int | float) and math.isfinite(time)
    return event if is_placed and is_timed else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _lines(path: Path, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, or of as many parts of it as are read in a bounded time.

    Each comes with the number of bytes before it.
    """
    parts = [(0, size)]
    if size > _MOST_BYTES:
        length = _MOST_BYTES // _PARTS
        starts = [(size - length) * part // (_PARTS - 1) for part in range(_PARTS)]
        parts = [(start, start + length) for start in starts]
    with path.open("rb") as file:
        for start, stop in parts:
            file.seek(start)
            offset = start
            if start:
                offset += len(file.readline())  # the rest of a line
            while offset < stop:
                line = file.readline()
                if not line:
                    break
                yield offset, line
                offset += len(line)
