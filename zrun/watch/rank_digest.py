"""What many ranks tell of a step in one event, `ranks`: extremes, medians, and the worst whole.

Screens, pages and reports ask `digest_of(state)`, whether a run records each rank by itself or
this event in their place.
"""

from __future__ import annotations

import heapq
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from zrun.watch.curves import held_by_tier
from zrun.watch.run_state import MEMORY_KINDS, RunState
from zrun.watch.stragglers import find_late, own_times
from zrun_core.spine.events import Event

_ABOUT = {"type", "time", "rank", "step"}
_SLOWEST = 4
_FULLEST = 4
_PEAKS = 2  # ranks


def digest_of(state: RunState) -> Event:
    """Return what the ranks of a run have told last, as of its newest `ranks` event.

    Where it has none, it is made of what each rank has told; {} if none has.
    """
    if state.ranks is not None:
        return state.ranks
    events = dict(state.memory.items())
    return digest(events) if events else {}


def digest(events: Mapping[int, Event], peaks: Mapping[int, int] | None = None) -> Event:
    """Return the `ranks` event of the newest `memory` events of all ranks, at least one.

    Args:
        events: by rank.
        peaks: bytes by rank, of `peak` events.
    """
    step = max(event.get("step", 0) for event in events.values())
    first = events[min(events)]
    timed = {rank: event for rank, event in events.items() if event.get("split")}
    late = list(find_late(timed, "rank {}".format)) if timed else []
    numbers = {name: sorted(values.values()) for name, values in _numbers(events).items()}
    return {
        "type": "ranks",
        "time": first["time"],
        "rank": 0,
        "step": step,
        "ranks": len(events),
        "told": sum(event.get("step", 0) == step for event in events.values()),
        "least": {name: values[0] for name, values in numbers.items()},
        "median": {name: statistics.median(values) for name, values in numbers.items()},
        "most": {name: values[-1] for name, values in numbers.items()},
        "alloc_retries": sum(event.get("alloc_retries") or 0 for event in events.values()),
        "late": [each.worker.ranks[0] for each in late if each.kind == "rank"],
        "late_stages": [each.worker.name for each in late if each.kind == "stage"],
        "stages": _stages(events),
        "worst": [
            {name: value for name, value in events[rank].items() if name not in ("type", "time")}
            for rank in sorted(_worst(events, peaks or {}))
        ],
    }


def stages_of(state: RunState) -> Sequence[Mapping[str, Any]]:
    """Return what the ranks of each stage of a pipeline have told last, as of `ranks`."""
    return _stages(state.memory) if state.ranks is None else state.ranks["stages"]


def busy_s(event: Event) -> float:
    """Return the seconds of a step in which a rank does not wait for others."""
    return sum(own_times(event).values())


def other_bytes(event: Mapping[str, Any]) -> float:
    """Return what a rank holds beside what is planned: of a GPU's tensors, else of the process."""
    held = event.get("device_allocated")
    if held is None:
        held = event.get("rss_bytes")
    return max(0.0, float(held or 0) - sum(event.get(kind) or 0 for kind in MEMORY_KINDS))


def held_bytes(event: Event) -> float:
    """Return the bytes that a rank holds, whatever they are for."""
    return sum(event.get(kind) or 0 for kind in MEMORY_KINDS) + other_bytes(event)


def process_or_device(event: Event) -> int:
    """Return the most that torch held on a rank's GPU; without one, the most of its process."""
    return int(event.get("device_reserved") or event.get("peak_rss_bytes") or 0)


def _numbers(events: Mapping[int, Event]) -> dict[str, dict[int, float]]:
    """Return the numbers of `memory` events by name and rank, with those that screens make of them.

    What no rank has told is not there.
    """
    found: dict[str, dict[int, float]] = {}
    for name in dict.fromkeys(name for event in events.values() for name in event):
        if name not in _ABOUT:
            values = ((rank, event.get(name)) for rank, event in events.items())
            found[name] = {
                rank: value
                for rank, value in values
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
    found["busy_s"] = {rank: busy_s(event) for rank, event in events.items() if event.get("split")}
    found["other_bytes"] = {rank: other_bytes(event) for rank, event in events.items()}
    for rank, event in events.items():
        for tier, (held, _) in held_by_tier(event, {}).items():
            found.setdefault(f"{tier}_bytes", {})[rank] = held
    return {name: values for name, values in found.items() if values}


def _worst(events: Mapping[int, Event], peaks: Mapping[int, int]) -> set[int]:
    """Return the ranks that screens name: the slowest, and the fullest by each of their measures.

    Of equal ones the first come. Rank 0 tells of itself.
    """

    def first(count: int, key: Callable[[Event], Any]) -> list[int]:
        return heapq.nlargest(count, sorted(events), key=lambda rank: key(events[rank]))

    known = {rank: size for rank, size in sorted(peaks.items()) if rank in events}
    worst = {
        *first(_SLOWEST, busy_s),
        *first(_FULLEST, process_or_device),
        *first(_FULLEST, held_bytes),
        *first(1, lambda event: event.get("device_allocated") or event.get("rss_bytes") or 0),
        *first(1, lambda event: event.get("device_fragmented") or 0),
        *first(1, lambda event: sum((event.get("kept_bytes") or {}).values())),
        *heapq.nlargest(_PEAKS, known, key=lambda rank: known[rank]),
    }
    return worst - {0}


def _stages(events: Mapping[int, Event]) -> list[dict[str, Any]]:
    """Return what the ranks of each stage of a pipeline tell of it; nothing without one."""
    uses = defaultdict[int, list[Mapping[str, Any]]](list)
    sent: dict[int, Any] = {}
    for _, event in sorted(events.items()):
        if use := event.get("pipeline"):
            uses[use["stage"]].append(use)
        if handed_on := event.get("pipe_sent"):
            sent.setdefault(handed_on["stage"], handed_on)
    return [
        {
            "stage": stage,
            "busy_s": _mean(use["span_s"] - use["waited_s"] for use in uses.get(stage, ())),
            "span_s": max((use["span_s"] for use in uses.get(stage, ())), default=None),
            "in_flight": max((use["in_flight"] for use in uses.get(stage, ())), default=None),
            "pipe_sent": sent.get(stage),
        }
        for stage in sorted({*uses, *sent})
    ]


def _mean(values: Iterator[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
