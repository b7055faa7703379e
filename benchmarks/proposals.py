"""Proposals of `zrun estimate --best`, trained one after the other: is the best one the fastest?

    zrun doctor --bench                                      measures the machine, once
    python benchmarks/proposals.py                           jobs/gpt-3d.yaml on 8 ranks: 10 minutes
    python benchmarks/proposals.py --job jobs/stdlib-gpt.yaml --set slots=2 --proposals 3

The proposals are the fastest ones of as many shapes of the mesh: (dp, tp, pp), schedules,
recomputation. They take turns, forwards in one round and backwards in the next, and a step is the
median over all rounds. Times are told as shares of the first proposal's, since a machine that many
ranks share has no clock of its own; peaks as predicted against what each rank has allocated.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # zrun without installing it

from render import render

from zrun.estimate.answer import answer
from zrun.estimate.patch import as_overrides, job_changes
from zrun.estimate.question import Question
from zrun.estimate.request import EstimateRequest, QuestionMaker
from zrun.hosts.backend import HostOptions
from zrun_core.plan.answer.outcome import Estimate

ROOT = Path(__file__).resolve().parents[1]
_WARM_UP = 3  # steps that are not counted
_ALONE = ["checkpoint=null", "eval=null", "hooks={}", "lr=constant"]  # nothing but steps


@dataclass
class Proposal:
    """A configuration that was proposed, and what it came to.

    Attributes:
        name: of its shape.
        overrides: keys with which the job is it.
        predicted: seconds of a step.
        peaks: predicted bytes, by rank.
        seconds: of measured steps.
        measured_peaks: of each rank, the highest so far.
    """

    name: str
    overrides: list[str]
    predicted: float
    peaks: list[int]
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
    """Compare; return 0 if the best proposal is the fastest of those that were trained."""
    options = parse()
    found = proposals(options.job, options.set, options.proposals)
    for turn in range(options.rounds):
        for each in found if turn % 2 == 0 else reversed(found):
            train(each, options.job, [*options.set, *each.overrides], options.steps)
            line = f"round {turn + 1}  {each.name:48} {1e3 * each.measured:8.0f} ms"
            print(line, file=sys.stderr, flush=True)
    print(table(found))
    best, fastest = found[0], min(found, key=lambda each: each.measured)
    print(f"proposed: {best.name}\nfastest:  {fastest.name}")
    return int(best is not fastest)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", type=Path, default=ROOT / "jobs" / "gpt-3d.yaml")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the job")
    parser.add_argument("--proposals", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of each run, warm-up included")
    return parser.parse_args()


def proposals(job: Path, given: Sequence[str], number: int) -> list[Proposal]:
    """Return the fastest configuration of each of `number` shapes, the best one first."""
    nothing = {key: None for key in EstimateRequest.__dataclass_fields__}
    request = EstimateRequest(
        **{
            **nothing,
            "what": str(job),
            "overrides": tuple(given),
            "host_options": HostOptions(None, None, None, None, None, None),
            "best": True,
            "patience_s": 600.0,
        }
    )
    question, _ = QuestionMaker(request).ask()
    result = answer(question, "best").found
    assert result is not None
    by_shape: dict[str, Estimate] = {}
    for each in sorted([*result.best, *result.pareto], key=lambda one: one.time.seconds):
        by_shape.setdefault(shape(each), each)
    return [proposal(question, *item) for item in list(by_shape.items())[:number]]


def shape(estimate: Estimate) -> str:
    """Return how ranks divide the model and the step, without ZeRO's stage."""
    candidate = estimate.candidate
    dims = candidate.dims
    words = [f"dp {dims.dp} tp {dims.tp} pp {dims.pp}"]
    if dims.pp > 1:
        words.append(candidate.schedule)
    if candidate.sequence_parallel:
        words.append("sequence")
    if candidate.checkpoint != "none":
        words.append(f"recompute {candidate.checkpoint}")
    return ", ".join([*words, f"micro {candidate.micro}"])


def proposal(question: Question, name: str, estimate: Estimate) -> Proposal:
    """Return an estimate as what can be trained."""
    assert question.config is not None
    candidate = estimate.candidate
    dims = candidate.dims
    changes = job_changes(question.config, question.batch, candidate, question.hardware)
    by_stage = [question.planner.rank(candidate, stage).allocated for stage in range(dims.pp)]
    return Proposal(
        name=f"zero {candidate.stage}, {name}",
        overrides=as_overrides(changes),
        predicted=estimate.time.seconds,
        peaks=[by_stage[dims.coordinates(rank).pp] for rank in range(dims.world_size)],
    )


def train(each: Proposal, job: Path, overrides: Sequence[str], steps: int) -> None:
    """Train a proposal for some steps, and note what they take."""
    with tempfile.TemporaryDirectory(prefix="zrun-bench-") as folder:
        run = Path(folder) / "run"
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


def table(found: Sequence[Proposal]) -> str:
    """Return times as shares of the best proposal's, and errors of peaks."""
    best = found[0]
    rows: list[list[str]] = []
    for each in found:
        low, _, high = statistics.quantiles(each.seconds, n=4)
        errors = each.peak_errors
        rows.append(
            [
                each.name,
                f"{1e3 * each.predicted:.0f}",
                f"{1e3 * each.measured:.0f}",
                f"{1e3 * low:.0f}-{1e3 * high:.0f}",
                f"{each.predicted / best.predicted:.2f}",
                f"{each.measured / best.measured:.2f}",
                f"{min(errors):+.2%}" if errors else "",
                f"{max(errors):+.2%}" if errors else "",
            ]
        )
    columns = ["proposal", "predicted ms", "measured", "middle half", "predicted / best"]
    return render([*columns, "measured / best", "peak, from", "to"], rows)


if __name__ == "__main__":
    sys.exit(main())
