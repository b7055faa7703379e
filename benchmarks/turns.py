"""Systems that take turns: their runs round by round, and ratios inside each round.

runs = take_turns(systems, options.rounds, run, options.json)
ratio(runs, "zrun", "bare")     # of a step, the median of the rounds and their range
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import launch
from cases import Case
from table import Spread

Runs = Mapping[str, Sequence[dict[str, Any]]]  # by system, a record of each round


def take_turns(
    systems: Sequence[str], rounds: int, run: Callable[[str], dict[str, Any]], path: Path
) -> Runs:
    """Return a record of each system and round. They are written after each run.

    Args:
        systems: by name; every other round begins with the last one.
        run: runs one system; its record has `error` if it failed.
    """
    width = max(map(len, systems))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for turn in range(rounds):
        for name in systems if turn % 2 == 0 else reversed(systems):
            record = run(name) | {"round": turn}
            runs[name].append(record)
            line = f"round {turn + 1}  {name:{width}} {describe(record)}"
            print(line, file=sys.stderr, flush=True)
            path.write_text(json.dumps({"command": " ".join(sys.argv), "runs": runs}))
    return runs


def run_case(worker: Path, case: Case, settings: launch.Settings, steps: int) -> dict[str, Any]:
    """Run a case once in processes that `worker` is the script of; see `of_ranks`."""
    with tempfile.TemporaryDirectory(prefix="zrun-bench-") as folder:
        ranks, error = launch.run_ranks(worker, case, settings, steps, Path(folder))
    return {"error": error} if error else of_ranks(ranks, settings.warmup, os.cpu_count() or 1)


def of_ranks(ranks: Sequence[Mapping[str, Any]], warmup: int, cores: int) -> dict[str, Any]:
    """Return one record of all ranks: the slowest one's times, the last one's losses.

    Args:
        ranks: what each has measured: see `worker.measure_steps`.
        warmup: first steps that are not timed.
        cores: of the machine, to tell steps that other programs disturbed.
    """
    times = [max(each) for each in zip(*(rank["times"] for rank in ranks), strict=True)]
    busy = [max(each) for each in zip(*(rank["busy"] for rank in ranks), strict=True)]
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
        "losses": ranks[-1]["losses"],
        "schedules": [[rank["actions"][step] for rank in ranks] for step in timed],
    }


def describe(record: Mapping[str, Any]) -> str:
    """Return one line about one run."""
    if "error" in record:
        return f"FAILED: {record['error']}"
    step = 1e3 * statistics.median(record["timed"])
    return f"{step:6.0f} ms, loss {record['losses'][-1]:.6f}, {record['clean']} clean steps"


def without_failures(runs: Runs) -> Runs:
    """Return the records of runs that ended, of systems that have any."""
    good = {
        name: [record for record in records if "error" not in record]
        for name, records in runs.items()
    }
    return {name: records for name, records in good.items() if records}


def exit_code(runs: Runs) -> int:
    """Return 1 if a run failed."""
    return int(any("error" in record for records in runs.values() for record in records))


def step_times(records: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    """Return the milliseconds of a step, their range, and those on cores."""
    step = Spread.of(1e3 * seconds for record in records for seconds in record["timed"])
    on_cores = statistics.median(1e3 * each for record in records for each in record["cpu"])
    return *cells(step, ".0f"), f"{on_cores:.0f}"


def ratio(runs: Runs, name: str, base: str) -> Spread | None:
    """Return the step of a system in units of a base's, each in its own round."""
    bases = {record["round"]: record for record in runs.get(base, ())}
    return Spread.of(
        statistics.median(record["timed"]) / statistics.median(bases[record["round"]]["timed"])
        for record in runs[name]
        if record["round"] in bases
    )


def cells(found: Spread | None, digits: str) -> tuple[str, str]:
    """Return a median and its range, as text."""
    if found is None:
        return "", ""
    return f"{found.median:{digits}}", f"{found.low:{digits}}-{found.high:{digits}}"
