"""Predict memory and time of training steps on one CUDA device, run them, and compare.

    python benchmarks/gpu_planner.py                     under 6 minutes
    python benchmarks/gpu_planner.py --only gpt,conv     some of the models

Measures the device as `zrun doctor --bench` does, traces each model, and estimates: bytes in use
and bytes reserved at most, seconds of a step. Then a process of its own trains a few steps by
zrun's own loop. Bounds: 3 % of what `torch.cuda.max_memory_allocated` says, 7 % of the reserved, 10
% of the time. Every line that is printed is one JSON object, flushed at once and appended to
`--json`, so that a run that is cut off keeps what it has; a table follows.
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from planner import HERE, MODELS, Case
from render import render

BOUNDS = {"allocated": 0.03, "reserved": 0.07, "seconds": 0.10}
_STEPS, _WARM_UP = 16, 6
_LEAST_S = 25.0  # for one more case
_GPT2 = {"vocab_size": 50304, "dim": 768, "depth": 12, "heads": 12, "seq_len": 1024}
_LONG = {
    "call": "planner_models.py:Samples",
    "args": {"kind": "text", "length": 1024, "vocab": 50304},
}
LARGE: dict[str, dict[str, Any]] = {  # at which a GPU computes most of the time
    "gpt2-124m": {"model": {"call": "zrun_core.models.gpt:gpt", "args": _GPT2}, "data": _LONG},
    "llama-160m": {
        "model": {
            "call": "zrun_core.models.gpt:gpt",
            "args": {**_GPT2, "flavour": "llama", "kv_heads": 4},
        },
        "data": _LONG,
    },
}


def cases() -> list[Case]:
    """What is compared: the most telling first."""
    large = [
        Case(model, "bf16", checkpoint, micro=8)
        for model in LARGE
        for checkpoint in ("none", "full")
    ]
    large.append(Case("gpt2-124m", "fp32", micro=4))
    return [*large, *(Case(model, "bf16", micro=64) for model in MODELS)]


def job_of(case: Case) -> dict[str, Any]:
    """The case as a job on CUDA."""
    known = replace(case, model="gpt") if case.model in LARGE else case
    job = known.job() | LARGE.get(case.model, {})
    return job | {"name": case.model, "device": "cuda", "steps": _STEPS}


def hardware() -> Any:
    """The first device, as it was measured just now."""
    import torch

    from zrun.agent.bench import gpu_rates
    from zrun_core.hardware.measured import Rates, from_rates

    found = gpu_rates(torch, 0)
    flops = {name: found[f"{name}_flops"] for name in ("fp32", "bf16", "fp16")}
    rates = Rates(
        {"fp32": 1e11},
        1e10,
        found["name"],
        flops,
        found["copy_bytes_per_s"],
        torch.cuda.get_device_properties(0).total_memory,
        found["to_device_bytes_per_s"],
        found["from_device_bytes_per_s"],
    )
    return from_rates(rates, ranks=1, host_bytes=1 << 36, cores=len(os.sched_getaffinity(0)))


def predict(case: Case, on: Any) -> dict[str, Any]:
    """Bytes and seconds, without running it."""
    from zrun_core.plan.answer.planner import Planner
    from zrun_core.plan.question.candidate import Candidate
    from zrun_core.plan.trace.trace_process import trace_in_subprocess
    from zrun_core.spine.config import JobConfig
    from zrun_core.spine.parallel_dims import ParallelDims

    job = JobConfig.model_validate(job_of(case))
    profile = trace_in_subprocess(
        job, HERE, micros=(case.micro,), checkpoints=(case.checkpoint,), device="cuda"
    )
    candidate = Candidate(
        0, ParallelDims(1), case.micro, case.accumulation, case.checkpoint, case.precision
    )
    found = Planner(profile, on, job).estimate(candidate)
    (rank,) = found.ranks
    return {
        "allocated": rank.allocated,
        "reserved": rank.reserved,
        "seconds": found.time.seconds,
        "parts": found.time.parts,
        "source": found.source,
    }


def run(case: Case) -> dict[str, Any]:
    """Train in this process; what the device held, and how long steps took."""
    import torch

    from zrun_core.spine.config import JobConfig
    from zrun_core.spine.events import Emitter, EventType
    from zrun_core.spine.spec import LaunchPlan, RankPlace, RunSpec, resolve_batch
    from zrun_core.train.worker import Worker

    seconds: list[float] = []

    class Ear(Emitter):
        def emit(self, kind: EventType, **fields: Any) -> None:
            if kind == "step":
                seconds.append(fields["step_s"])

    job = JobConfig.model_validate(job_of(case))
    place = RankPlace(
        rank=0, host="here", local_rank=0, device="cuda:0", threads=len(os.sched_getaffinity(0))
    )
    with tempfile.TemporaryDirectory(prefix="zrun-gpu-") as folder:
        spec = RunSpec(
            job=job,
            plan=LaunchPlan(ranks=[place]),
            batch=resolve_batch(job, 1),
            job_dir=str(HERE),
            run_dir=folder,
            run_id="planner",
        )
        worker = Worker(spec, 0)
        worker.builder.emitter = Ear(None, 0)
        trainer = worker.prepare()
        step = trainer.step

        def counted(micro_batches: Any) -> None:
            # What lasts is there after the first step; what building the model took is no part of
            # it.
            if trainer.progress.steps == 1:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            step(micro_batches)

        trainer.step = counted  # type: ignore[method-assign]
        trainer.run()
        torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "seconds": statistics.median(seconds[_WARM_UP:]),
        "range": [min(seconds[_WARM_UP:]), max(seconds[_WARM_UP:])],
    }


def errors_of(line: dict[str, Any]) -> dict[str, float]:
    """Of each prediction, as a share of what was measured."""
    return {name: line["predicted"][name] / line["measured"][name] - 1 for name in BOUNDS}


def is_good(line: dict[str, Any]) -> bool:
    """Whether every prediction of a case is within its bound."""
    return all(abs(error) <= BOUNDS[name] for name, error in errors_of(line).items())


def table(lines: list[dict[str, Any]]) -> str:
    """One row per case."""
    columns = (
        "case",
        "allocated GiB",
        "error",
        "reserved GiB",
        "error",
        "step ms",
        "error",
        "verdict",
    )
    rows = []
    for line in lines:
        errors, measured = errors_of(line), line["measured"]
        rows.append(
            [
                line["case"],
                f"{measured['allocated'] / 2**30:.3f}",
                f"{100 * errors['allocated']:+.2f} %",
                f"{measured['reserved'] / 2**30:.3f}",
                f"{100 * errors['reserved']:+.1f} %",
                f"{1e3 * measured['seconds']:.2f}",
                f"{100 * errors['seconds']:+.1f} %",
                "within" if is_good(line) else "MISSED",
            ]
        )
    return render(columns, rows)


def main() -> int:
    """Compare; the exit code says whether every case was run, and is within its bounds."""
    options = parse()
    if options.run:
        print(json.dumps(run(Case(**json.loads(options.run)))))
        sys.stdout.flush()
        os._exit(0)
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return 0
    options.json.unlink(missing_ok=True)
    deadline = time.monotonic() + options.seconds
    wanted = options.only.split(",") if options.only else None
    chosen = [case for case in cases() if wanted is None or case.model in wanted]
    on = hardware()
    device = on.device
    emit(
        options.json,
        {
            "event": "device",
            "name": device.name,
            "peak": dict(device.peak),
            "gemm": device.gemm,
            "streaming": device.streaming,
            "torch": torch.__version__,
        },
    )
    lines: list[dict[str, Any]] = []
    for case in chosen:
        left = deadline - time.monotonic()
        if left < _LEAST_S:
            emit(options.json, {"event": "skipped", "case": str(case), "why": "no time is left"})
            continue
        line = compared(case, on, left)
        emit(options.json, line)
        if line["event"] == "result":
            lines.append(line)
    print(f"\n{table(lines)}")
    return int(len(lines) < len(chosen) or not all(is_good(line) for line in lines))


def compared(case: Case, on: Any, patience_s: float) -> dict[str, Any]:
    """Predict a case, and run it in a process of its own.

    A device's memory is clean again when that ends.
    """
    found = predict(case, on)
    command = [sys.executable, str(Path(__file__).resolve()), "--run", json.dumps(asdict(case))]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=patience_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"event": "failed", "case": str(case), "why": "it did not end in time"}
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        return {"event": "failed", "case": str(case), "why": why}
    measured = json.loads(done.stdout.splitlines()[-1])
    line = {"event": "result", "case": str(case), "predicted": found, "measured": measured}
    return line | {"errors": errors_of(line), "is_good": is_good(line)}


def emit(path: Path, line: dict[str, Any]) -> None:
    """Print a line, and keep it."""
    text = json.dumps(line | {"time": time.strftime("%Y-%m-%dT%H:%M:%S")})
    print(text, flush=True)
    with path.open("a") as file:
        file.write(text + "\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default="",
        help="models, of " + ", ".join(dict.fromkeys(c.model for c in cases())),
    )
    parser.add_argument("--seconds", type=float, default=340.0, help="for everything")
    parser.add_argument(
        "--json", type=Path, default=Path("bench-gpu-planner.jsonl"), help="where the lines go"
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(filter(None, options.only.split(","))) - {case.model for case in cases()}:
        parser.error(f"no model {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    sys.exit(main())
