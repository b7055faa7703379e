"""The live panel: a pure function from what is known about a run to lines that fit a terminal.

`ROWS` lists its rows in the order in which they are drawn. A row is a function that returns the lines
it has to say in the room that it gets, none where it has nothing to say. Values are never cut in
words: what does not fit on a line goes on the next one, and where the lines are too few, the rows
that are missed least are left out. To show something new, write such a function and name it in `ROWS`.
"""

from __future__ import annotations

import heapq
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from zrun.launch.cluster import several
from zrun.watch import text
from zrun.watch.state import MEMORY_KINDS, SPLIT, RunState
from zrun_core.events import Event

WIDEST = 140  # columns: beyond, the eye has too far to go
_LEAST_LINES = 3  # of a panel, however low the terminal
_LABEL = 9  # columns
_GAP = "  "  # between two values
_MOST_RANKS = 8  # that are shown one by one; more of them are summed up
_FULLEST = 3  # ranks that are shown beside such a sum
_LEAST_TABLE = 3  # lines
_MISSED_LEAST = ("rings", "grads", "params", "optim", "other", "reserved")  # columns, in this order
_LEAST_CURVE, _MOST_CURVE, _LEAST_BAR = 10, 60, 8  # columns
_SPLIT_LETTERS = "dFBCO"
# Okabe and Ito's colours, told apart by any eye; letters carry the meaning without them.
_SPLIT_STYLES = ("#999999", "#56B4E9", "#0072B2", "#E69F00", "#009E73")
_GOOD, _ALERT, _QUIET = "#56B4E9", "#E69F00", "grey62"


@dataclass(frozen=True)
class Facts:
    """What is known before the first event."""

    name: str
    run_id: str
    num_ranks: int


@dataclass(frozen=True)
class Room:
    """What a row may fill: `width` columns beside its label, on at most `height` lines."""

    width: int
    height: int
    ascii_only: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the panel.

    Attributes:
        label: in front of its first line; without one its lines take the whole width.
        importance: the lower, the longer it stays where lines are few.
    """

    label: str
    lines: Callable[[RunState, Facts, Room], list[Text]]
    importance: int


def panel(state: RunState, facts: Facts, width: int, height: int = 100, *, ascii_only: bool = False) -> Panel:
    """Draw the whole panel.

    Args:
        width: of the panel, in columns.
        height: of the terminal, in lines; the panel leaves a third of it to messages.
        ascii_only: whether the terminal knows no other characters.
    """
    room = Room(width - 4, max(_LEAST_LINES, height * 2 // 3 - 2), ascii_only)
    return Panel(
        Group(*_body(state, facts, room)),
        title=_title(state, facts, width - 6),
        title_align="left",
        box=box.ASCII if ascii_only else box.ROUNDED,
        width=width,
        border_style=_QUIET,
    )


def _body(state: RunState, facts: Facts, room: Room) -> list[Text]:
    """The lines of all rows that fit; a row's first one stands behind its label."""
    drawn: dict[Row, list[Text]] = {}
    left = room.height
    for row in sorted(ROWS, key=lambda row: row.importance):
        width = room.width - (_LABEL if row.label else 0)
        lines = row.lines(state, facts, replace(room, width=width, height=left)) if left else []
        drawn[row] = [part for line in lines for part in packed([line], width)][:left]
        left -= len(drawn[row])
    body = []
    for row in ROWS:
        label = row.label.ljust(_LABEL) if row.label else ""
        for number, line in enumerate(drawn[row]):
            head = label if number == 0 else " " * len(label)
            body.append(Text.assemble((head, _QUIET), line, no_wrap=True, overflow="crop"))
    return body


def _title(state: RunState, facts: Facts, width: int) -> Text:
    """What is run, and how; what is missed least goes first where the border is too short."""
    words = {"name": facts.name, "run": facts.run_id, "ranks": several(facts.num_ranks, "rank")}
    if state.start is not None:
        words |= {"zero": f"zero {state.start.get('stage')}"}
        words |= {key: str(state.start.get(key)) for key in ("precision", "device")}
    for missed_least in ("run", "device", "precision", "zero", "ranks"):
        if len(_GAP.join(words.values())) > width:
            words.pop(missed_least, None)
    return Text(_GAP.join(words.values()))


def packed(fields: Iterable[Text | str], width: int, gap: str = _GAP) -> list[Text]:
    """Put values side by side on as few lines as they need.

    One that does not fit on a line by itself is broken between its words.
    """
    lines: list[Text] = []
    for field in fields:
        added = field if isinstance(field, Text) else Text(field)
        if lines and len(lines[-1]) + len(gap) + len(added) <= width:
            lines[-1].append(gap).append_text(added)
        elif len(added) > width and " " in added.plain:
            lines += packed(added.split(" "), width, " ")
        else:
            lines.append(added.copy())
    return lines


def _progress(state: RunState, facts: Facts, room: Room) -> list[Text]:
    if state.start is None:
        return [Text(f"starting {several(facts.num_ranks, 'worker')}")]
    if not state.step.step:
        params = text.count(state.start.get("params") or 0)
        return [Text(f"{params} parameters ready; first step")]
    total = state.total_steps
    if total is None:
        return [Text(f"{state.step.step}")]
    fields: list[Text | str] = [f"{state.step.step}/{total}", f"{state.step.step / total:.0%}"]
    if state.eta_s is not None:
        fields.append(f"eta {text.duration(state.eta_s)}")
    length = room.width - sum(len(field) + len(_GAP) for field in fields)
    if length >= _LEAST_BAR:
        filled = min(length, length * state.step.step // total)
        full, empty = ("#", "-") if room.ascii_only else ("━", "─")
        parts = (full * filled, _GOOD), (empty * (length - filled), _QUIET)
        fields.insert(1, Text.assemble(*parts))
    return packed(fields, room.width)


def _so_far(state: RunState, facts: Facts, room: Room) -> list[Text]:
    """What the run has consumed, and what of it is safe."""
    step = state.step
    fields: list[Text | str] = []
    if state.elapsed_s is not None:
        fields.append(f"elapsed {text.duration(state.elapsed_s)}")
    if step.epoch is not None:
        fields.append(f"epoch {step.epoch:.2f}")
    if step.total_tokens:
        fields.append(f"{text.count(step.total_tokens)} tokens")
    elif step.total_samples:
        fields.append(f"{text.count(step.total_samples)} samples")
    if state.saved is not None:
        fields.append(f"saved at step {state.saved}")
    if state.num_warnings:
        fields.append(Text(several(state.num_warnings, "warning"), _ALERT))
    return packed(fields, room.width)


def _loss(state: RunState, facts: Facts, room: Room) -> list[Text]:
    if not state.step.step:
        return []
    loss = f"{state.step.loss:.4f}"
    evals = [f"eval {each.loss:.4f} at step {each.step}" for each in state.evals[-1:]]
    left = room.width - len(_GAP.join([loss, *evals])) - len(_GAP)
    is_short = left < _LEAST_CURVE  # then the evaluation goes on a line of its own
    left = room.width - len(loss) - len(_GAP) if is_short else left
    curve = text.sparkline(state.losses.points, min(_MOST_CURVE, left), room.ascii_only)
    line = Text.assemble(loss, _GAP if curve else "", (curve, _GOOD))
    return packed([line, *evals], room.width)


def _update(state: RunState, facts: Facts, room: Room) -> list[Text]:
    step = state.step
    if not step.step:
        return []
    fields: list[Text | str] = []
    if step.lr is not None:
        fields.append(f"lr {step.lr:.3g}")
    if step.grad_norm is not None:
        fields.append(f"grad norm {step.grad_norm:.3g}")
    if step.loss_scale is not None:
        fields.append(f"loss scale {step.loss_scale:g}")
    if step.skips:
        skipped = f"{several(step.skips, 'step')} skipped"
        fields.append(Text(skipped, _ALERT if step.skipped else ""))
    return packed(fields, room.width)


def _speed(state: RunState, facts: Facts, room: Room) -> list[Text]:
    fields: list[Text | str] = []
    if state.speed is not None:
        fields.append(f"{text.count(state.speed[0])} {state.speed[1]}")
    if state.step_s is not None:
        fields.append(f"{text.seconds(state.step_s)}/step")
    if state.tflops is not None:
        fields.append(f"{state.tflops:.3g} TFLOP/s per rank")
    if state.mfu is not None:
        fields.append(f"MFU {state.mfu:.1%}")
    return packed(fields, room.width)


def _time(state: RunState, facts: Facts, room: Room) -> list[Text]:
    """Where the time of a step goes, on rank 0."""
    split = state.split
    if not split:
        return []
    shares = [split[part] for part in SPLIT]
    legend = [f"{part} {share:.0%}" for part, share in zip(SPLIT, shares, strict=True)]
    width_of_bar = min(40, room.width - len(_GAP.join([*legend, ""])))
    if width_of_bar < _LEAST_BAR:
        return packed(legend, room.width)
    bar = text.share_bar(shares, _SPLIT_LETTERS, width_of_bar)
    parts = [(letter * size, style) for (letter, size), style in zip(bar, _SPLIT_STYLES, strict=True)]
    return packed([Text.assemble(*parts), *legend], room.width)


def _metrics(state: RunState, facts: Facts, room: Room) -> list[Text]:
    """What the user's hooks have recorded."""
    return packed(text.metrics(state.metrics).split(_GAP), room.width) if state.metrics else []


def _estimate(state: RunState, facts: Facts, room: Room) -> list[Text]:
    if state.estimate is None:
        return []
    parts = re.split("(?<=[,;]) ", text.foretold(state.estimate))
    return packed([Text(part, _QUIET) for part in parts], room.width, " ")


def _ranks(state: RunState, facts: Facts, room: Room) -> list[Text]:
    """What each rank's memory holds; of many ranks what they have in common, and the fullest ones."""
    if not state.memory or room.height < _LEAST_TABLE:
        return []
    of_ranks = {int(event["rank"]): _sizes(event) for event in state.memory.events}
    rows = _rows(of_ranks, room.height - 2)
    if any(state.planned_bytes.values()):
        rows["planned"] = {name: float(size) for name, size in state.planned_bytes.items()}
    unit = text.Unit.of(size for row in rows.values() for size in row.values())
    labels = [unit.name, *rows]
    margin = max(_LABEL, max(map(len, labels)) + len(_GAP))
    columns: dict[str, list[str]] = {}
    for name in rows[labels[1]]:
        cells = [name, *(unit.text(row[name]) if name in row else "" for row in rows.values())]
        width = max(map(len, cells))
        columns[name] = [cell.rjust(width) for cell in cells]
    for name in _MISSED_LEAST:
        if margin + sum(len(cells[0] + _GAP) for cells in columns.values()) > room.width + len(_GAP):
            columns.pop(name, None)
    lines = []
    for label, *cells in zip(labels, *columns.values(), strict=True):
        style = _QUIET if label in (unit.name, "planned") else ""
        lines.append(Text.assemble((label.ljust(margin), _QUIET), (_GAP.join(cells), style)))
    return lines


def _rows(of_ranks: dict[int, dict[str, float]], most: int) -> dict[str, dict[str, float]]:
    """Rows of the table by their label: all ranks, or where there are too many, the sum of it."""
    if len(of_ranks) <= min(_MOST_RANKS, most):
        return {f"rank {rank}": of_ranks[rank] for rank in sorted(of_ranks)}
    columns = {name: [sizes[name] for sizes in of_ranks.values()] for name in of_ranks[min(of_ranks)]}
    summary: dict[str, Callable[[list[float]], float]] = {"max": max, "median": statistics.median, "min": min}
    rows = {
        label: {name: float(function(values)) for name, values in columns.items()}
        for label, function in list(summary.items())[:most]
    }
    num_fullest = max(0, min(_FULLEST, most - len(rows)))
    fullest = heapq.nlargest(num_fullest, of_ranks, key=lambda rank: _held(of_ranks[rank]))
    return rows | {f"rank {rank}": of_ranks[rank] for rank in sorted(fullest)}


def _sizes(event: Event) -> dict[str, float]:
    """Bytes of a rank by the name of their column, where its model lives."""
    kinds = {kind: float(event.get(kind) or 0) for kind in MEMORY_KINDS}
    if event.get("device_allocated") is None:
        held, highest = ("rss", "rss_bytes"), ("peak", "peak_rss_bytes")
    else:  # both are the most that there was
        held, highest = ("peak", "device_allocated"), ("reserved", "device_reserved")
    more = {name: float(event.get(field) or 0) for name, field in (held, highest)}
    return {**kinds, "other": max(0.0, more[held[0]] - sum(kinds.values())), **more}


def _held(sizes: dict[str, float]) -> float:
    """Bytes that a rank holds, whatever they are for."""
    return sum(sizes[name] for name in (*MEMORY_KINDS, "other"))


ROWS = (
    Row("step", _progress, 0),
    Row("run", _so_far, 4),
    Row("loss", _loss, 1),
    Row("update", _update, 5),
    Row("metrics", _metrics, 3),
    Row("speed", _speed, 2),
    Row("time", _time, 6),
    Row("estimate", _estimate, 8),
    Row("", _ranks, 7),
)
