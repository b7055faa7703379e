"""Compare what a first run of a job says with what it then is: memory, step time, and its range.

    python benchmarks/first_runs.py                    all jobs, 15 minutes on two quiet cores
    python benchmarks/first_runs.py --only clicks,ring --steps 20
    python benchmarks/first_runs.py --show bench-first-runs.json

Jobs are those of docs/recipes.md and ways to run jobs/stdlib-gpt.yaml. Each is estimated and
trained twice by the command line, with a cache of its own that holds nothing but the rates of this
host's cores: the first time nothing is known of it, the second time the first run is.

Beside the time of a step stand the CPU seconds that a rank took for it, of the rank that took most:
where other work keeps the cores busy they are what can be compared. They lack what a rank waits.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from render import render

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "recipes.md"
STEPS = 40
FEW = 14  # of the main job, whose steps take a second
WARM_STEPS = 3
# Ways to run the main job, in fp32 and without what comes beside steps.
GPT = ("precision=fp32", "lr.warmup=1", "eval=null", "hooks={}", "checkpoint=null")
WAYS: dict[str, tuple[str, ...]] = {
    "gpt 1 rank": ("slots=1", "batch.global=8", *GPT),
    "gpt ZeRO-0": ("zero=0", *GPT),
    "gpt ZeRO-2": ("zero=2", *GPT),
    "gpt ZeRO-3 recomputed": ("zero=3", "activations.checkpoint=full", *GPT),
    "gpt tp 2": ("parallel.tp=2", "zero=0", *GPT),
    "gpt pp 2": ("parallel.pp=2", "zero=0", *GPT),
    "gpt 1 rank bf16": ("slots=1", "batch.global=8", *GPT, "precision=bf16"),
    "gpt ZeRO-2 bf16": ("zero=2", *GPT, "precision=bf16"),
}
Result = dict[str, Any]  # of one run: job, turn, predicted, measured, cpu_s
# Python runs it as it starts: each rank that is forked notes the CPU seconds of its steps.
NOTES_CPU = """
import os


def begin():
    import sys

    if "zrun_core.train.worker" not in sys.modules:
        return
    import time
    from zrun_core.train.trainer import Trainer

    step = Trainer.step
    seconds = []

    def timed(self, *args, **kwargs):
        begun = time.process_time()
        done = step(self, *args, **kwargs)
        seconds.append(time.process_time() - begun)
        path = os.path.join(os.environ["NOTED_CPU"], str(os.getpid()))
        with open(path, "w") as file:
            file.write(" ".join(map(str, seconds)))
        return done

    Trainer.step = timed


os.register_at_fork(after_in_child=begin)
"""


def main() -> int:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of jobs, with commas")
    parser.add_argument("--steps", type=int, help="of each run, in place of 40, or 14 of a GPT")
    parser.add_argument("--show", type=Path, help="print these results again")
    parser.add_argument("--out", type=Path, default=Path("bench-first-runs.json"))
    options = parser.parse_args()
    if options.show is not None:
        print(tables(json.loads(options.show.read_text())))
        return 0
    wanted = None if options.only is None else options.only.split(",")
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="first-runs-") as folder:
        jobs = recipes(Path(folder)) | ways()
        startup = Path(folder) / "startup"
        startup.mkdir()
        (startup / "sitecustomize.py").write_text(NOTES_CPU)
        if options.steps is not None:
            jobs = {name: [*job, f"steps={options.steps}"] for name, job in jobs.items()}
        for name, command in jobs.items():
            if wanted is None or name in wanted:
                results += twice(name, command, Path(folder))
                options.out.write_text(json.dumps(results))
    print(tables(results))
    return 0


def recipes(folder: Path) -> dict[str, list[str]]:
    """Write the jobs of the page; return by name what follows `zrun train`."""
    found = {}
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE))
        if "yaml" not in blocks:
            continue
        name = re.search(r"^name: (\w+)", blocks["yaml"], re.MULTILINE)
        assert name is not None
        place = folder / name[1]
        place.mkdir()
        (place / "train.py").write_text(blocks["python"], encoding="utf-8")
        (place / "job.yaml").write_text(blocks["yaml"], encoding="utf-8")
        found[name[1]] = [str(place / "job.yaml"), f"steps={STEPS}"]
    return found


def ways() -> dict[str, list[str]]:
    job = str(ROOT / "jobs" / "stdlib-gpt.yaml")
    return {name: [job, f"steps={FEW}", *keys] for name, keys in WAYS.items()}


def twice(name: str, job: Sequence[str], folder: Path) -> list[Result]:
    """Estimate and train a job two times."""
    noted = folder / "cpu"
    paths = [str(folder / "startup"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "NO_COLOR": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "NOTED_CPU": str(noted),
    }
    results = []
    for turn in (1, 2):
        run_dir = folder / f"{name}-{turn}".replace(" ", "-")
        shutil.rmtree(noted, ignore_errors=True)
        noted.mkdir()
        for command in (["estimate", *job], ["train", *job, "--ui", "none", "--run-dir", run_dir]):
            done = subprocess.run(
                [sys.executable, "-m", "zrun", *map(str, command)],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                sys.exit(f"{name}: {command[0]} ended with {done.returncode}:\n{done.stderr}")
        events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
        *_, compared = (event for event in events if event["type"] == "estimate")
        result = {key: compared[key] for key in ("predicted", "measured")}
        cpu_s = max(map(cpu_of_step, noted.iterdir()), default=None)
        results.append({"job": name, "turn": turn, **result, "cpu_s": cpu_s})
        print(f"{name}, turn {turn}", file=sys.stderr)
    return results


def cpu_of_step(path: Path) -> float:
    """Return the CPU seconds of a usual step of the rank that has noted them."""
    seconds = [float(each) for each in path.read_text().split()]
    return statistics.median(seconds[WARM_STEPS:] or seconds)


def tables(results: Sequence[Result]) -> str:
    """Return a row for each run, and how many of them were in their range."""
    columns = ["job", "run", "tensors", "process", "step", "CPU", "predicted", "error"]
    columns += ["range", "inside"]
    rows = []
    for result in results:
        said, was = result["predicted"], result["measured"]
        low, high = said["low_s"], said["high_s"]
        rows.append(
            [
                result["job"],
                "first" if result["turn"] == 1 else "second",
                error(said["peak_bytes"], was["peak_bytes"]),
                error(said["device_bytes"], was["process_bytes"]),
                milliseconds(was["step_s"]),
                milliseconds(cpu) if (cpu := result.get("cpu_s")) else "-",
                milliseconds(said["step_s"]),
                error(said["step_s"], was["step_s"]),
                f"{milliseconds(low)} to {milliseconds(high)}",
                "yes" if is_inside(result) else "NO",
            ]
        )
    lines = [render(columns, rows), ""]
    for turn, name in ((1, "first"), (2, "second")):
        runs = [result for result in results if result["turn"] == turn]
        inside = sum(map(is_inside, runs))
        lines.append(f"{name} runs: {inside} of {len(runs)} took a time in the range")
    return "\n".join(lines)


def is_inside(result: Result) -> bool:
    said = result["predicted"]
    return bool(said["low_s"] <= result["measured"]["step_s"] <= said["high_s"])


def error(predicted: float, measured: float | None) -> str:
    """Return a prediction's error as a share of what was measured."""
    return "-" if not measured else f"{predicted / measured - 1:+.1%}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


if __name__ == "__main__":
    sys.exit(main())
