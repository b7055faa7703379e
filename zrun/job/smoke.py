"""A trial of a job (`zrun train --smoke N`): same code and layout, few steps, no saves."""

from __future__ import annotations

from dataclasses import dataclass

from zrun_core.errors import JobError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.section import Ref

_SUFFIX = "-smoke"  # a job of its own: what goes on, or is looked for by name, is never a trial
_EVAL_SAMPLES = 64


@dataclass(frozen=True)
class Smoke:
    """A trial as keys.

    Attributes:
        overrides: what changes the job into its trial.
        told: the same in one line, for the user.
    """

    overrides: list[str]
    told: str


def smoke_of(job: JobConfig, steps: int) -> Smoke:
    """Return the trial of `job` in so many steps.

    Warm-up and decay shrink as the steps do. Where only the data knows how many steps the job
    has, warm-up takes a tenth of the trial at most.

    Raises:
        JobError: the job is no longer than that.
    """
    if job.steps is not None and steps >= job.steps:
        raise JobError(
            f"--smoke {steps}: the job has {job.steps} steps itself: "
            "write fewer, or leave --smoke out"
        )
    keys = {
        "name": job.name[: 128 - len(_SUFFIX)] + _SUFFIX,
        "steps": str(steps),
        "resume": "never",
    }
    length = f"steps {steps}"
    if job.steps is not None:
        length += f" of {job.steps}"
    for other in ("tokens", "epochs"):
        value = getattr(job, other)
        if value is not None:
            keys[other] = "null"
            length += f" in place of {other} {value}"
    parts = [length]
    for key, shortened in _schedule(job, steps).items():
        keys[f"lr.{key}"] = str(shortened)
        parts.append(f"lr.{key} {shortened} of {getattr(job.lr, key)}")
    if isinstance(job.lr.schedule, Ref):
        parts.append(f"{job.lr.schedule.call} gives only its first steps")
    if job.eval is not None:
        samples = min(job.eval.samples or _EVAL_SAMPLES, _EVAL_SAMPLES)
        keys |= {"eval.every": str(steps), "eval.first": "false", "eval.samples": str(samples)}
        parts.append(f"one evaluation of {samples} samples")
    if job.restarts:
        keys["restarts"] = "0"
    if job.checkpoint is not None:
        keys["checkpoint"] = "null"
    if job.profile is not None:
        keys["profile"] = "null"
    told = f"smoke run in runs/{keys['name']}: {', '.join([*parts, 'no saves'])}"
    return Smoke([f"{key}={value}" for key, value in keys.items()], told)


def _schedule(job: JobConfig, steps: int) -> dict[str, int]:
    """Return `lr.warmup` and `lr.decay_steps` of the trial, where the job has them."""
    lr = job.lr
    total = job.steps
    if total is None and lr.decay_steps != "auto" and lr.schedule != "wsd":
        total = lr.decay_steps
    shares = {"warmup": 10, "decay_steps": 5}  # of a trial whose job has no known end
    found = {}
    for key, share in shares.items():
        value = getattr(lr, key)
        if value == "auto" or not value:
            continue
        if total is not None:
            shortened = round(value * steps / total)
        else:
            shortened = min(value, steps // share)
        found[key] = max(1, shortened)
    return found
