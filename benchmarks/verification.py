"""Measure what it costs to compare a job's values before its first step, and to verify it.

    python benchmarks/verification.py values     a run with the comparison and one without, in turns
    python benchmarks/verification.py verify     zrun verify on 22 ways to run the main job
    python benchmarks/verification.py mistakes   what verify says of mistakes in the runtime

Of each run: seconds until its first step has ended, or the command has, and the largest process.
Mistakes are planted by `tests/dist/verification/test_verification.py`, each in its own process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from render import render

ROOT = Path(__file__).resolve().parent.parent
PLANTED = "tests/dist/verification/test_verification.py::test_a_mistake_is_named"
JOB = ROOT / "jobs" / "stdlib-gpt.yaml"
BARE = ("steps=2", "lr.warmup=1", "eval=null", "hooks={}", "checkpoint=null")
DIVIDED: dict[str, tuple[str, ...]] = {
    "tp 2": ("parallel.tp=2", "slots=2"),
    "tp 2, sequence": ("parallel.tp=2", "parallel.sequence=true", "slots=2"),
    "pp 2": ("parallel.pp=2", "slots=2"),
    "tp 2, pp 2": ("parallel.tp=2", "parallel.pp=2", "slots=4"),
}
RIGHT: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "one rank": ("slots=1",),
    "stage 0": ("zero=0",),
    "stage 1": ("zero=1",),
    "stage 3": ("zero=3",),
    "stage 3, recomputed": ("zero=3", "activations.checkpoint=full"),
    "fp32": ("precision=fp32",),
    "fp16": ("precision=fp16",),
    "host": ("zero=3", "offload=host"),
    "disk": (
        "zero=3",
        "offload.optimizer=disk",
        "offload.grad=disk",
        "offload.param=disk",
    ),
    "layer_major": ("zero=3", "parallel.schedule=layer_major"),
    "server": ("zero=0", "sync=server"),
    "tp 2": ("zero=0", *DIVIDED["tp 2"]),
    "tp 2, sequence": ("zero=0", *DIVIDED["tp 2, sequence"]),
    "pp 2": ("zero=0", *DIVIDED["pp 2"]),
    "interleaved": ("zero=0", "parallel.schedule=interleaved", *DIVIDED["pp 2"]),
    "zero_bubble": ("zero=0", "parallel.schedule=zero_bubble", *DIVIDED["pp 2"]),
    "tp 2, pp 2, dp 2": ("zero=1", *DIVIDED["tp 2, pp 2"][:2], "slots=8"),
    "compiled": ("compile=true",),
    "lamb": ("optim.name=lamb",),
    "lion": ("optim.name=lion", "optim.lr=1e-4"),
    "pipedream": (
        "zero=0",
        "parallel.pp=2",
        "parallel.schedule=pipedream",
        "optim.clip=null",
        "slots=2",
    ),
}


class Measured(NamedTuple):
    """A command that has ended.

    Attributes:
        code: its exit code.
        seconds: that it took.
        peak: bytes of its largest process, or of one that it started.
        said: what it printed.
    """

    code: int
    seconds: float
    peak: int
    said: str


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["values", "verify", "mistakes"])
    parser.add_argument("--only", type=lambda text: text.split(";"), help="names, with semicolons")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-verification-") as folder:
        if options.what == "values":
            print(cost_of_values(Path(folder), options.rounds, options.only))
        elif options.what == "verify":
            print(verdicts(Path(folder), options.only))
        else:
            print(mistakes(options.only))
    return 0


def cost_of_values(folder: Path, rounds: int, only: Sequence[str] | None) -> str:
    """Train two steps of the main job, with the comparison and without it."""
    rows = []
    for name, keys in DIVIDED.items():
        for precision in ("fp32", "bf16"):
            way = f"{name}, {precision}"
            if only is not None and way not in only:
                continue
            seconds: dict[bool, list[float]] = {True: [], False: []}
            peaks: dict[bool, list[int]] = {True: [], False: []}
            for turn in range(rounds):
                for compares in (True, False) if turn % 2 == 0 else (False, True):
                    run_dir = folder / f"{way}-{turn}-{compares}".replace(" ", "-")
                    values = f"guards.check_values={str(compares).lower()}"
                    command = ["train", JOB, *BARE, "zero=0", f"precision={precision}", *keys]
                    began = time.time()
                    found = zrun([*command, values, "--ui", "none", "--run-dir", run_dir])
                    if found.code:
                        sys.exit(found.said)
                    seconds[compares].append(first_step(run_dir) - began)
                    peaks[compares].append(found.peak)
            more = [a - b for a, b in zip(seconds[True], seconds[False], strict=True)]
            rows.append(
                [
                    way,
                    f"{statistics.median(seconds[False]):.1f} s",
                    f"{statistics.median(seconds[True]):.1f} s",
                    f"{statistics.median(more):+.1f} s ({min(more):+.1f} to {max(more):+.1f})",
                    f"{statistics.median(peaks[False]) / 2**20:.0f} MiB",
                    f"{statistics.median(peaks[True]) / 2**20:.0f} MiB",
                ]
            )
            print(rows[-1], file=sys.stderr)
    columns = ["job", "to step 1", "compared", "more", "largest process", "compared"]
    return render(columns, rows)


def first_step(run_dir: Path) -> float:
    """Return when a run's first step had ended, in seconds of the clock."""
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return next(float(event["time"]) for event in events if event["type"] == "step")


def verdicts(folder: Path, only: Sequence[str] | None) -> str:
    """Verify the main job in many ways."""
    rows = []
    for name, keys in RIGHT.items():
        if only is not None and name not in only:
            continue
        found = zrun(["verify", JOB, *keys], folder)
        verdict = found.said.strip().splitlines()[-1]
        for line in found.said.splitlines():
            if line.startswith("your configuration"):
                verdict = line
        rows.append(
            [
                name,
                f"{found.seconds:.0f} s",
                f"{found.peak / 2**20:.0f} MiB",
                str(found.code),
                verdict,
            ]
        )
        print(rows[-1], file=sys.stderr)
    return render(["job", "took", "largest process", "exit code", "said"], rows)


def mistakes(only: Sequence[str] | None) -> str:
    """Verify small jobs, each with a mistake that its test puts into the runtime."""
    listed = measured([sys.executable, "-m", "pytest", "-q", "--collect-only", PLANTED], ROOT)
    tests = [line for line in listed.said.splitlines() if line.startswith(PLANTED)]
    rows = []
    for test in tests:
        name = test.removeprefix(f"{PLANTED}[").removesuffix("]")
        if only is not None and name not in only:
            continue
        found = measured([sys.executable, "-m", "pytest", "-q", "-s", test], ROOT)
        said = [line for line in found.said.splitlines() if line.startswith("step ")]
        result = "found" if found.code == 0 else "MISSED"
        peak = f"{found.peak / 2**20:.0f} MiB"
        rows.append([name, f"{found.seconds:.0f} s", peak, result, said[-1] if said else ""])
        print(rows[-1], file=sys.stderr)
    return render(["mistake", "took", "largest process", "is", "said"], rows)


def zrun(arguments: Sequence[object], folder: Path | None = None) -> Measured:
    """Run a command of zrun's to its end."""
    return measured([sys.executable, "-m", "zrun", *map(str, arguments)], folder)


def measured(command: Sequence[str], folder: Path | None = None) -> Measured:
    """Run a command to its end."""
    environment = os.environ | {"NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - began
        output.seek(0)
        said = output.read()
    return Measured(process.returncode, seconds, usage.ru_maxrss * 1024, said)


if __name__ == "__main__":
    sys.exit(main())
