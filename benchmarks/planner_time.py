"""Predicted against measured step times on this machine's cores: each job is measured, traced, estimated and run.

    python benchmarks/planner_time.py jobs/stdlib-gpt.yaml [key=value ...] [--stages 0 1 2 3] [--steps 12]

Prints a row per stage: predicted and measured milliseconds of a step (the median of all but the first three), and the
error. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from zrun.job.load import load_job
from zrun_core.plan.candidate import Candidate
from zrun_core.plan.estimate import Planner
from zrun_core.plan.hardware import from_rates
from zrun_core.plan.measure import measure
from zrun_core.plan.states import Dims
from zrun_core.plan.trace import trace_in_subprocess
from zrun_core.spec import resolve_batch

_WARM_UP = 3  # steps that are not counted


def measured_seconds(job: Path, overrides: list[str], steps: int) -> float:
    """The median step of a run of `job`."""
    with tempfile.TemporaryDirectory(prefix="zrun-bench-") as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable, "-m", "zrun", "train", str(job), "--run-dir", str(run), *overrides, f"steps={steps}",
            "checkpoint=null", "eval=null", "hooks={}", "lr=constant",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    seconds = [event["step_s"] for event in events if event["type"] == "step"]
    return statistics.median(seconds[_WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    config = load_job(given.job, given.overrides).config
    ranks = config.slots if isinstance(config.slots, int) else 1
    cores = len(os.sched_getaffinity(0))
    threads = config.threads if isinstance(config.threads, int) else max(1, cores // ranks)
    rates = measure(ranks=ranks, threads=threads)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    hardware = from_rates(rates, ranks=ranks, host_bytes=memory, cores=cores)
    batch = resolve_batch(config, ranks)
    policy = config.activations.checkpoint
    profile = trace_in_subprocess(
        config, given.job.parent, micros=(batch.micro,), checkpoints=tuple({"none", policy}), device="cpu"
    )
    planner = Planner(profile, hardware, config)
    print(f"{given.job.name}: {ranks} ranks x {threads} threads, activations {profile.source}")
    print("stage  predicted ms  measured ms   error   parts of the prediction, ms")
    for stage in given.stages:
        candidate = Candidate(stage, Dims(ranks), batch.micro, batch.accumulation, policy, config.precision.compute)
        time = planner.estimate(candidate).time
        found = measured_seconds(given.job, [*given.overrides, f"zero.stage={stage}"], given.steps)
        parts = ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in time.parts.items())
        error = time.seconds / found - 1
        print(f"{stage:5}  {time.seconds * 1e3:12.1f}  {found * 1e3:11.1f}  {error:+6.1%}   {parts}", flush=True)


if __name__ == "__main__":
    main()
