"""Rows of `zrun estimate --best` and `--fit`, trained in turns beside the job as it is.

    zrun doctor --bench                                      measures the machine, once
    python benchmarks/proposals.py                           six jobs, both goals: 25 minutes
    python benchmarks/proposals.py --jobs main Llama --goals best --rounds 3
    python benchmarks/proposals.py --job jobs/gpt-3d.yaml --set name=mine

The first rows that the command shows take turns with the job as it is, forwards in one round and
backwards in the next; a step is the median over all rounds. Times are told as shares of that of the
job as it is, peaks as predicted against what each rank has allocated. It ends with 1 if what
`--best` proposes was slower than the job as it is by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # zrun without installing it

import yaml
from render import render

from zrun.estimate.answer import answer
from zrun.estimate.patch import as_overrides, job_changes
from zrun.estimate.question import Question
from zrun.estimate.request import EstimateRequest, QuestionMaker
from zrun.hosts.backend import HostOptions
from zrun_core.plan.answer.outcome import Estimate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
Goal = Literal["best", "fit"]

_WARM_UP = 3  # steps that are not counted
_ALONE = ["checkpoint=null", "eval=null", "hooks={}", "lr=constant"]  # nothing but steps
_SLOWER = 1.1  # than the job as it is: more is more than the noise between two runs
_MODELS = HERE / "planner_models.py"
_COMMON: dict[str, Any] = {
    "slots": 2,
    "device": "cpu",
    "batch": {"global": 8, "micro": 4},
    "zero": 2,
    "optim": {"name": "adamw", "lr": 1e-3},
    "data": {"call": f"{_MODELS}:Samples", "args": {"kind": "text"}},
    "steps": 12,
}


def _pretrained(name: str) -> dict[str, Any]:
    return {**_COMMON, "model": {"call": f"{_MODELS}:pretrained", "args": {"name": name}}}


# The main job is given as a file, with keys of its own.
JOBS: dict[str, tuple[dict[str, Any] | Path, tuple[str, ...]]] = {
    "main": (ROOT / "jobs" / "stdlib-gpt.yaml", ()),
    "GPT-2": (_pretrained("GPT2LMHeadModel"), ()),
    "BERT": (_pretrained("BertForMaskedLM"), ()),
    "Llama": (_pretrained("LlamaForCausalLM"), ()),
    "Mixtral": (_pretrained("MixtralForCausalLM"), ()),
    "main, limited": (ROOT / "jobs" / "stdlib-gpt.yaml", ("limits.memory=900MiB",)),
}


@dataclass
class Row:
    """A configuration, and what it came to.

    Attributes:
        name: keys in which it differs from the job.
        overrides: keys with which the job is it.
        predicted: seconds of a step.
        fits: whether it does, as predicted. What does not is not trained.
        peaks: predicted bytes, by rank.
        is_proposed: the command says to take it; that is the job, where nothing is surely faster.
        seconds: of measured steps.
        measured_peaks: of each rank, the highest so far.
    """

    name: str
    overrides: list[str]
    predicted: float
    fits: bool
    peaks: list[int]
    is_proposed: bool
    seconds: list[float] = field(default_factory=list)
    measured_peaks: dict[int, int] = field(default_factory=dict)

    @property
    def measured(self) -> float:
        return statistics.median(self.seconds)

    @property
    def peak_errors(self) -> list[float]:
        """Return predicted / measured - 1 of each rank."""
        return [self.peaks[rank] / peak - 1 for rank, peak in self.measured_peaks.items() if peak]


def main() -> int:
    """Compare; return 1 if a proposal of `--best` is slower than the job that it was made for."""
    options = parse()
    asked = {name: JOBS[name] for name in options.jobs}
    if options.job is not None:
        asked = {options.job.stem: (options.job, tuple(options.set))}
    is_good = True
    with tempfile.TemporaryDirectory(prefix="zrun-bench-") as folder:
        for name, (job, given) in asked.items():
            path = job
            if not isinstance(path, Path):
                path = Path(folder) / f"{name}.yaml"
                path.write_text(yaml.safe_dump({"name": name, **job}))
            for goal in options.goals:
                found = rows_of(path, given, goal, options.rows)
                if not any(each.fits for each in found):
                    print(f"\n{name}, --{goal}: nothing fits")
                    continue
                take_turns(found, path, given, options.rounds, options.steps, Path(folder))
                print(f"\n{name}, --{goal}\n{table(found)}\n{verdict(found, goal)}", flush=True)
                is_good &= goal != "best" or is_no_slower(found)
    return int(not is_good)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--job", type=Path, help="a job of your own, in place of these")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of --job")
    parser.add_argument("--goals", nargs="*", default=["best", "fit"], choices=["best", "fit"])
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="of each run, warm-up included")
    return parser.parse_args()


def rows_of(job: Path, given: Sequence[str], goal: Goal, number: int) -> list[Row]:
    """Return the job as it is, and the first rows that the command shows."""
    nothing = {key: None for key in EstimateRequest.__dataclass_fields__}
    request = EstimateRequest(
        **{
            **nothing,
            "what": str(job),
            "overrides": tuple(given),
            "host_options": HostOptions(None, None, None, None, None, None),
            goal: True,
            "patience_s": 600.0,
        }
    )
    question, _ = QuestionMaker(request).ask()
    found = answer(question, goal)
    assert found.found is not None
    others = [each for each in found.found.best if each.candidate != question.base]
    best = found.chosen if found.found.keeps_base else found.found.best[0]
    return [row(question, each, best) for each in (found.chosen, *others[:number])]


def row(question: Question, estimate: Estimate, best: Estimate) -> Row:
    """Return an estimate as what can be trained. `best` is the one that the command proposes."""
    assert question.config is not None
    candidate = estimate.candidate
    dims = candidate.dims
    overrides: list[str] = []
    if candidate != question.base:
        changes = job_changes(question.config, question.batch, candidate, question.hardware)
        overrides = as_overrides(changes)
    by_stage = [question.planner.rank(candidate, stage).allocated for stage in range(dims.pp)]
    return Row(
        name=" ".join(overrides) or "as it is",
        overrides=overrides,
        predicted=estimate.time.seconds,
        fits=estimate.fits,
        peaks=[by_stage[dims.coordinates(rank).pp] for rank in range(dims.world_size)],
        is_proposed=candidate == best.candidate,
    )


def take_turns(
    found: Sequence[Row],
    job: Path,
    given: Sequence[str],
    rounds: int,
    steps: int,
    folder: Path,
) -> None:
    """Train each row that fits, in turns."""
    able = [each for each in found if each.fits]
    for turn in range(rounds):
        for each in able if turn % 2 == 0 else reversed(able):
            run = Path(tempfile.mkdtemp(dir=folder))
            train(each, job, [*given, *each.overrides], steps, run)
            line = f"round {turn + 1}  {each.name:70} {1e3 * each.measured:8.0f} ms"
            print(line, file=sys.stderr, flush=True)


def train(each: Row, job: Path, overrides: Sequence[str], steps: int, run: Path) -> None:
    """Train a row for some steps, and note what they take."""
    command = [sys.executable, "-m", "zrun", "train", str(job), "--run-dir", str(run)]
    done = subprocess.run(
        [*command, "--ui", "none", *overrides, f"steps={steps}", *_ALONE],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{each.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    times = [event["step_s"] for event in events if event["type"] == "step"]
    each.seconds += times[_WARM_UP:]
    for event in events:
        if event["type"] == "peak":
            known = each.measured_peaks.get(event["rank"], 0)
            each.measured_peaks[event["rank"]] = max(known, event["peak_bytes"] or 0)


def table(found: Sequence[Row]) -> str:
    """Return times beside those of the job as it is, and errors of peaks."""
    first = reference(found)
    rows: list[list[str]] = []
    for each in found:
        predicted = [f"{1e3 * each.predicted:.0f}", f"{each.predicted / first.predicted:.2f}"]
        if not each.fits:
            rows.append([each.name, *predicted, "does not fit", "", "", "", ""])
            continue
        low, _, high = statistics.quantiles(each.seconds, n=4)
        errors = each.peak_errors
        rows.append(
            [
                each.name,
                *predicted,
                f"{1e3 * each.measured:.0f}",
                f"{1e3 * low:.0f}-{1e3 * high:.0f}",
                f"{each.measured / first.measured:.2f}",
                f"{min(errors):+.2%}" if errors else "",
                f"{max(errors):+.2%}" if errors else "",
            ]
        )
    columns = ["row", "predicted ms", "ratio", "measured ms", "middle half", "ratio"]
    return render([*columns, "peak, from", "to"], rows)


def reference(found: Sequence[Row]) -> Row:
    """Return what others are compared with: the job as it is, or the first row if it is too big."""
    return next(each for each in found if each.fits)


def verdict(found: Sequence[Row], goal: Goal) -> str:
    """Return how the rows, in their order, came out."""
    able = [each for each in found if each.fits]
    pairs = list(combinations(able, 2))
    right = sum(
        (one.predicted - other.predicted) * (one.measured - other.measured) >= 0
        for one, other in pairs
    )
    text = f"{right} of {len(pairs)} pairs take the order that was predicted"
    if goal == "best" and found[0].is_proposed:
        text += "; the job stays as it is"
    elif goal == "best" and found[0].fits:
        share = proposed(found).measured / found[0].measured
        text += f"; what is proposed takes {share:.2f} of the job's time"
    return text


def proposed(found: Sequence[Row]) -> Row:
    """Return the row that the command says to take."""
    return next(each for each in found if each.is_proposed)


def is_no_slower(found: Sequence[Row]) -> bool:
    """Return whether what is proposed is no slower than the job as it is."""
    if not found[0].fits:
        return True
    return proposed(found).measured <= _SLOWER * found[0].measured


if __name__ == "__main__":
    sys.exit(main())
