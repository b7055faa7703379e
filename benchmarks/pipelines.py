"""Pipelines: zrun's schedules beside torch's own pipelining and DeepSpeed's, two stages on a CPU.

    python benchmarks/pipelines.py                         about 4 minutes on 2 quiet cores
    python benchmarks/pipelines.py --size 10m-micro-short  little but what actions cost
    python benchmarks/pipelines.py --systems plain/8,zrun-gpipe/8,plain/16,zrun-gpipe/16
    python benchmarks/pipelines.py --actions               CPU time of single actions, 1 minute
    python benchmarks/pipelines.py --show results.json     print an earlier run again

`zrun-1f1b/8` is a step of 8 micro-batches; `plain/8` one process without stages. Systems take
turns, all with the heap and the environment of zrun's workers, and ratios are taken inside each
round. For zrun a second table compares the clock with its own actions: the same lists with the
time of each action, and messages that take none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import launch
from cases import SHAPES, Case
from render import render
from table import Spread, number
from turns import (
    Runs,
    cells,
    exit_code,
    ratio,
    run_case,
    step_times,
    take_turns,
    without_failures,
)

HERE = Path(__file__).resolve().parent
STAGES = 2
NAMES = (
    *("plain", "torch-1f1b", "torch-gpipe", "ds"),
    *("zrun-1f1b", "zrun-gpipe", "zrun-zero_bubble"),
)
SYSTEMS = (
    "zrun-1f1b/8",
    "torch-1f1b/8",
    "ds/8",
    "zrun-zero_bubble/8",
    "zrun-gpipe/8",
    "torch-gpipe/8",
)


def main() -> int:
    """Measure, print, and write the results."""
    options = parse()
    if options.show:
        print(report(json.loads(options.show.read_text())["runs"]))
        return 0
    if options.actions:
        return time_actions(options)
    systems = available(options.systems.split(","), options.peer_python)
    settings = launch.Settings(
        options.size, 1, options.warmup, 600.0, options.peer_python, heap=options.heap
    )

    def run(name: str) -> dict[str, Any]:
        case = Case(name, bf16=False, ranks=1 if name.startswith("plain") else STAGES)
        return run_case(HERE / "pipeline_worker.py", case, settings, options.steps)

    runs = take_turns(systems, options.rounds, run, options.json)
    print(report(runs))
    return exit_code(runs)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SHAPES, default="10m-micro")
    parser.add_argument(
        "--systems",
        default=",".join(SYSTEMS),
        help=f"some of {', '.join(NAMES)}, each with /MICRO_BATCHES",
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="of each run, warm-up included")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not timed")
    parser.add_argument("--heap", choices=launch.HEAPS, default="kept")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="interpreter that has DeepSpeed"
    )
    parser.add_argument("--json", type=Path, default=Path("bench-pipelines.json"))
    parser.add_argument("--actions", action="store_true", help="time single actions, and no steps")
    parser.add_argument("--show", type=Path, help="print the tables of an earlier run")
    options = parser.parse_args(arguments)
    for name in options.systems.split(","):
        system, _, micro_batches = name.partition("/")
        if system not in NAMES or not micro_batches.isdigit():
            parser.error(f"no system {name!r}: write one of {', '.join(NAMES)}, and /MICRO_BATCHES")
    return options


def available(systems: list[str], peer_python: str) -> list[str]:
    """Return the systems that can run here; what is skipped is said."""
    peers = [name for name in systems if name.startswith("ds")]
    if not peers or launch.is_installed(peer_python, "deepspeed"):
        return systems
    print(f"skipped {', '.join(peers)}: {peer_python} has no DeepSpeed")
    return [name for name in systems if name not in peers]


def time_actions(options: argparse.Namespace) -> int:
    """Print the CPU time of single actions, beside that of the same modules in a plain loop."""
    settings = launch.Settings("actions", 1, options.warmup, 600.0, sys.executable, heap="kept")
    found: dict[str, list[list[Any]]] = {"zrun": [], "torch": []}  # by system and round, the ranks
    for _ in range(options.rounds):
        for name, rounds in found.items():
            case = Case(f"{name}-gpipe/8", bf16=False, ranks=STAGES)
            with tempfile.TemporaryDirectory(prefix="zrun-bench-") as folder:
                ranks, error = launch.run_ranks(
                    HERE / "pipeline_actions.py", case, settings, options.steps, Path(folder)
                )
            if error:
                print(f"{name}: FAILED: {error}")
                return 1
            rounds.append(ranks)
    print(actions_table(found, options.warmup))
    return 0


def actions_table(found: Mapping[str, Sequence[Sequence[Any]]], warmup: int) -> str:
    """Return what actions take, and what of it is not the modules' own time."""
    rows = []
    for name, rounds in found.items():
        for stage in range(STAGES):
            for kind in ("F", "B"):
                times = {
                    key: [_micros(ranks[stage][key][warmup:], kind) for ranks in rounds]
                    for key in ("modules", "units", "actions")
                }
                row = [name, str(stage), kind]
                row += [f"{statistics.median(times[key]):.0f}" for key in ("modules", "actions")]
                for base in ("modules", "units"):
                    pairs = zip(times["actions"], times[base], strict=True)
                    row += cells(Spread.of(a - b for a, b in pairs if b), ".0f")
                rows.append(row)
    columns = ["system", "stage", "action", "modules us", "action us", "beyond us", "range"]
    return render([*columns, "beyond units us", "range"], rows)


def _micros(steps: Sequence[Mapping[str, Sequence[float]]], kind: str) -> float:
    """Return the median microseconds of an action in some steps of a run; 0: it has none."""
    found = [seconds for step in steps for seconds in step[kind]]
    return 1e6 * statistics.median(found) if found else 0.0


def report(runs: Runs) -> str:
    """Return all tables."""
    good = without_failures(runs)
    tables = [step_table(good), clock_table(good)]
    return "\n" + "\n\n".join(filter(None, tables))


def step_table(runs: Runs) -> str:
    """Return what a step of each system takes, beside torch's 1F1B and one process."""
    rows = []
    for name, records in runs.items():
        micro_batches = _micro_batches(name)
        theory = micro_batches / (micro_batches + STAGES - 1)
        efficient = efficiency(runs, name)
        rows.append(
            [
                name,
                *step_times(records),
                *cells(ratio(runs, name, f"torch-1f1b/{micro_batches}"), ".3f"),
                *cells(efficient, ".1%"),
                f"{theory:.1%}" if efficient else "",
                number(loss_difference(runs, name), ".1e"),
                str(sum(record["clean"] for record in records)),
            ]
        )
    columns = ["system", "ms/step", "range", "CPU ms", "/ torch", "range"]
    columns += ["efficiency", "range", "m/(m+p-1)", "max|dL|", "clean"]
    return render(columns, rows)


def _micro_batches(name: str) -> int:
    return int(name.partition("/")[2])


def efficiency(runs: Runs, name: str) -> Spread | None:
    """Return one process's step, divided over the stages, in units of a system's."""
    slower = ratio(runs, name, f"plain/{_micro_batches(name)}")
    if slower is None or name.startswith("plain"):
        return None
    return Spread(*(1 / STAGES / each for each in (slower.median, slower.high, slower.low)))


def loss_difference(runs: Runs, name: str) -> float | None:
    """Return the largest difference from the first system of as many micro-batches."""
    first = next(each for each in runs if _micro_batches(each) == _micro_batches(name))
    if first == name:
        return None
    pairs = zip(runs[name][0]["losses"], runs[first][0]["losses"], strict=True)
    return max(abs(ours - theirs) for ours, theirs in pairs)


def clock_table(runs: Runs) -> str:
    """Return how long zrun's stages waited by the clock, and by the times of their actions."""
    from zrun_core.pipeline.grid import bubble

    rows = []
    for name, records in runs.items():
        steps = [Clock.of(step) for record in records for step in record["schedules"] if step[0]]
        if not steps:
            continue
        schedule = name.partition("/")[0].removeprefix("zrun-")
        rows.append(
            [
                name,
                *cells(Spread.of(1e3 * step.span for step in steps), ".0f"),
                *cells(Spread.of(step.span / step.replayed for step in steps), ".3f"),
                f"{statistics.median(step.idle(step.span) for step in steps):.1%}",
                f"{statistics.median(step.idle(step.replayed) for step in steps):.1%}",
                f"{bubble(schedule, STAGES, 1, _micro_batches(name)):.1%}",
                f"{1e6 * statistics.median(step.between for step in steps):.0f}",
            ]
        )
    columns = ["system", "actions ms", "range", "/ replay", "range", "stages wait"]
    columns += ["replay", "equal stages", "us between actions"]
    return render(columns, rows) if rows else ""


@dataclass(frozen=True)
class Clock:
    """One step of all stages.

    Attributes:
        span: seconds from the first action to the end of the last one.
        replayed: the same, if messages took no time.
        computing: seconds of all actions without their waits.
        between: seconds from the end of an action to the next one's beginning, the mean.
    """

    span: float
    replayed: float
    computing: float
    between: float

    @classmethod
    def of(cls, stages: Sequence[Sequence[Sequence[Any]]]) -> Clock:
        """Sum up the actions of each stage: kind, chunk, micro-batch, begin, end, waited."""
        from zrun_core.pipeline.actions import Action, ActionKind, ends_of

        orders, seconds = [], {}
        for actions in stages:
            orders.append([Action(ActionKind(kind), *which) for kind, *which, _, _, _ in actions])
            took = [end - begin - waited for *_, begin, end, waited in actions]
            seconds.update(zip(orders[-1], took, strict=True))
        pairs = [pair for actions in stages for pair in pairwise(actions)]
        return cls(
            span=max(actions[-1][4] for actions in stages),
            replayed=max(ends_of(orders, seconds).values()),
            computing=sum(seconds.values()),
            between=statistics.mean(after[3] - before[4] for before, after in pairs),
        )

    def idle(self, span: float) -> float:
        """Return the share of a span in which stages wait."""
        return 1 - self.computing / (STAGES * span)


if __name__ == "__main__":
    sys.exit(main())
