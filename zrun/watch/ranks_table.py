"""The panel's table of ranks: how long each works in a step, its GPU's sensors, its memory."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from rich.text import Text

from zrun.watch import formatting
from zrun.watch.panel_layout import GAP, LABEL, QUIET, Facts, PanelSpace
from zrun.watch.rank_digest import digest_of, other_bytes
from zrun.watch.run_state import MEMORY_KINDS, RunState
from zrun.watch.stragglers import own_times
from zrun_core.spine.events import Event

_MOST_RANKS = 8  # that are shown one by one; more of them are summed up
# ranks that are shown beside such a sum
_SLOWEST = 2
_FULLEST = 2
_NOTABLE = 1.1  # times the median: what makes a rank one of the slowest
_LEAST_TABLE = 3  # lines
_BUSY = "busy"  # the column of time: what of a step a rank works
_SENSORS = {  # columns of a GPU's sensors: the field, and how it is shown
    "gpu": ("utilisation", "{:.0f}%"),
    "power": ("power_w", "{:.0f} W"),
    "heat": ("temperature_c", "{:.0f} C"),
}
_NO_BYTES = {_BUSY, *_SENSORS}
# columns, in this order
_MISSED_LEAST = (
    *("rings", "grads", "params", "optim", "other", "reserved"),
    *reversed(_SENSORS),
    _BUSY,
)
_WIDE = 76  # columns from which on hosts are named


def ranks_table(state: RunState, facts: Facts, room: PanelSpace) -> list[Text]:
    """Draw a line for each rank; of many a summary, the slowest and the fullest.

    Args:
        state: of the run: the newest `memory` event of each rank is shown.
        room: columns that do not fit are left out, those of `_MISSED_LEAST` first.
    """
    if not state.memory or room.height < _LEAST_TABLE:
        return []
    name = facts.rank if room.width >= _WIDE else "rank {}".format
    of_ranks = {
        rank: _values(event, state.gpus.get(rank) or {}) for rank, event in state.memory.items()
    }
    most = room.height - 2
    num_ranks = len(of_ranks) if state.ranks is None else state.ranks["ranks"]
    if num_ranks <= min(_MOST_RANKS, most):
        rows = {name(rank): values for rank, values in of_ranks.items()}
    else:
        told = digest_of(state)
        rows = _sums(told, state.gpus.events, most)
        singled_out = _singled_out(of_ranks, told["median"].get("busy_s", 0.0))
        rows |= {name(rank): of_ranks[rank] for rank in singled_out[: most - len(rows)]}
    if any(state.planned_bytes.values()):
        rows["planned"] = {kind: float(size) for kind, size in state.planned_bytes.items()}
    unit = formatting.Unit.of(
        row[kind] for row in rows.values() for kind in row if kind not in _NO_BYTES
    )
    labels = [unit.name, *rows]
    margin = max(LABEL, max(map(len, labels)) + len(GAP))
    columns = _columns(list(rows.values()), unit, room.width - margin)
    lines = []
    for label, *cells in zip(labels, *columns, strict=True):
        if any(cell.strip() for cell in cells):  # what was planned may have lost all its columns
            style = QUIET if label in (unit.name, "planned") else ""
            lines.append(Text.assemble((label.ljust(margin), QUIET), (GAP.join(cells), style)))
    return lines


def _columns(rows: list[dict[str, float]], unit: formatting.Unit, width: int) -> list[list[str]]:
    """Return the columns that fit, each a head and a cell for each row, all of the same width."""
    columns: dict[str, list[str]] = {}
    for name in rows[0]:
        cells = [name, *(_cell(row, name, unit) for row in rows)]
        widest = max(map(len, cells))
        columns[name] = [cell.rjust(widest) for cell in cells]
    for name in _MISSED_LEAST:
        if len(GAP.join(cells[0] for cells in columns.values())) > width:
            columns.pop(name, None)
    return list(columns.values())


def _cell(row: dict[str, float], column: str, unit: formatting.Unit) -> str:
    if column not in row:
        return ""
    if column == _BUSY:
        return formatting.seconds(row[column])
    if column in _SENSORS:
        return _SENSORS[column][1].format(row[column])
    return unit.text(row[column])


def _sums(told: Event, sensed: list[Event], most: int) -> dict[str, dict[str, float]]:
    """Return the rows of all ranks together by their label, at most so many.

    `told` is a `ranks` event; `sensed` is what the GPUs said last.
    """
    readings = {
        field: [float(each[field]) for each in sensed if each.get(field) is not None]
        for field, _ in _SENSORS.values()
    }
    summary: dict[str, tuple[str, Callable[[list[float]], float]]] = {
        "max": ("most", max),
        "median": ("median", statistics.median),
        "min": ("least", min),
    }
    rows = {}
    for label, (key, function) in reversed(list(summary.items())[:most]):
        numbers = told[key]
        of_gpus = {field: function(values) for field, values in readings.items() if values}
        values = _values(numbers, of_gpus) | {"other": numbers["other_bytes"]}
        busy = {_BUSY: numbers["busy_s"]} if "busy_s" in numbers else {}
        rows[label] = busy | values
    return rows


def _singled_out(of_ranks: Mapping[int, dict[str, float]], usual: float) -> list[int]:
    """Return the slowest ranks, of those far above what is `usual`, and the fullest."""
    slow = [rank for rank, values in of_ranks.items() if _own(values) > _NOTABLE * usual]
    slowest = heapq.nlargest(_SLOWEST, slow, key=lambda rank: _own(of_ranks[rank]))
    fullest = heapq.nlargest(_FULLEST, of_ranks, key=lambda rank: _held(of_ranks[rank]))
    return list(dict.fromkeys([*slowest, *fullest]))


def _values(event: Mapping[str, Any], sensed: Mapping[str, Any]) -> dict[str, float]:
    """Return what the columns of a rank show: seconds, its GPU's sensors, bytes.

    Bytes are those of the memory that its model is in. `event` is the newest of its `memory`
    events, or the numbers of several; `sensed` is what its GPU said last, {} where it says nothing.
    """
    on_device = event.get("device_allocated") is not None
    times = {}
    if own := own_times(event):
        times[_BUSY] = sum(own.values())
    sensors = {
        column: float(sensed[field])
        for column, (field, _) in _SENSORS.items()
        if sensed.get(field) is not None
    }
    kinds = {kind: float(event.get(kind) or 0) for kind in MEMORY_KINDS}
    held = ("rss", "rss_bytes")
    highest = ("peak", "peak_rss_bytes")
    if on_device:  # both are the most that there was
        held = ("peak", "device_allocated")
        highest = ("reserved", "device_reserved")
    more = {column: float(event.get(field) or 0) for column, field in (held, highest)}
    return {
        **times,
        **sensors,
        **kinds,
        "other": other_bytes(event),
        **more,
    }


def _held(values: dict[str, float]) -> float:
    """Return the bytes that a rank holds, whatever they are for."""
    return sum(values[column] for column in (*MEMORY_KINDS, "other"))


def _own(values: dict[str, float]) -> float:
    return values.get(_BUSY, 0.0)
