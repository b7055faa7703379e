"""`memory` events of the ranks of a host as one, on their way from its agent to the launcher.

    together([{"rank": 8, "step": 5, "params": 9, "rss_bytes": 70},
              {"rank": 9, "step": 5, "params": 9, "rss_bytes": 71}])
      = {"type": "memories", ...,
         "told": {"rank": [8, 9], "step": 5, "params": 9, "rss_bytes": [70, 71]}}

What all of them say is there once, of the rest a list; nothing is lost. `events.jsonl` never has
such an event: the launcher takes it apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zrun_core.spine.events import Event

MEMORIES = "memories"
FEW_RANKS = 16  # of a launch, up to which each rank's `memory` events are recorded one by one


def together(events: Sequence[Event]) -> Event:
    """Return one event that has all of `events`, at least one, each of another rank."""
    first = events[0]
    about = {"time": first["time"], "rank": first["rank"], "step": first["step"]}
    told = _columns(events)
    return {"type": MEMORIES, **about, "ranks": len(events), "told": told}


def apart(event: Event) -> list[Event]:
    """Return the events that `together` was given."""
    return [_one_of(event["told"], number) for number in range(event["ranks"])]


def _columns(values: Sequence[Any]) -> Any:
    """Return a dict of columns, a list of values that differ, or what all values are."""
    first = values[0]
    if all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: _columns([value[key] for value in values]) for key in first}
    if isinstance(first, dict | list):  # which would look like columns
        return list(values)
    if all(type(value) is type(first) and value == first for value in values):
        return first
    return list(values)


def _one_of(columns: Any, number: int) -> Any:
    if isinstance(columns, dict):
        return {key: _one_of(column, number) for key, column in columns.items()}
    return columns[number] if isinstance(columns, list) else columns
