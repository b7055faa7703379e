"""Every pair of features and shapes of the mesh: what one process comes to, or a refusal.

`python benchmarks/matrix.py` runs all cells, and compares bits too.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from axes_cells import CLOSE, Cell, all_cells, covering, on_ranks
from distances import Found, distance

TRAINED = [cell for cell in all_cells() if not cell.why_not]
CELLS = covering(TRAINED)


@pytest.fixture(scope="module")
def alone(ranks) -> Any:
    """What a cell comes to in one process."""
    made: dict[Cell, Found] = {}

    def found(cell: Cell) -> Found:
        if cell not in made:
            made[cell] = on_ranks(ranks(1), cell)
        return made[cell]

    return found


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: " ".join(map(str, cell)))
@pytest.mark.at_most(1)
def test_one_process(ranks, alone: Any, cell: Cell) -> None:
    apart = distance(on_ranks(ranks(cell.num_ranks), cell), alone(cell.alone))
    assert apart.is_within(CLOSE[cell.precision]), apart


def test_cells_cover_all_pairs() -> None:
    fields = range(len(Cell._fields))
    for one, other in itertools.combinations(fields, 2):
        wanted = {(cell[one], cell[other]) for cell in TRAINED}
        assert {(cell[one], cell[other]) for cell in CELLS} == wanted
    assert len(CELLS) <= 40


def test_refusals() -> None:
    """What is refused says why, and nothing else is refused."""
    for cell in all_cells():
        assert bool(cell.refusal) == bool(cell.why_not), cell
        assert cell.why_not in cell.refusal, cell
