"""Compare zrun with plain torch, DDP, FSDP2 and DeepSpeed on this machine's CPU.

The targets are judged too:

    python benchmarks/step.py --size 50m                     everything: 40 minutes on 2 quiet cores
    python benchmarks/step.py --size 10m --only fp32,bf16    parts of it; see --list
    python benchmarks/step.py --systems ddp,zrun3,zrun3@4    some systems
    python benchmarks/step.py --other ../old/.venv/bin/python    zrun's in another checkout too
    python benchmarks/step.py --quick                        does it run at all?
    python benchmarks/step.py --show results.json            print an earlier run again

Every case runs in processes of its own. Systems take turns (A B C, C B A, ...) because shared
machines drift, a step is timed only if other programs left the machine alone while it ran, and
ratios are taken inside each round. Run it under `nice -n -15` if you may. DeepSpeed takes part
where `--peer-python` has it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import launch
import table
from cases import PARTS, SHAPES, SYSTEMS, TRAIN, Case, cases_of

_QUICK = "single,ddp,zrun2,zrun3,train"


def main() -> int:
    """Run, print, and write the results."""
    options = parse()
    if options.list:
        print("\n".join(f"{part:9} {names}" for part, names in PARTS.items()))
        return 0
    if options.show:
        saved = json.loads(options.show.read_text())
        runs = {Case(**entry["case"]): entry["records"] for entry in saved["runs"]}
        print(report(runs, saved["size"], saved["ranks"]))
        return 0
    cases = available(choose(options), options.peer_python)
    print(
        f"{options.size} on {options.ranks} ranks of {options.threads} thread(s), "
        f"{options.rounds} round(s)",
        flush=True,
    )
    runs = measure(cases, options)
    print(report(runs, options.size, options.ranks))
    print(f"\nresults: {options.json}")
    return int(any("error" in record for records in runs.values() for record in records))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; `--quick` sets what was not given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SHAPES, help="model (default: 50m)")
    parser.add_argument(
        "--systems", help=f"some of {', '.join((*SYSTEMS, TRAIN))}; with -bf16, and @RANKS"
    )
    parser.add_argument(
        "--only", help=f"some parts of the comparison: {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="print the systems of each part")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--rounds", type=int, help="how often each system runs (default: 4)")
    parser.add_argument(
        "--steps", type=int, help="in the first round, whose losses are compared (default: 20)"
    )
    parser.add_argument("--more", type=int, help="timed steps in every other round (default: 8)")
    parser.add_argument(
        "--warmup", type=int, help="steps of each run that are not timed (default: 3)"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run")
    parser.add_argument(
        "--heap",
        choices=launch.HEAPS,
        default="own",
        help="; ".join(f"{name}: {what}" for name, what in launch.HEAPS.items()),
    )
    parser.add_argument(
        "--peer-python", default=sys.executable, help="interpreter that has DeepSpeed"
    )
    parser.add_argument(
        "--other",
        default="",
        metavar="PYTHON",
        help="of another checkout of zrun: its systems take turns with this one's",
    )
    parser.add_argument(
        "--json", type=Path, default=Path("bench-step.json"), help="where the results go"
    )
    parser.add_argument("--show", type=Path, help="print the tables of an earlier run")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and few steps: a test of the harness"
    )
    options = parser.parse_args(arguments)
    usual = {"size": "50m", "rounds": 4, "steps": 20, "more": 8, "warmup": 3}
    quick = {"size": "tiny", "rounds": 1, "steps": 4, "more": 2, "warmup": 1}
    for key, value in (quick if options.quick else usual).items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    if options.quick and not options.only and not options.systems:
        options.systems = _QUICK
    if options.steps <= options.warmup:
        parser.error("--steps must be more than --warmup")
    try:
        choose(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def choose(options: argparse.Namespace) -> list[Case]:
    """The cases that were asked for.

    Raises:
        ValueError: a name is unknown.
    """
    if options.systems:
        named = [Case.parse(name, options.ranks) for name in options.systems.split(",")]
    else:
        parts = options.only.split(",") if options.only else list(PARTS)
        named = cases_of(parts, options.ranks)
    if options.other:
        launch.checkout(options.other)
        pairs = ((case, case.twin) if case.is_ours else (case,) for case in named)
        named = [case for pair in pairs for case in pair]
    elif any(case.other for case in named):
        raise ValueError("which other checkout? Name its Python with --other")
    return list(dict.fromkeys(named))


def available(cases: list[Case], peer_python: str) -> list[Case]:
    """The cases that can run here; what is skipped is said."""
    peers = [case for case in cases if case.system.startswith("ds")]
    if not peers or launch.is_installed(peer_python, "deepspeed"):
        return cases
    names = ", ".join(dict.fromkeys(case.system for case in peers))
    print(
        f"skipped {names}: {peer_python} has no DeepSpeed; see benchmarks/requirements.txt",
        flush=True,
    )
    return [case for case in cases if case not in peers]


def measure(cases: list[Case], options: argparse.Namespace) -> dict[Case, list[launch.Record]]:
    """Run every case in every round, and save after each: an interrupted run keeps its numbers."""
    settings = launch.Settings(
        size=options.size,
        threads=options.threads,
        warmup=options.warmup,
        timeout_s=options.timeout,
        peer_python=options.peer_python,
        heap=options.heap,
        other_python=options.other,
    )
    runs: dict[Case, list[launch.Record]] = {case: [] for case in cases}
    for number in range(options.rounds):
        steps = options.steps if number == 0 else options.warmup + options.more
        for case in cases if number % 2 == 0 else reversed(cases):
            if number and case.once(options.ranks):
                continue
            record = launch.run(case, settings, steps) | {"round": number}
            runs[case].append(record)
            print(
                f"round {number + 1}  {case.label(options.ranks):14}  {describe(record)}",
                file=sys.stderr,
                flush=True,
            )
            save(runs, options)
    return runs


def describe(record: launch.Record) -> str:
    """One line about one run."""
    if "error" in record:
        return f"FAILED: {record['error']}"
    first = f"first step after {record['first_s']:.1f} s"
    if "timed" not in record:
        return first
    step = table.Spread.of(record["timed"])
    return (
        f"{1e3 * step.median if step else 0:6.0f} ms, {record['peak_mb']:5.0f} MB, {first}, "
        f"{record['clean']} clean "
        f"steps, others used {record['foreign']:.0%}"
    )


def save(runs: dict[Case, list[launch.Record]], options: argparse.Namespace) -> None:
    """Everything measured so far, and where."""
    found = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": " ".join(sys.argv),
        "machine": machine(),
        "size": options.size,
        "ranks": options.ranks,
        "options": {key: str(value) for key, value in vars(options).items()},
        "verdicts": [
            asdict(each) | {"verdict": each.text}
            for each in table.verdicts(runs, options.size, options.ranks)
        ],
        "runs": [{"case": asdict(case), "records": records} for case, records in runs.items()],
    }
    options.json.write_text(json.dumps(found, indent=1))


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def report(runs: dict[Case, list[launch.Record]], size: str, ranks: int) -> str:
    """All tables."""
    shape = SHAPES[size]
    found = [
        table.case_table(runs, ranks, shape.batch * shape.seq, shape.flops_per_token),
        table.twin_table(runs, ranks),
        table.verdict_table(table.verdicts(runs, size, ranks)),
    ]
    return "\n" + "\n\n".join(filter(None, found))


if __name__ == "__main__":
    sys.exit(main())
