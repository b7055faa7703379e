"""Whether a trace is one that Perfetto shows: `python tests/dist/traces.py TRACE.json.gz ...`.

Fields are there and of their type, spans of a thread are inside of each other or apart.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROUNDING_US = 0.01  # of what torch writes with three digits


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, which is checked."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    events: list[dict[str, Any]] = trace["traceEvents"]
    check(events)
    return events


def check(events: list[dict[str, Any]]) -> None:
    """Raise an AssertionError where Perfetto would leave out an event, or show it elsewhere."""
    spans = defaultdict(list)
    named: dict[str, set[int]] = defaultdict(set)
    for event in events:
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert isinstance(event["ts"], int | float), event
        assert isinstance(event["name"], str), event
        assert event["ph"] in ("X", "M", "s", "f", "i", "C"), event
        if event["ph"] == "M":
            named[event["name"]].add(event["pid"])
        elif event["ph"] in "sf":
            assert "id" in event, event
        elif event["ph"] == "X":
            assert event["dur"] >= 0, event
            spans[event["pid"], event["tid"]].append(
                (event["ts"], -event["dur"], event["ts"] + event["dur"], event["name"])
            )
    assert {pid for pid, _ in spans} <= named["process_name"]
    for of_thread in spans.values():
        around: list[tuple[float, str]] = []
        for start, _, stop, name in sorted(of_thread):
            while around and around[-1][0] <= start + ROUNDING_US:
                around.pop()
            assert not around or stop <= around[-1][0] + ROUNDING_US, (name, around[-1])
            around.append((stop, name))


def names_in(events: list[dict[str, Any]]) -> set[str]:
    """What is named: not the operators."""
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        found = read_trace(Path(argument))
        print(f"{argument}: {len(found)} events, {len(names_in(found))} names")
