"""A table of text. Apart from the rest, because `gpu.py` runs where little is installed."""

from __future__ import annotations

from collections.abc import Sequence


def render(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text: the first column to the left, the others to the right."""
    table = [list(columns), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]

    def line(row: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        return "  ".join([row[0].ljust(len(first)), *others]).rstrip()

    head, *body = map(line, table)
    return "\n".join([head, "-" * len(head), *body])
