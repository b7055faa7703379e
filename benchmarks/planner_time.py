"""Predicted against measured step times on this machine's cores.

    zrun doctor --bench                                            measures the machine, once
    python benchmarks/planner_time.py                              every case: 15 quiet minutes
    python benchmarks/planner_time.py --only gpt,moe --world 1     some
    python benchmarks/planner_time.py --job jobs/stdlib-gpt.yaml   another job, at each stage

The prediction is the answer of `zrun estimate`, and the measured time the median step of a `zrun
train`, the first few left out; beside it lies the range of the middle half of the steps. The last
column is the error of the prediction times measured/predicted of the first case of the same model
and number of ranks, as `zrun estimate --measure` of that case scales the others. Run it on a
machine that does nothing else: where others share the host, its speed changes from minute to
minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner import HERE, MODELS, Case
from planner import cases as memory_cases

BOUND = 0.15  # of a prediction's error
_WARM_UP = 8  # steps that are not counted: kernels for new shapes are made in them
_ALONE = ["checkpoint=null", "eval=null", "hooks={}", "lr=constant"]  # nothing but steps


@dataclass(frozen=True)
class Timed:
    """A job, and its predicted and measured times.

    Attributes:
        family: the model and the number of ranks; the first job of a family scales the others.
        predicted, measured: seconds of a step.
        quartiles: of the measured steps.
        parts, split: seconds by what they are for, as predicted and as measured.
        scale: measured / predicted of the first job of the family.
    """

    what: str
    family: str
    predicted: float
    measured: float
    quartiles: tuple[float, float]
    parts: dict[str, float]
    split: dict[str, float]
    scale: float = 1.0

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def scaled_error(self) -> float:
        """Return the error of the prediction, scaled by the first job of the family."""
        return self.predicted * self.scale / self.measured - 1

    @property
    def is_good(self) -> bool:
        return abs(self.error) <= BOUND

    def __str__(self) -> str:
        low, high = (1e3 * each for each in self.quartiles)
        verdict = "   " if self.is_good else "BAD"
        return (
            f"{self.what:44} {1e3 * self.predicted:8.1f} ms predicted "
            f"{1e3 * self.measured:8.1f} measured ({low:.1f}-{high:.1f}) "
            f"{100 * self.error:+6.1f} % {verdict} x {self.scale:.2f} "
            f"{100 * self.scaled_error:+6.1f} %"
        )


def cases() -> list[Case]:
    """The models of the memory's comparison: alone as they are, on two ranks at each stage."""
    alone = [case for case in memory_cases() if case.world == 1 and case.model in MODELS]
    together = [
        Case(model, precision, checkpoint, stage, 2)
        for model in ("gpt", "llama", "bert", "encdec", "conv", "moe")
        for precision, checkpoint in (("fp32", "full"), ("bf16", "none"))
        for stage in ((0, 1, 2, 3) if model == "llama" else (3,))
    ]
    return [*alone, *together]


def job_of(case: Case) -> dict[str, Any]:
    """A case as a job file that may lie anywhere."""
    found = case.job() | {"slots": case.world}

    def absolute(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: absolute(item) for key, item in value.items()}
        return (
            f"{HERE.absolute()}/{value}"
            if isinstance(value, str) and value.startswith("planner_models.py")
            else value
        )

    return {key: absolute(value) for key, value in found.items()}


def timed(what: str, family: str, job: Path, overrides: list[str], steps: int) -> Timed:
    """Estimate a job, and run it.

    Args:
        what: the job, as the table calls it.
        family: the job's model and number of ranks.
        overrides: keys that replace those of the file.
    """
    given = [*overrides, f"steps={steps}", *_ALONE]
    answer = json.loads(_zrun("estimate", str(job), *given, "--json"))
    time = answer["estimate"]["time"]
    if not answer["hardware"]["measured"]:
        raise SystemExit("nobody has measured this machine: run zrun doctor --bench")
    with tempfile.TemporaryDirectory(prefix="zrun-bench-") as folder:
        run = Path(folder) / "run"
        _zrun("train", str(job), "--run-dir", str(run), *given)
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = [event for event in events if event["type"] == "step"][_WARM_UP:]
    seconds = [event["step_s"] for event in found]
    low, _, high = statistics.quantiles(seconds, n=4)
    split = {
        name: statistics.median(event["split"][name] for event in found)
        for name in found[0]["split"]
    }
    return Timed(
        what=what,
        family=family,
        predicted=time["seconds"],
        measured=statistics.median(seconds),
        quartiles=(low, high),
        parts=time["parts"],
        split=split,
    )


def scaled(results: Iterable[Timed]) -> Iterator[Timed]:
    """Give each result the scale of the first one of its family."""
    scales: dict[str, float] = {}
    for each in results:
        scale = scales.setdefault(each.family, each.measured / each.predicted)
        yield replace(each, scale=scale)


def _zrun(*arguments: str) -> str:
    """Run a command of zrun; what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "zrun", *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"zrun {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return done.stdout


def _all(options: argparse.Namespace) -> Iterator[Timed]:
    if options.job is not None:
        for stage in options.stages:
            yield timed(
                f"{options.job.stem} stage {stage}",
                options.job.stem,
                options.job,
                [*options.set, f"zero.stage={stage}"],
                options.steps,
            )
        return
    wanted = options.only.split(",") if options.only else None
    for case in cases():
        is_wanted = wanted is None or case.model in wanted
        if (
            is_wanted
            and options.world in (None, case.world)
            and options.checkpoint in (None, case.checkpoint)
        ):
            with tempfile.TemporaryDirectory(prefix="zrun-bench-") as folder:
                job = Path(folder) / "job.yaml"
                job.write_text(json.dumps(job_of(case)))
                family = f"{case.model} x{case.world}"
                yield timed(str(case), family, job, options.set, options.steps)


def _in_ms(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * value:.1f}" for name, value in seconds.items() if value > 5e-5)


def summary(results: Iterable[Timed]) -> str:
    """Return how many are within the bound, as they are and scaled.

    The first of a family scales.
    """
    found = list(results)
    firsts: dict[str, Timed] = {}
    for each in found:
        firsts.setdefault(each.family, each)
    others = [each for each in found if each is not firsts[each.family]]
    plain = _within([each.error for each in found])
    rest = _within([each.scaled_error for each in others])
    return f"{plain}\n{rest}, scaled by the first one of their model"


def _within(errors: list[float]) -> str:
    good = sum(abs(error) <= BOUND for error in errors)
    line = f"{good} of {len(errors)} step times are within {100 * BOUND:.0f} %"
    if errors:
        line += f": from {100 * min(errors):+.1f} % to {100 * max(errors):+.1f} %"
    return line


def main() -> int:
    """Compare; the exit code says whether every case is within the bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="models, such as gpt,moe")
    parser.add_argument("--world", type=int, help="cases with so many ranks")
    parser.add_argument("--checkpoint", help="cases with this policy")
    parser.add_argument("--job", type=Path, help="a job file instead of the cases")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the job")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], help="of --job")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--verbose", action="store_true", help="print what the seconds are for")
    options = parser.parse_args()
    results = []
    for each in scaled(_all(options)):
        results.append(each)
        print(each, flush=True)
        if options.verbose:
            print(
                f"    predicted {_in_ms(each.parts)}\n    measured  {_in_ms(each.split)}",
                flush=True,
            )
    print(summary(results))
    return int(not all(each.is_good for each in results))


if __name__ == "__main__":
    sys.exit(main())
