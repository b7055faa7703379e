"""Starts one case in processes of its own, and reduces what its ranks measured to one record."""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cases import SHAPES, TRAIN, Case, Request, zrun_job

from zrun.job.environment import WORKER_DEFAULTS
from zrun_core.spine.heap import TUNABLES

HERE = Path(__file__).resolve().parent
CLEAN_SHARE = 0.05  # a step is timed if other programs took less of the machine than this
HEAPS = {
    "own": "zrun has what its launcher gives its workers, peers the default",
    "kept": "all have what zrun's launcher gives",
    "default": "nobody has more than a process can say itself, as under torchrun",
}
LEAST_CLEAN = 3  # with fewer clean steps in a run, all of its steps are timed
_TRAIN_STEPS = 3

Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What holds for every case of a run."""

    size: str
    threads: int
    warmup: int
    timeout_s: float
    peer_python: str  # interpreter of DeepSpeed
    heap: str = "own"  # whose environment for glibc: see HEAPS
    other_python: str = ""  # interpreter of the other checkout

    def python(self, case: Case) -> str:
        """The interpreter that runs `case`."""
        if case.other:
            return self.other_python
        return self.peer_python if case.system.startswith("ds") else sys.executable

    def benchmarks(self, case: Case) -> Path:
        """The folder of `case`'s worker: each checkout knows how to set itself up."""
        return checkout(self.other_python) / "benchmarks" if case.other else HERE


@functools.cache
def checkout(python: str) -> Path:
    """The folder from which the interpreter `python` imports zrun.

    Raises:
        ValueError: it cannot, or there are no benchmarks beside.
    """
    code = "import pathlib, zrun_core; print(pathlib.Path(zrun_core.__file__).parents[1])"
    try:
        found = subprocess.run(
            [python, "-P", "-c", code], check=True, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        raise ValueError(f"{python} cannot import zrun: name the Python of a checkout") from None
    if not (Path(found.strip()) / "benchmarks" / "worker.py").exists():
        raise ValueError(f"{python} has zrun from {found.strip()}, where no benchmarks are")
    return Path(found.strip())


def is_installed(python: str, module: str) -> bool:
    """Whether the interpreter `python` can import `module`."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def run(case: Case, settings: Settings, steps: int) -> Record:
    """Run one case. The record has `error` if it failed."""
    with tempfile.TemporaryDirectory(prefix="zrun-bench-") as folder:
        if case.system == TRAIN:
            return _run_train(case, settings, Path(folder))
        return _run_workers(case, settings, steps, Path(folder))


def _run_workers(case: Case, settings: Settings, steps: int, folder: Path) -> Record:
    script = settings.benchmarks(case) / "worker.py"
    found, error = run_ranks(script, case, settings, steps, folder)
    if error:
        return {"error": error}
    return reduce_ranks(found, settings.warmup, os.cpu_count() or 1)


def run_ranks(
    script: Path, case: Case, settings: Settings, steps: int, folder: Path
) -> tuple[list[Any], str]:
    """Run `script` on every rank of a case.

    Args:
        script: one that hands over to `worker.main`.
        folder: an empty one.

    Returns:
        what each rank has written, and what went wrong in one line, or nothing.
    """
    request = Request(
        case.system,
        case.bf16,
        case.ranks,
        settings.size,
        steps,
        settings.warmup,
        settings.threads,
        time.time(),
    )
    (folder / "request.json").write_text(json.dumps(asdict(request)))
    command = [settings.python(case)]
    if case.processes > 1:
        command += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(case.ranks),
        ]
    is_zrun = case.system.startswith("zrun")
    given = dict(WORKER_DEFAULTS) if is_zrun or settings.heap == "kept" else {}
    if settings.heap == "default":
        given.pop(TUNABLES, None)
    command += [str(script), str(folder / "request.json")]
    error = _execute(command, settings, case, given)
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    if len(found) != case.processes:
        return [], error or "a rank left no result"
    return found, ""


def reduce_ranks(ranks: list[Record], warmup: int, cores: int) -> Record:
    """One record of all ranks: the slowest rank's times, the mean of the losses, the largest
    memory.
    """
    times = [max(each) for each in zip(*(rank["times"] for rank in ranks), strict=True)]
    busy = [max(each) for each in zip(*(rank["busy"] for rank in ranks), strict=True)]
    own = [sum(each) for each in zip(*(rank["cpu"] for rank in ranks), strict=True)]
    foreign = [max(0.0, b - c) / (cores * t) for b, c, t in zip(busy, own, times, strict=True)]
    timed = list(zip(times, foreign, strict=True))[warmup:]
    clean = [seconds for seconds, share in timed if share < CLEAN_SHARE]
    return {
        "times": times,
        "timed": clean if len(clean) >= LEAST_CLEAN else [seconds for seconds, _ in timed],
        "clean": len(clean),
        "foreign": statistics.mean(share for _, share in timed),
        "losses": [
            statistics.mean(each) for each in zip(*(rank["losses"] for rank in ranks), strict=True)
        ],
        "rank_losses": [rank["losses"] for rank in ranks],
        "digests": [rank["digest"] for rank in ranks],
        **{key: statistics.median(ranks[0][key][warmup:]) for key in ("payload", "loopback")},
        "counted": ranks[0]["counted"],
        **{
            key: max(rank[key] for rank in ranks)
            for key in ("first_s", "base_mb", "start_mb", "peak_mb")
        },
        "torch": ranks[0]["torch"],
    }


def _run_train(case: Case, settings: Settings, folder: Path) -> Record:
    """`zrun train` as a user types it: ZeRO-3, a few steps."""
    shape, code = SHAPES[settings.size], settings.benchmarks(case) / "model.py"
    job = zrun_job(3, case.bf16) | {
        "model": {"call": f"{code}:job_model", "args": {"size": settings.size}},
        "data": {
            "call": f"{code}:JobData",
            "args": {"size": settings.size, "ranks": case.ranks, "steps": _TRAIN_STEPS},
        },
        "steps": _TRAIN_STEPS,
        "batch": {"micro": shape.batch},
        "slots": case.ranks,
        "threads": settings.threads,
        "device": "cpu",
    }
    (folder / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
    launched = time.time()
    command = [settings.python(case), "-P", "-m", "zrun", "train", str(folder / "job.yaml")]
    error = _execute([*command, "--run-dir", str(folder / "run")], settings, case, {})
    events = folder / "run" / "events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    steps = [event for event in map(json.loads, lines) if event["type"] == "step"]
    if error or len(steps) != _TRAIN_STEPS:
        return {"error": error or "zrun train stopped early"}
    return {"first_s": steps[0]["time"] - launched, "losses": [event["loss"] for event in steps]}


def _execute(command: list[str], settings: Settings, case: Case, given: dict[str, str]) -> str:
    """Run `command` to its end; what went wrong, in one line, or nothing."""
    threads, folder = str(settings.threads), settings.benchmarks(case)
    environment = (
        os.environ
        | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            # Siblings, and zrun without installing it.
            "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent)]),
            "DS_ACCELERATOR": "cpu",
            "LOCAL_SIZE": str(case.processes),  # DeepSpeed asks for it
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        | given
    )
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=settings.timeout_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
            _end(process)
            if isinstance(stopped, KeyboardInterrupt):
                raise
            return f"not done after {settings.timeout_s:g} s"
    if process.returncode == 0:
        return ""
    errors = [line for line in output.splitlines() if "Error" in line and "ChildFailed" not in line]
    return (errors[:1] or output.strip().splitlines()[-1:] or [f"exit code {process.returncode}"])[
        0
    ][-300:]


def _end(process: subprocess.Popen[str]) -> None:
    """End a launcher in its own session: it ends its workers."""
    process.terminate()
    try:
        process.communicate(timeout=15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
