"""The panel's table of ranks: how long each works in a step, its GPU's sensors, its memory."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable

from rich.text import Text

from zrun.watch import formatting
from zrun.watch.panel_layout import GAP, LABEL, QUIET, Facts, PanelSpace
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
        int(event["rank"]): _values(event, state.gpus.get(int(event["rank"])) or {})
        for event in state.memory.events
    }
    rows = _rows(of_ranks, room.height - 2, name)
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


def _rows(
    of_ranks: dict[int, dict[str, float]],
    most: int,
    name: Callable[[int], str],
) -> dict[str, dict[str, float]]:
    """Return rows by their label: all ranks, or a summary where there are too many."""
    if len(of_ranks) <= min(_MOST_RANKS, most):
        return {name(rank): of_ranks[rank] for rank in sorted(of_ranks)}
    columns = {
        column: [values.get(column, 0.0) for values in of_ranks.values()]
        for column in next(iter(of_ranks.values()))
    }
    summary: dict[str, Callable[[list[float]], float]] = {
        "max": max,
        "median": statistics.median,
        "min": min,
    }
    rows = {
        label: {column: float(function(values)) for column, values in columns.items()}
        for label, function in reversed(list(summary.items())[:most])
    }
    usual = statistics.median(map(_own, of_ranks.values()))
    slow = [rank for rank, values in of_ranks.items() if _own(values) > _NOTABLE * usual]
    slowest = heapq.nlargest(_SLOWEST, slow, key=lambda rank: _own(of_ranks[rank]))
    fullest = heapq.nlargest(_FULLEST, of_ranks, key=lambda rank: _held(of_ranks[rank]))
    singled_out = dict.fromkeys([*slowest, *fullest])
    return rows | {name(rank): of_ranks[rank] for rank in list(singled_out)[: most - len(rows)]}


def _values(event: Event, sensed: Event) -> dict[str, float]:
    """Return what the columns of a rank show: seconds, its GPU's sensors, bytes.

    Bytes are those of the memory that its model is in. `event` is the newest of its `memory`
    events; `sensed` is what its GPU said last, {} where it says nothing.
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
        "other": max(0.0, more[held[0]] - sum(kinds.values())),
        **more,
    }


def _held(values: dict[str, float]) -> float:
    """Return the bytes that a rank holds, whatever they are for."""
    return sum(values[column] for column in (*MEMORY_KINDS, "other"))


def _own(values: dict[str, float]) -> float:
    return values.get(_BUSY, 0.0)
