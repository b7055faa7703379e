"""A checkpoint of any axes goes on with any others: shapes of ranks and ZeRO stages, as a table.

    make test-saves                                             prints the table: 6 minutes
    python tests/dist/checkpoint/saves_table.py --from "tp 4"   checkpoints of one shape only

A row's shape trains one step of a small tied model with AdamW, and saves it. Each column's shape
begins with that checkpoint, and trains another step: `equal` where all weights and moments that it
begins with are equal to the last bit, and the loss is the one of the row's own next step to 1e-6.
Under `export`: the checkpoint, as safetensors, is loaded into the plain model, of equal weights.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what tests of ranks share
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # zrun without installing it

from pool import RankPool
from pool import end as end_pools
from runs import losses
from test_tensor_saves import SHAPES, Case, begun, differing, exported, num_ranks, trained, values

STAGES = (1, 3)
CASES: list[Case] = list(itertools.product(SHAPES, STAGES))


def row(case: Case, pools: dict[int, RankPool]) -> list[str]:
    """Return the cells of a row.

    Args:
        pools: by their number of ranks.
    """
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base, "was")
        found = trained(pools[num_ranks(case[0])], folder, case)
        cells = ["DIFFERS" if exported(folder, found) else "equal"]
        before = values(found)
        own = trained(pools[num_ranks(case[0])], Path(base, "own"), case, folder, steps=2)
        expected = losses(own[0])[2]
        for number, other in enumerate(CASES):
            into = Path(base, str(number))
            rest = trained(pools[num_ranks(other[0])], into, other, folder, steps=2)
            apart = abs(losses(rest[0])[2] / expected - 1)
            wrong = differing(begun(rest), before)
            if wrong:
                cells.append(f"{len(wrong)} differ")
            else:
                cells.append("equal" if apart <= 1e-6 else f"{apart:.0e}")
    return cells


def main() -> int:
    """Print the table; return 0 if all cells are equal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--from", dest="shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    letters = [f"{chr(ord('a') + list(SHAPES).index(shape))}{stage}" for shape, stage in CASES]
    print(f"{'':4}{'':17} {'zero':4} {'export':>7} " + " ".join(f"{each:>7}" for each in letters))
    is_good = True
    pools = {size: RankPool(size) for size in {num_ranks(shape) for shape in SHAPES}}
    for letter, case in zip(letters, CASES, strict=True):
        if case[0] not in options.shapes:
            continue
        cells = row(case, pools)
        is_good = is_good and all(cell == "equal" for cell in cells)
        shown = " ".join(f"{cell:>7}" for cell in cells)
        print(f"{letter:4}{case[0]:17} {case[1]:4} {shown}", flush=True)
    for pool in pools.values():
        pool.close()
    end_pools()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
