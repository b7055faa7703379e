"""What happened to a run: its launches, the steps that were saved, warnings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from zrun.pages import document
from zrun.pages.outcome import Outcome
from zrun.runs.launches import Launch
from zrun.watch import formatting
from zrun.watch.history import History, Stretch
from zrun_core.sizes import format_size, several
from zrun_core.spine.events import Event

_LONGEST = 500  # characters of a message


def launches_table(launches: Sequence[Launch], history: History) -> str:
    """Return each launch of a run: when it began, which steps it made, and how it ended."""
    stretches = _by_launch(launches, history)
    head = ("launch", "began", "steps", "ended", "why", "command")
    rows = []
    for launch in launches:
        stretch = stretches.get(launch.number)
        outcome = Outcome.of_launch(launch)
        ended = outcome.word
        if launch.code:
            ended += f", exit code {launch.code}"
        began = launch.time
        if began is None and stretch is not None:
            began = stretch.time
        why = launch.headline
        if stretch is not None and stretch.end is not None and not why:
            why = str(stretch.end.get("why") or stretch.end.get("reason") or "")
        cells = [
            str(launch.number),
            "-" if began is None else _clock(began),
            _steps(stretch) if launch.has_record else "set aside: the run was started over",
            ended,
            why or "-",
            launch.command or "-",
        ]
        rows.append(document.row([each[:_LONGEST] for each in cells]))
    parts = [document.table(head, rows, "words")]
    unplaced = len(history.stretches) - len(stretches)
    if unplaced:
        parts.append(_unplaced(history))
    parts += [
        document.details(f"what launch {each.number} said at its end", _pre(each.message))
        for each in launches[:-1]
        if each.message and each.message != each.headline
    ]
    return "".join(parts)


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _by_launch(launches: Sequence[Launch], history: History) -> dict[int, Stretch]:
    """Return the steps of each launch of which it is known, by the launch's number.

    Launches of older versions do not tell where their events begin. Then there must be as many as
    have told of a start; else it is not known which is whose.
    """
    here = [each for each in launches if each.has_record]
    if all(each.first_event is not None for each in here):
        found = {}
        for stretch in history.stretches:
            owners = [each for each in here if (each.first_event or 0) <= stretch.offset]
            if owners:
                found[owners[-1].number] = stretch
        return found
    if len(here) == history.num_stretches == len(history.stretches):
        numbers = [each.number for each in here]
        return dict(zip(numbers, history.stretches, strict=True))
    return {}


def _unplaced(history: History) -> str:
    rows = [document.row([_clock(each.time), _steps(each)]) for each in history.stretches]
    summary = f"the record has {several(history.num_stretches, 'start')}"
    return document.details(summary, document.table(("began", "steps"), rows, "words"))


def _steps(stretch: Stretch | None) -> str:
    if stretch is None:
        return "-"
    if stretch.step == stretch.after:
        return f"none after {stretch.after}" if stretch.after else "none"
    return f"{stretch.after + 1} to {stretch.step}"


def saves_table(history: History) -> str:
    """Return the steps that were saved, the newest last."""
    if not history.saves:
        return ""
    head = ("step", "saved", "why", "size", "took", "training waited", "best so far")
    rows = [document.row(_save(event)) for event in history.saves]
    return _left_out(history.num_saves, len(rows), "saves") + document.table(head, rows, "words")


def _save(event: Event) -> list[str]:
    best = event.get("best")
    removed = event.get("removed") or ()
    reason = str(event.get("reason") or "-")
    if removed:
        reason += f"; removed {', '.join(map(str, removed))}"
    return [
        str(event["step"]),
        _clock(event["time"]),
        reason,
        format_size(int(event["bytes"])) if event.get("bytes") is not None else "-",
        _seconds(event.get("seconds")),
        _seconds(event.get("stall_s")),
        formatting.metrics({best["metric"]: best["value"]}) if best else "-",
    ]


def notices_table(history: History) -> str:
    """Return the warnings of ranks and the requests to stop, the newest last."""
    if not history.notices:
        return ""
    rows = [
        document.row([str(step), _clock(event["time"]), text[:_LONGEST]])
        for step, event, text in history.notices
    ]
    left_out = _left_out(history.num_notices, len(rows), "messages")
    return left_out + document.table(("after step", "time", "message"), rows, "words")


def _left_out(num_all: int, num_shown: int, what: str) -> str:
    if num_all == num_shown:
        return ""
    return document.soft(f"The newest {num_shown} of {num_all} {what}; events.jsonl has all.")


def _seconds(value: float | None) -> str:
    return "-" if value is None else formatting.seconds(float(value))


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a year that no calendar has
        return "?"
