"""What ranks send along each axis beside theory, as tables: of a run, and of an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zrun.pages import document
from zrun.watch.axis_traffic import (
    CROSSING,
    DATA,
    BorderRow,
    SentRow,
    border_rows,
    borders_of,
    notes_on_theory,
    sent_rows,
)
from zrun.watch.run_state import RunState
from zrun_core.sizes import format_size

if TYPE_CHECKING:
    from zrun_core.plan.answer.outcome import Estimate


def traffic(state: RunState) -> str:
    """Return what rank 0 has sent in its newest launch, and what crosses borders of stages."""
    rows = sent_rows(state)
    borders = border_rows(state)
    parts = [_sent(rows)]
    if state.traffic_bytes and not rows:
        sent = f"{format_size(state.traffic_bytes)} were sent by rank 0 in this launch"
        parts.append(document.soft(f"{sent}; by collective, beside theory, once it ends."))
    parts.append(_borders(borders))
    parts += [document.soft(note) for note in notes_on_theory(state)]
    return "".join(parts)


def planned_traffic(estimate: Estimate) -> str:
    """Return what a rank of the first stage is to send in a step, and what crosses borders."""
    apart = estimate.sent_apart
    rows = [
        SentRow(DATA, kind, num_bytes, None)
        for kind, num_bytes in estimate.traffic.items()
        if kind not in apart
    ]
    for axis, by_kind in apart.items():
        rows += [SentRow(axis, what, num_bytes, None) for what, num_bytes in by_kind.items()]
    virtual = estimate.candidate.dims.virtual
    borders = [
        row
        for number, stage in enumerate(estimate.stages)
        for row in borders_of(number, len(estimate.stages), virtual, stage.sent, {})
    ]
    return _sent(rows) + _borders(borders)


def _sent(rows: Sequence[SentRow]) -> str:
    if not rows:
        return ""
    if all(row.measured is None for row in rows):
        cells = [[row.axis, row.what, _size(row.theory)] for row in rows]
        return document.table(("axis", "collective", "per step"), map(document.row, cells), "words")
    head = ("axis", "collective", "in theory", "measured", "difference")
    cells = [[row.axis, row.what, *_compared(row.theory, row.measured)] for row in rows]
    return document.table(head, map(document.row, cells), "words")


def _borders(rows: Sequence[BorderRow]) -> str:
    if not rows:
        return ""
    is_measured = any(row.measured is not None for row in rows)
    has_several = any(row.borders > 1 for row in rows)
    head = ["from", "to", "what"]
    if has_several:
        head.append("borders")
    head += ["in theory", "measured", "difference"] if is_measured else ["bytes"]
    made = []
    for what in CROSSING:
        for row in (each for each in rows if each.what == what):
            cells = [f"stage {row.stage}", f"stage {row.to}", what]
            if has_several:
                cells.append(str(row.borders))
            compared = _compared(row.theory, row.measured)
            cells += compared if is_measured else compared[:1]
            made.append(document.row(cells))
    title = '<h3 class="part">Between stages, of a micro-batch and rank</h3>'
    return title + document.table(head, made, "words")


def _compared(theory: int | None, measured: int | None) -> list[str]:
    return [_size(theory), _size(measured), _off(measured, theory)]


def _off(measured: int | None, expected: int | None) -> str:
    if measured is None or expected is None:
        return "-"
    if measured == expected:
        return "none"
    return f"{(measured - expected) / expected:+.2%}" if expected else _size(measured)


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_size(num_bytes)
