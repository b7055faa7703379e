"""Charts over steps as inline SVG: lines, and amounts on top of each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Self

from zrun.watch import formatting
from zrun.watch.thinned import Point

STYLE = """
.charts { display: grid; gap: 1em; \
grid-template-columns: repeat(auto-fill, minmax(min(100%, 24em), 1fr)); }
figure { margin: 0; min-width: 0; padding: .8em 1em .4em; border-radius: 8px; \
background: var(--card); border: 1px solid var(--line); }
figcaption { display: flex; flex-wrap: wrap; align-items: baseline; gap: .1em 1em; }
figcaption span { font-size: .87em; color: var(--soft); }
figcaption i { display: inline-block; width: 1.1em; height: .2em; margin-right: .4em; \
vertical-align: .25em; border-radius: 1px; }
figure svg { display: block; width: 100%; height: auto; }
figure text { font-size: 13px; fill: var(--soft); }
.grid { stroke: var(--line); } .bad { stroke: var(--bad); stroke-width: 1.5; }
.mark { stroke: var(--soft); stroke-dasharray: 2 3; }
.line { fill: none; stroke-linejoin: round; }
.level { stroke-width: 1.4; stroke-dasharray: 6 4; } .plan { stroke: var(--text); }
.area { fill-opacity: .85; }
"""
_WIDTH = 400
_HEIGHT = 200
_LEFT = 68
_RIGHT = 12
_TOP = 12
_BOTTOM = 24
_TICKS = 5
_DIGITS = 3
_MOST_DIGITS = 14
_GAP = 8.0  # between two numbers below an axis
_HALF_DIGIT = 4.1  # of its width
_WIDE = 20.0  # times the lowest value: from there on an axis is logarithmic


Text = Callable[[float, int], str]


@dataclass(frozen=True)
class Line:
    """One series of a chart.

    Attributes:
        level: a value that is drawn as a dashed line of the same colour, such as the plan.
        name: in the key; empty: it has none.
        color: the number of its colour.
        has_dots: its points lie so far apart that each is shown.
        width: of the line.
    """

    name: str
    points: Sequence[Point]
    color: int = 0
    level: float | None = None
    has_dots: bool = False
    width: float = 1.6

    @property
    def values(self) -> list[float]:
        """The numbers that are drawn."""
        return [value for _, value in self.points if math.isfinite(value)]


@dataclass(frozen=True)
class _Axis:
    """From a value to its place between 0 and 1."""

    low: float
    high: float
    is_log: bool

    def place(self, value: float) -> float:
        if self.is_log:
            low, high, value = map(math.log10, (self.low, self.high, value))
            return (value - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, unit: float) -> list[float]:
        """Return round values on the axis, in multiples of `unit`."""
        if not self.is_log:
            return _round_values(self.low, self.high, unit)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        every = max(1, math.ceil((last - first) / _TICKS))
        steps = [10.0**power for power in range(first, last + 1, every)]
        if last - first <= 3:
            steps = [part * each for each in steps for part in (1, 2, 5)]
        return [each for each in steps if self.low <= each <= self.high]


def chart(
    title: str,
    lines: Iterable[Line],
    text: Text,
    *,
    unit: float = 1.0,
    from_zero: bool = False,
    marks: Sequence[int] = (),
) -> str:
    """Return a chart with its title and key; empty where there is nothing to draw.

    Args:
        text: for a value on the axis, with so many digits.
        unit: of the values, of which the axis shows round numbers.
        marks: steps after which the run was started again.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    values = [value for line in lines for value in line.values]
    levels = [line.level for line in lines if line.level is not None]
    steps = [step for line in lines for step, _ in line.points]
    paper = _Paper.of([*values, *levels], steps, from_zero)
    parts = [*paper.grid(text, unit), *paper.marks(marks)]
    for line in lines:
        parts += _drawn(line, paper)
    return _figure(
        title, [_key(line.name, line.color) for line in lines if line.name], parts, paper
    )


def stack(
    title: str,
    layers: Sequence[tuple[str, int]],
    points: Sequence[tuple[int, Sequence[float]]],
    text: Text,
    *,
    unit: float = 1.0,
    level: float | None = None,
    marks: Sequence[int] = (),
) -> str:
    """Return a chart of amounts on top of each other; empty where there is nothing to draw.

    Args:
        layers: names and numbers of colours, from below.
        points: steps, each with an amount for each layer.
        text: for a value on the axis, with so many digits.
        unit: of the values, of which the axis shows round numbers.
        level: a sum that is drawn as a dashed line, such as the plan.
        marks: steps after which the run was started again.
    """
    if not points:
        return ""
    if len(points) == 1:  # an area needs a width
        points = [points[0], (points[0][0] + 1, points[0][1])]
    sums = [(step, [0.0, *itertools.accumulate(amounts)]) for step, amounts in points]
    highest = [each[-1] for _, each in sums]
    paper = _Paper.of([*highest, level or 0.0], [step for step, _ in sums], from_zero=True)
    parts = paper.grid(text, unit)
    keys = []
    for number, (name, color) in enumerate(layers):
        if not any(amounts[number] for _, amounts in points):
            continue
        keys.append(_key(name, color))
        edge = [(step, each[number]) for step, each in sums]
        edge += [(step, each[number + 1]) for step, each in reversed(sums)]
        path = paper.path(edge)
        parts.append(f'<polygon class="area" fill="var(--c{color})" points="{path}"/>')
    if level is not None:
        parts.append(paper.level("level plan", level))
    return _figure(title, keys, [*parts, *paper.marks(marks)], paper)


def _figure(title: str, keys: Sequence[str], parts: Sequence[str], paper: _Paper) -> str:
    head = [f"<h3>{escape(title)}</h3>", *keys]
    if paper.axis.is_log:
        head.append("<span>logarithmic</span>")
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    picture = f'<svg role="img" aria-label="{escape(title)}" {size}>{"".join(parts)}</svg>'
    return f"<figure><figcaption>{''.join(head)}</figcaption>{picture}</figure>"


@dataclass(frozen=True)
class _Paper:
    """Where on a picture steps and values are.

    Attributes:
        axis: of values.
        span: of steps.
    """

    axis: _Axis
    span: _Axis

    @classmethod
    def of(cls, values: Sequence[float], steps: Sequence[int], from_zero: bool) -> Self:
        """Return the paper on which all these values and steps have room."""
        span = _Axis(min(steps), max(max(steps), min(steps) + 1), is_log=False)
        return cls(_axis(values, from_zero), span)

    def x(self, step: float) -> float:
        return _LEFT + self.span.place(step) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - self.axis.place(value) * (_HEIGHT - _TOP - _BOTTOM)

    def path(self, points: Iterable[Point]) -> str:
        return " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in points)

    def level(self, name: str, value: float, color: str = "") -> str:
        """Return a line from side to side."""
        y = self.y(value)
        stroke = f' stroke="{color}"' if color else ""
        place = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
        return f'<line class="{name}"{stroke} {place}/>'

    def marks(self, steps: Sequence[int]) -> list[str]:
        """Return a line after each step at which the run was started again."""
        return [
            _stroke(
                "mark",
                self.x(step),
                _TOP,
                self.x(step),
                _HEIGHT - _BOTTOM,
                f"resumed after step {step}",
            )
            for step in steps
            if self.span.low <= step <= self.span.high
        ]

    def grid(self, text: Text, unit: float) -> list[str]:
        """Return the lines behind a chart, with the numbers beside them."""
        parts = []
        ticks = self.axis.ticks(unit)
        for tick, words in zip(ticks, _labels(ticks, text), strict=True):
            parts.append(_stroke("grid", _LEFT, self.y(tick), _WIDTH - _RIGHT, self.y(tick)))
            parts.append(_text(_LEFT - 6, self.y(tick) + 4, words, "end"))
        steps = sorted({math.ceil(tick) for tick in self.span.ticks(1.0)})
        end = 0.0  # of the label before
        for step in steps:
            words = f"{step:,}"
            half = _HALF_DIGIT * len(words)
            x = min(self.x(step), _WIDTH - 4 - half)
            if x - half >= end:
                parts.append(_text(x, _HEIGHT - 7, words, "middle"))
                end = x + half + _GAP
        return parts


def _axis(values: Sequence[float], from_zero: bool) -> _Axis:
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if from_zero:
        return _Axis(0.0, high * 1.06 or 1.0, is_log=False)
    if low > 0 and high / low > _WIDE:
        return _Axis(low / 1.1, high * 1.1, is_log=True)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    if 0 <= low < room:
        return _Axis(0.0, high + room, is_log=False)
    return _Axis(low - room, high + room, is_log=False)


def _round_values(low: float, high: float, unit: float) -> list[float]:
    """Return about five multiples of 1, 2 or 5 times a power of ten, in units."""
    least = (high - low) / unit / _TICKS
    power = 10.0 ** math.floor(math.log10(least))
    each = unit * next(part * power for part in (1, 2, 5, 10) if part * power >= least * 0.999)
    return [each * n for n in range(math.ceil(low / each), math.floor(high / each) + 1)]


def _labels(ticks: Sequence[float], text: Text) -> list[str]:
    """Return the numbers beside an axis, with as many digits as tell each from the next."""
    labels = []
    for digits in range(_DIGITS, _MOST_DIGITS):
        labels = [text(tick, digits) for tick in ticks]
        if len(set(labels)) == len(labels):
            break
    return labels


def _drawn(line: Line, paper: _Paper) -> list[str]:
    """Return a series: where values are no numbers it has a gap, and the axis a red mark."""
    parts = []
    color = f"var(--c{line.color})"
    for is_number, group in itertools.groupby(line.points, lambda point: math.isfinite(point[1])):
        points = list(group)
        if not is_number:
            base = _HEIGHT - _BOTTOM
            parts += [
                _stroke("bad", x, base - 9, x, base, f"step {step}: {value}")
                for x, step, value in ((paper.x(step), step, value) for step, value in points)
            ]
            continue
        if len(points) > 1:
            parts.append(
                f'<polyline class="line" stroke="{color}" stroke-width="{line.width:.1f}" '
                f'points="{paper.path(points)}"/>'
            )
        if len(points) == 1 or line.has_dots:
            parts += [
                f'<circle cx="{paper.x(step):.1f}" cy="{paper.y(value):.1f}" r="2.4" '
                f'fill="{color}"><title>step {step}: {value:.6g}</title></circle>'
                for step, value in points
            ]
    if line.level is not None:
        parts.append(paper.level("level", line.level, color))
    return parts


def _key(name: str, color: int) -> str:
    return f'<span><i style="background:var(--c{color})"></i>{escape(name)}</span>'


def _stroke(name: str, x1: float, y1: float, x2: float, y2: float, what: str = "") -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    if not what:
        return f'<line class="{name}" {place}/>'
    return f'<line class="{name}" {place}><title>{escape(what)}</title></line>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def short(value: float, digits: int = _DIGITS) -> str:
    """Return a number on an axis: `12.5k`, `0.003`, `1e-05`."""
    if abs(value) < 1000:
        return f"{value:.{digits}g}"
    if digits == _DIGITS:
        return formatting.count(value).replace(".0", "")
    return f"{value:,.{digits}g}"
