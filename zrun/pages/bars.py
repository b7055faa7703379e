"""Stacked bars, one below the other to one scale: names and numbers are text, bars inline SVG."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
.bars { display: grid; grid-template-columns: max-content minmax(8em, 1fr) max-content; \
grid-auto-flow: dense; gap: .35em .9em; align-items: center; max-width: 75em; \
margin-top: 1em; font-variant-numeric: tabular-nums; }
.bars svg { grid-column: 2; width: 100%; height: 1.4em; display: block; background: var(--card); }
.bars .name { grid-column: 1; } .bars .end { grid-column: 3; }
.bars rect { stroke: var(--back); stroke-width: 1; vector-effect: non-scaling-stroke; }
.bars line { stroke: var(--bad); stroke-width: 2; vector-effect: non-scaling-stroke; }
@media (max-width: 40em) { .bars { grid-template-columns: 1fr; grid-auto-flow: row; } \
.bars .name, .bars .end, .bars svg { grid-column: 1; } .bars .name { margin-top: .5em; } }
"""
_WIDTH = 1000.0
_HEIGHT = 20.0


@dataclass(frozen=True)
class Piece:
    """A part of a bar.

    Attributes:
        name: what it stands for.
        amount: its length.
        color: the number of its colour.
    """

    name: str
    amount: float
    color: int


@dataclass(frozen=True)
class Bar:
    """A bar.

    Attributes:
        name: before it.
        pieces: from the left.
        end: text behind it.
        level: where a line crosses it, such as the plan; None: nowhere.
    """

    name: str
    pieces: Sequence[Piece]
    end: str
    level: float | None = None


def bars(rows: Sequence[Bar], text: Callable[[float], str], level: str = "") -> str:
    """Return bars with their key; empty where there are none.

    Args:
        level: what the line that crosses a bar means.
    """
    if not rows:
        return ""
    most = max(max(_length(bar), bar.level or 0.0) for bar in rows) or 1.0
    parts = "".join(_drawn(bar, most, text) for bar in rows)
    return f'<div class="bars">{parts}</div>{_key(rows, level)}'


def _length(bar: Bar) -> float:
    return sum(piece.amount for piece in bar.pieces)


def _drawn(bar: Bar, most: float, text: Callable[[float], str]) -> str:
    scale = _WIDTH / (most * 1.01)
    shapes = []
    sums = itertools.pairwise([0.0, *itertools.accumulate(each.amount for each in bar.pieces)])
    for piece, (start, stop) in zip(bar.pieces, sums, strict=True):
        if piece.amount > 0:
            what = f"{piece.name}: {text(piece.amount)}"
            shapes.append(
                f'<rect x="{start * scale:.1f}" y="0" width="{(stop - start) * scale:.1f}" '
                f'height="{_HEIGHT:g}" fill="var(--c{piece.color})">'
                f"<title>{escape(what)}</title></rect>"
            )
    if bar.level is not None:
        x = bar.level * scale
        shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT:g}"/>')
    size = f'viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none"'
    picture = f'<svg role="img" aria-label="{escape(bar.name)}" {size}>{"".join(shapes)}</svg>'
    name, end = escape(bar.name), escape(bar.end)
    return f'<span class="name">{name}</span><span class="end">{end}</span>{picture}'


def _key(rows: Iterable[Bar], level: str) -> str:
    names = {piece.name: piece.color for bar in rows for piece in bar.pieces if piece.amount > 0}
    words = "".join(
        f'<span style="background:var(--c{color})"></span>{escape(name)}'
        for name, color in names.items()
    )
    line = f"; the red line is {escape(level)}" if level else ""
    return f'<p class="key">{words}{line}</p>'
