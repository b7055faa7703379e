"""Tables in which runs of rows repeat are written once, and read as they were."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from zrun_core.plan.trace.folding import fold, unfold


def table(blocks: int) -> tuple[np.ndarray, list[int]]:
    """Rows before, of each block, after; a column counts, one names the block, one is the same."""
    rows = [(number, -1, 5) for number in range(4)]
    marks = []
    for block in range(blocks):
        marks.append(len(rows))
        rows += [(100 + 10 * block + row, block, row) for row in range(6)]
    return np.array([*rows, (7, -1, 7)], dtype=np.int64), marks


def test_a_repeated_block_is_written_once() -> None:
    short, long = (fold(*table(blocks)) for blocks in (10, 400))
    assert [run[0] for run in long] == [1, 400, 1]
    assert len(json.dumps(long)) <= len(json.dumps(short)) + 2
    assert (unfold(json.loads(json.dumps(long)), 3) == table(400)[0]).all()


def test_any_table_comes_back() -> None:
    draw = random.Random(0)
    for _ in range(200):
        rows = np.array(
            [[draw.randrange(3) for _ in range(2)] for _ in range(draw.randrange(40))],
            dtype=np.int64,
        )
        rows = np.concatenate([rows.reshape(-1, 2)] * draw.randrange(1, 5))
        marks = sorted(draw.sample(range(len(rows)), min(len(rows), 6)))
        assert (unfold(fold(rows, marks), 2) == rows).all()


def test_something_else_is_no_table() -> None:
    with pytest.raises(ValueError, match="a run of 2 columns, not 3"):
        unfold([[1, [[1], [2]], []]], 3)
