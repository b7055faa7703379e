"""Tensor parallelism: zrun beside torch's DTensor and a loop by hand, two ranks on a CPU.

    python benchmarks/tensor_parallel.py                       about 3 minutes on 2 quiet cores
    python benchmarks/tensor_parallel.py --size 50m
    python benchmarks/tensor_parallel.py --show results.json   print an earlier run again

Systems take turns, all with the heap and the environment of zrun's workers, and ratios are taken
inside each round. `bare` is the loop with the same slices and no framework; `plain` is one process
with one thread, which has all of the model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import launch
from cases import SHAPES, Case
from render import render
from turns import Runs, cells, exit_code, ratio, run_case, step_times, take_turns, without_failures

HERE = Path(__file__).resolve().parent
RANKS = 2
SYSTEMS = ("plain", "bare", "dtensor", "zrun", "zrun-sequence")


def main() -> int:
    """Measure, print, and write the results."""
    options = parse()
    if options.show:
        print(report(json.loads(options.show.read_text())["runs"]))
        return 0
    settings = launch.Settings(
        options.size, 1, options.warmup, 600.0, sys.executable, heap=options.heap
    )

    def run(name: str) -> dict[str, Any]:
        case = Case(name, bf16=False, ranks=1 if name == "plain" else RANKS)
        return run_case(HERE / "tensor_worker.py", case, settings, options.steps)

    runs = take_turns(SYSTEMS, options.rounds, run, options.json)
    print(report(runs))
    return exit_code(runs)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SHAPES, default="10m")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="of each run, warm-up included")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not timed")
    parser.add_argument("--heap", choices=launch.HEAPS, default="kept")
    parser.add_argument("--json", type=Path, default=Path("bench-tensor-parallel.json"))
    parser.add_argument("--show", type=Path, help="print the table of an earlier run")
    return parser.parse_args()


def report(runs: Runs) -> str:
    """Return what a step of each system takes, beside the loop by hand and DTensor."""
    good = without_failures(runs)
    rows = []
    for name, records in good.items():
        row = [name, *step_times(records)]
        for base in ("bare", "dtensor"):
            row += cells(ratio(good, name, base), ".3f")
        row.append(f"{records[0]['losses'][-1]:.6f}")
        row.append(str(sum(record["clean"] for record in records)))
        rows.append(row)
    columns = ["system", "ms/step", "range", "CPU ms", "/ bare", "range", "/ DTensor", "range"]
    return "\n" + render([*columns, "last loss", "clean"], rows)


if __name__ == "__main__":
    sys.exit(main())
