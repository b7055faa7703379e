"""Curves in a terminal: two by four dots in each character, with numbers beside the axis.

5.30 ┤⡇
     │⠸⡀
     │ ⠑⢄⣀
1.93 ┤    ⠉⠉⠒⠤⠤⠤⠤⠤
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from zrun.watch.thinned import Point

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a character, by column and row
_BLANK = 0x2800
_LEAST_PLOT = 8  # columns beside the numbers
_WIDE = 20.0  # times the lowest value: from there on the axis is logarithmic


def plot(
    points: Sequence[Point],
    width: int,
    height: int,
    text: Callable[[float], str],
    *,
    ascii_only: bool = False,
    span: tuple[int, int] | None = None,
) -> list[str]:
    """Draw a series; nothing where there are no numbers, or no room.

    Args:
        points: by step; what is not finite is a gap.
        width, height: in characters, with the numbers of the axis.
        span: the first step and the last one of the whole width; None: those of the points.

    Returns:
        Lines of at most `width` characters.
    """
    values = [value for _, value in points if math.isfinite(value)]
    if not values or height < 2:
        return []
    low, high = min(values), max(values)
    labels = [text(high), text(low)]
    margin = max(map(len, labels))
    columns = width - margin - 2
    if columns < _LEAST_PLOT:
        return []
    is_log = low > 0 and high / low > _WIDE
    grid = _Grid(columns, height, ascii_only)
    first, last = span or (points[0][0], points[-1][0])
    before: tuple[int, int] | None = None
    for step, value in points:
        if not math.isfinite(value):
            before = None
            continue
        x = round((step - first) / max(1, last - first) * (grid.columns - 1))
        y = round(_place(value, low, high, is_log=is_log) * (grid.rows - 1))
        if before != (x, y):  # many points of a long run are in one dot
            grid.line(before or (x, y), (x, y))
            before = x, y
    return [
        f"{_label(number, height, labels):>{margin}} {_edge(number, height, ascii_only)}{line}"
        for number, line in enumerate(grid.lines())
    ]


def _place(value: float, low: float, high: float, *, is_log: bool) -> float:
    """Return where a value is, from 1 at the bottom to 0 at the top."""
    if high <= low:
        return 0.5
    if is_log:
        low, high, value = map(math.log, (low, high, value))
    return (high - value) / (high - low)


def _label(number: int, height: int, labels: Sequence[str]) -> str:
    return {0: labels[0], height - 1: labels[1]}.get(number, "")


def _edge(number: int, height: int, ascii_only: bool) -> str:
    has_label = number in (0, height - 1)
    if ascii_only:
        return "+" if has_label else "|"
    return "┤" if has_label else "│"


class _Grid:
    """The dots of a picture.

    Attributes:
        columns, rows: of dots.
    """

    def __init__(self, columns: int, rows: int, ascii_only: bool) -> None:
        """Begin without any; sizes are in characters."""
        self._wide, self._high = (1, 1) if ascii_only else (2, 4)
        self._ascii_only = ascii_only
        self._cells = [[0] * columns for _ in range(rows)]
        self.columns = columns * self._wide
        self.rows = rows * self._high

    def line(self, begin: tuple[int, int], end: tuple[int, int]) -> None:
        """Set the dots from one to another."""
        (x0, y0), (x1, y1) = begin, end
        if x0 == x1:
            for y in range(min(y0, y1), max(y0, y1) + 1):
                self._set(x0, y)
            return
        count = max(abs(x1 - x0), abs(y1 - y0))
        for number in range(count + 1):
            share = number / count
            self._set(round(x0 + share * (x1 - x0)), round(y0 + share * (y1 - y0)))

    def _set(self, x: int, y: int) -> None:
        if not 0 <= x < self.columns:
            return  # before or behind the span
        row, column = y // self._high, x // self._wide
        self._cells[row][column] |= 1 if self._ascii_only else _DOTS[x % 2][y % 4]

    def lines(self) -> list[str]:
        """Return the picture, without blanks at the ends of its lines."""
        return ["".join(map(self._character, row)).rstrip() for row in self._cells]

    def _character(self, dots: int) -> str:
        if self._ascii_only:
            return "*" if dots else " "
        return chr(_BLANK + dots) if dots else " "
