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
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import launch
from cases import SHAPES, Case
from pipelines import Runs, ratio
from render import render
from table import Spread

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
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    for turn in range(options.rounds):
        for name in SYSTEMS if turn % 2 == 0 else reversed(SYSTEMS):
            record = run(name, settings, options.steps) | {"round": turn}
            runs[name].append(record)
            print(f"round {turn + 1}  {name:14} {describe(record)}", file=sys.stderr, flush=True)
            saved = {"command": " ".join(sys.argv), "runs": runs}
            options.json.write_text(json.dumps(saved))
    print(report(runs))
    return int(any("error" in record for records in runs.values() for record in records))


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


def run(name: str, settings: launch.Settings, steps: int) -> dict[str, Any]:
    """Run a system once; the record has `error` if it failed."""
    case = Case(name, bf16=False, ranks=1 if name == "plain" else RANKS)
    with tempfile.TemporaryDirectory(prefix="zrun-bench-") as folder:
        ranks, error = launch.run_ranks(
            HERE / "tensor_worker.py", case, settings, steps, Path(folder)
        )
    return {"error": error} if error else of_ranks(ranks, settings.warmup, os.cpu_count() or 1)


def of_ranks(ranks: Sequence[Mapping[str, Any]], warmup: int, cores: int) -> dict[str, Any]:
    """Return one record of all ranks: the slowest one's times, the first one's losses."""
    times, busy = (
        [max(each) for each in zip(*(rank[key] for rank in ranks), strict=True)]
        for key in ("times", "busy")
    )
    own = [sum(each) for each in zip(*(rank["cpu"] for rank in ranks), strict=True)]
    foreign = [max(0.0, b - c) / (cores * t) for b, c, t in zip(busy, own, times, strict=True)]
    clean = [
        step for step, share in enumerate(foreign) if step >= warmup and share < launch.CLEAN_SHARE
    ]
    timed = clean if len(clean) >= launch.LEAST_CLEAN else list(range(warmup, len(times)))
    return {
        "timed": [times[step] for step in timed],
        "cpu": [own[step] for step in timed],
        "clean": len(clean),
        "losses": ranks[0]["losses"],
    }


def describe(record: Mapping[str, Any]) -> str:
    """Return one line about one run."""
    if "error" in record:
        return f"FAILED: {record['error']}"
    step = 1e3 * statistics.median(record["timed"])
    return f"{step:6.0f} ms, loss {record['losses'][-1]:.6f}, {record['clean']} clean steps"


def report(runs: Runs) -> str:
    """Return what a step of each system takes, beside the loop by hand and DTensor."""
    good = {
        name: [record for record in records if "error" not in record]
        for name, records in runs.items()
    }
    good = {name: records for name, records in good.items() if records}
    rows = []
    for name, records in good.items():
        step = Spread.of(1e3 * seconds for record in records for seconds in record["timed"])
        assert step is not None
        on_cores = statistics.median(1e3 * each for record in records for each in record["cpu"])
        row = [name, f"{step.median:.0f}", f"{step.low:.0f}-{step.high:.0f}", f"{on_cores:.0f}"]
        for base in ("bare", "dtensor"):
            found = ratio(good, name, base)
            row += ["", ""]
            if found is not None:
                row[-2:] = [f"{found.median:.3f}", f"{found.low:.3f}-{found.high:.3f}"]
        row.append(f"{records[0]['losses'][-1]:.6f}")
        row.append(str(sum(record["clean"] for record in records)))
        rows.append(row)
    columns = ["system", "ms/step", "range", "CPU ms", "/ bare", "range", "/ DTensor", "range"]
    return "\n" + render([*columns, "last loss", "clean"], rows)


if __name__ == "__main__":
    sys.exit(main())
