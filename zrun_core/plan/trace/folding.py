"""Tables of whole numbers in which runs of rows repeat, written once: `fold`, `unfold`.

A deep model does in each block what it did in the one before, with other tensors and other modules:
each number is that of a period before, or differs from it by what it differed then. So a repeated
run is its first period, what each number of it grows by, and how often. Forty blocks take the room
of one: the four traces of a model of 78 blocks (jobs/turing-nlg-17b.yaml) take 353 kB as folded
JSON, and 3.6 MB without.

    tensor 5, block 0     tensor 9, block 1     tensor 13, block 2
    tensor 6, block 0     tensor 10, block 1    tensor 14, block 2

    is 3 times [5 6] [0 0], growing by 4 and by 1: [3, [[5, 6], [0, 0]], [4, 1]]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int64]  # [rows, columns]
_LEAST = 3  # periods: with two, any difference would be a constant one
_LOOKS = 64  # marks after a row, of which one may end its period


def fold(table: Table, marks: Sequence[int]) -> list[list[Any]]:
    """Return `table` as runs: [times, columns of the first period, growth of each column].

    Args:
        table: [rows, columns].
        marks: rows at which a period may begin, in order.
    """
    found: list[list[Any]] = []
    done = 0
    for start, period, times in _repeats(table, marks):
        if done < start:
            found.append([1, table[done:start].T.tolist(), []])
        first = table[start : start + period]
        growth = table[start + period : start + 2 * period] - first
        found.append([times, first.T.tolist(), [_short(column) for column in growth.T]])
        done = start + period * times
    if done < len(table):
        found.append([1, table[done:].T.tolist(), []])
    return found


def unfold(runs: Sequence[Sequence[Any]], columns: int) -> Table:
    """Return the table that `fold` was given.

    Raises:
        ValueError: it is no such thing.
    """
    parts: list[Table] = [np.zeros((0, columns), np.int64)]
    for times, values, growths in runs:
        first: Any = np.array(values, dtype=np.int64)
        if first.ndim != 2 or len(first) != columns:
            raise ValueError(f"a run of {len(first)} columns, not {columns}")
        growth = np.zeros(first.shape, dtype=np.int64)
        for column, each in enumerate(growths):
            growth[column] = each
        run: Table = first + np.arange(times)[:, None, None] * growth
        parts.append(run.transpose(0, 2, 1).reshape(-1, columns))
    return np.concatenate(parts)


def _short(column: NDArray[np.int64]) -> int | list[int]:
    """Return one number where all are equal."""
    if (column == column[0]).all():
        return int(column[0])
    values: list[int] = column.tolist()
    return values


def _repeats(table: Table, marks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, rows of a period, periods) of each repeated run; runs do not overlap."""
    done = 0
    for number, start in enumerate(marks):
        if start < done:
            continue
        periods = [after - start for after in marks[number + 1 : number + 1 + _LOOKS]]
        best_length = 0
        best_period = 0
        for period in periods:  # from short to long: of equally long runs the shortest period wins
            times = _times(table, start, period)
            if times > 1 and period * times > best_length:
                best_length = period * times
                best_period = period
        if best_length:
            yield start, best_period, best_length // best_period
            done = start + best_length


def _times(table: Table, start: int, period: int) -> int:
    """Return how many periods from `start` on grow alike; 1: too few to call it a period."""
    if start + _LEAST * period > len(table):
        return 1
    row, once, twice = (table[start + n * period] for n in range(3))
    if not np.array_equal(once - row, twice - once):  # most are told by their first row
        return 1
    rest = table[start:]
    whole = len(rest) // period
    growth = np.diff(rest[: whole * period].reshape(whole, period, -1), axis=0)
    same = (growth == growth[0]).all(axis=(1, 2))
    num_alike = len(same) if same.all() else int(same.argmin())
    times = 1 + num_alike
    return times if times >= _LEAST else 1
