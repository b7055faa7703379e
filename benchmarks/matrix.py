"""Every feature on every shape of a mesh: what trains, what is refused, and that no bit is lost.

    python benchmarks/matrix.py                               all 1,512 cells: an hour on 2 cores
    python benchmarks/matrix.py --axes "tp 4" "pp 4" --stages 3 --states disk     some of them
    python benchmarks/matrix.py --show bench-matrix.jsonl --markdown              the table of docs

A cell is a shape of the mesh, a stage of ZeRO, a precision, an optimizer, what is recomputed, and
where states are between uses: it trains a small GPT for 4 steps. It is green if

    its losses, parameters and moments are those of one process: `CLOSE` of tests/dist/axes_cells.py
    it skips the same steps, where fp16 overflows
    recomputing and states elsewhere have changed no bit of them

or refused, with words that are expected. Results go to a file as they come, and a run that was cut
off goes on after them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # zrun without installing it
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "dist"))

import axes_cells
from axes_cells import AXES, CLOSE, STAGES, STATES, Cell, all_cells
from distances import Found, distance, same_bits
from pool import RankPool
from pool import end as end_pools

GREEN, REFUSED, FAILED = "green", "refused", "FAILED"


class Result(NamedTuple):
    """What a cell came to.

    Attributes:
        verdict: `GREEN`, `REFUSED` or `FAILED`.
        note: of a refusal, its words; of a failure, what is wrong.
        of_losses: how far losses are from one process's, as a share.
        of_values: the same of parameters and moments.
    """

    verdict: str
    note: str = ""
    of_losses: float = 0.0
    of_values: float = 0.0


Results = dict[Cell, Result]


def main() -> int:
    """Run the cells, print the table; return 0 if none failed."""
    options = parse()
    results = read(options.show or options.json)
    if options.show is None:
        wanted = [
            cell
            for cell in all_cells()
            if cell.axes in options.axes
            and cell.stage in options.stages
            and cell.states in options.states
        ]
        run([cell for cell in wanted if cell not in results], results, options.json)
        results = {cell: results[cell] for cell in wanted}
    print(markdown(results) if options.markdown else report(results))
    return int(any(result.verdict == FAILED for result in results.values()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=list(STAGES))
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--json", type=Path, default=Path("bench-matrix.jsonl"))
    parser.add_argument("--show", type=Path, help="print the table of an earlier run")
    parser.add_argument("--markdown", action="store_true", help="print it as docs have it")
    return parser.parse_args()


def read(path: Path) -> Results:
    """Return the results of a file; none if there is no such file."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {Cell(*record["cell"]): Result(*record["result"]) for record in records}


def run(cells: Sequence[Cell], results: Results, path: Path) -> None:
    """Train cells, and write what they come to after each.

    Args:
        cells: in the order of their axes.
        results: filled.
    """
    alone = RankPool(1)
    processes: dict[Cell, Found] = {}
    with path.open("a") as file:
        for num_ranks, of_axes in itertools.groupby(cells, lambda cell: cell.num_ranks):
            pool = RankPool(num_ranks)
            bases: dict[Cell, Found] = {}
            for cell in of_axes:
                began = time.monotonic()
                results[cell] = result = judged(cell, alone, pool, processes, bases)
                seconds = time.monotonic() - began
                file.write(json.dumps({"cell": cell, "result": result}) + "\n")
                file.flush()
                line = " ".join(str(each) for each in cell)
                print(f"{line:48} {result.verdict:8} {seconds:5.1f} s", file=sys.stderr, flush=True)
            pool.close()
    alone.close()
    end_pools()


def judged(
    cell: Cell,
    alone: RankPool,
    pool: RankPool,
    processes: dict[Cell, Found],
    bases: dict[Cell, Found],
) -> Result:
    """Train a cell, and compare.

    Args:
        alone: pool of one rank.
        pool: that of the ranks of its axes.
        processes: what one process came to, by cell; filled.
        bases: what cells with all states on the device came to; filled.
    """
    if cell.why_not:
        is_said = cell.why_not in cell.refusal
        return Result(REFUSED if is_said else FAILED, cell.refusal or "is not refused")
    try:
        found = axes_cells.on_ranks(pool, cell)
        one = cached(processes, cell.alone, alone)
        apart = distance(found, one)
        bases.setdefault(cell, found)
        base = cached(bases, cell.base, pool)
    except AssertionError as error:
        return Result(FAILED, str(error))
    if not apart.is_within(CLOSE[cell.precision]):
        return Result(FAILED, "differs from one process", *apart)
    if not same_bits(found, base):
        return Result(FAILED, f"has other bits than {cell.base}", *apart)
    return Result(GREEN, "", *apart)


def cached(made: dict[Cell, Found], cell: Cell, pool: RankPool) -> Found:
    """Return what a cell comes to; it is trained once."""
    if cell not in made:
        made[cell] = axes_cells.on_ranks(pool, cell)
    return made[cell]


def report(results: Results) -> str:
    """Return the table, what is refused and why, and what failed."""
    head = [f"zero {stage}" for stage in STAGES]
    lines = [f"{'axes':18}" + "".join(f"{each:>24}" for each in head)]
    for axes in AXES:
        cells = [
            shown(count)
            for stage in STAGES
            if (count := verdicts(results, axes=axes, stage=stage)).total()
        ]
        if cells:
            lines.append(f"{axes:18}" + "".join(f"{each:>24}" for each in cells))
    lines += ["", *notes(results)]
    for cell, result in results.items():
        if result.verdict == FAILED:
            lines.append(f"FAILED {' '.join(map(str, cell))}: {result.note} {result[2:]}")
    return "\n".join(lines)


def markdown(results: Results) -> str:
    """Return the table as docs have it."""
    lines = [
        "| mesh | " + " | ".join(f"ZeRO {stage}" for stage in STAGES) + " |",
        "|---|" + "---|" * len(STAGES),
    ]
    for axes in AXES:
        cells = [shown(verdicts(results, axes=axes, stage=stage)) for stage in STAGES]
        lines.append(f"| {axes} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"- {note}" for note in notes(results))])


def verdicts(results: Results, **fields: Any) -> Counter[str]:
    """Count verdicts of the cells with these fields."""
    return Counter(
        result.verdict
        for cell, result in results.items()
        if all(getattr(cell, name) == value for name, value in fields.items())
    )


def shown(count: Counter[str]) -> str:
    """Return a count of verdicts as text."""
    return ", ".join(f"{count[each]} {each}" for each in (GREEN, REFUSED, FAILED) if count[each])


def notes(results: Results) -> Iterator[str]:
    """Yield how far cells are from one process at most, and what is refused and why."""
    for precision in CLOSE:
        green = [
            result
            for cell, result in results.items()
            if cell.precision == precision and result.verdict == GREEN
        ]
        if green:
            of_losses = max(result.of_losses for result in green)
            of_values = max(result.of_values for result in green)
            yield (
                f"{precision}: losses within {of_losses:.1e} of one process's, parameters and "
                f"moments within {of_values:.1e} of the largest of their tensor"
            )
    refusals = Counter(result.note for result in results.values() if result.verdict == REFUSED)
    for note, count in refusals.items():
        yield f"{count} refused: {note}"


if __name__ == "__main__":
    sys.exit(main())
