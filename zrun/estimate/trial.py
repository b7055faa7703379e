"""A trial of a job: its first steps, run for real, beside their estimate.

`zrun estimate JOB --measure` runs it. A prediction is off for the same reasons at each
configuration
of a job: kernels that are slower than the roofline says, Python between them, other work on the
host. So the measured time of the job's own configuration corrects the others as well:

    time of a candidate = predicted time * measured time of the job / predicted time of the job
"""

from __future__ import annotations

import json
import statistics
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zrun.estimate.measured_launch import WARM_STEPS, MeasuredLaunch
from zrun.estimate.plan_tables import fullest
from zrun.job.smoke import smoke_of
from zrun.watch import formatting
from zrun_core.errors import JobError
from zrun_core.sizes import format_size
from zrun_core.spine.config import JobConfig

if TYPE_CHECKING:
    from zrun.estimate.answer import Answer
    from zrun_core.plan.answer.outcome import Estimate, SearchResult

_TIMED_STEPS = 3
STEPS = WARM_STEPS + _TIMED_STEPS


@dataclass(frozen=True)
class Trial:
    """The measurements of a trial.

    Attributes:
        seconds: of each timed step.
        peak_bytes: of tensors, on the fullest rank; 0: not measured.
        process_bytes: of the largest process of a rank; 0: not measured.
    """

    seconds: tuple[float, ...]
    peak_bytes: int = 0
    process_bytes: int = 0

    @property
    def step_s(self) -> float:
        """The median of the timed steps."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Comparison:
    """A trial beside the estimate of the same configuration, as it was before it was scaled."""

    trial: Trial
    predicted_s: float
    predicted_peak_bytes: int

    @property
    def scale(self) -> float:
        """Measured over predicted seconds, by which predicted times are multiplied."""
        return self.trial.step_s / self.predicted_s

    def lines(self) -> list[str]:
        """Return the comparison in words."""
        trial = self.trial
        low, high = (formatting.seconds(each(trial.seconds)) for each in (min, max))
        found = [
            f"measured: {len(trial.seconds)} steps of {formatting.seconds(trial.step_s)} "
            f"({low} to {high}), {formatting.seconds(self.predicted_s)} predicted; "
            f"all times here are predicted ones x {self.scale:.2f}"
        ]
        if trial.peak_bytes:
            found.append(
                f"measured: peak {format_size(trial.peak_bytes)}, "
                f"{format_size(self.predicted_peak_bytes)} predicted"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "steps_s": list(self.trial.seconds),
            "step_s": self.trial.step_s,
            "predicted_step_s": self.predicted_s,
            "scale": self.scale,
            "peak_bytes": self.trial.peak_bytes or None,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "process_bytes": self.trial.process_bytes or None,
        }


def trial_overrides(job: JobConfig) -> list[str]:
    """Return the keys that make a trial of a job: few steps, nothing but steps, nothing saved.

    Raises:
        JobError: the job has no step that could be timed.
    """
    if job.steps is not None and job.steps <= WARM_STEPS:
        raise JobError(
            f"--measure times the steps after the first {WARM_STEPS}, and the job has "
            f"{job.steps}: give it more"
        )
    if job.steps is not None and job.steps <= STEPS:
        overrides = ["resume=never", "restarts=0"]
        if job.checkpoint is not None:
            overrides.append("checkpoint=null")
    else:
        overrides = smoke_of(job, STEPS).overrides
    overrides = [each for each in overrides if not each.startswith("eval.")]
    if job.eval is not None:
        overrides.append("eval=null")
    if job.profile is not None and "profile=null" not in overrides:
        overrides.append("profile=null")
    return overrides


def read_trial(events: Path) -> Trial:
    """Return the measurements in the record of a trial.

    Raises:
        JobError: it ended before a step that could be timed.
    """
    found = MeasuredLaunch()
    with events.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                found.take(json.loads(line))
    if not found.timed:
        raise JobError(
            f"--measure: the job ended after {len(found.steps_s)} steps: none could be timed"
        )
    return Trial(
        seconds=tuple(found.timed),
        peak_bytes=found.most("peak_bytes"),
        process_bytes=found.most("process_bytes"),
    )


def with_trial(found: Answer, trial: Trial) -> Answer:
    """Return an answer with the times of all its estimates scaled by a trial of the job.

    Args:
        trial: of the configuration that the job asks for.
    """
    chosen = found.chosen
    comparison = Comparison(trial, chosen.time.seconds, fullest(chosen).allocated)
    return replace(scaled_answer(found, comparison.scale), measured=comparison)


def scaled_answer(found: Answer, scale: float, spread: float | None = None) -> Answer:
    """Return an answer with the times of all its estimates multiplied.

    Args:
        spread: share by which a time may be off, either way; None: that of the prediction.
    """
    search = found.found
    fix = found.fix
    return replace(
        found,
        chosen=scaled(found.chosen, scale, spread),
        stages=tuple(scaled(each, scale, spread) for each in found.stages),
        found=None if search is None else _scaled_search(search, scale, spread),
        fix=None if fix is None else scaled(fix, scale, spread),
    )


def _scaled_search(search: SearchResult, scale: float, spread: float | None) -> SearchResult:
    return replace(
        search,
        best=tuple(scaled(each, scale, spread) for each in search.best),
        pareto=tuple(scaled(each, scale, spread) for each in search.pareto),
        rejected=tuple(scaled(each, scale, spread) for each in search.rejected),
    )


def scaled(estimate: Estimate, scale: float, spread: float | None = None) -> Estimate:
    """Return an estimate whose step takes `scale` times as long, in all of its parts.

    The range around it is as wide on both sides: what may lie between the operators of a CPU that
    was not measured, and widens it at the top, is in the measured time.
    """
    time = estimate.time
    share = spread
    if share is None:
        share = 1 - time.low / time.seconds
    seconds = time.seconds * scale
    slower = replace(
        time,
        seconds=seconds,
        low=seconds * (1 - share),
        high=seconds * (1 + share) * time.doubt,
        parts={name: seconds * scale for name, seconds in time.parts.items()},
        mfu=None if time.mfu is None else time.mfu / scale,
        hfu=None if time.hfu is None else time.hfu / scale,
        tokens_per_s=None if time.tokens_per_s is None else time.tokens_per_s / scale,
        samples_per_s=time.samples_per_s / scale,
        update_behind=time.update_behind * scale,
        first_forward=time.first_forward * scale,
    )
    return replace(estimate, time=slower)
