"""What a job asks for, as rows of the report: the model, the data, the batch, the rate, the start.

Nothing that may be a secret is in them: the report is handed around.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping
from typing import Any

from zrun.job.load import job_values
from zrun.job.scalars import write
from zrun.placement.plan import ResolvedJob
from zrun.watch.preface import short_key
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.section import Ref
from zrun_core.spine.spec import RunSpec

_HIDDEN = "***"
_SECRET = re.compile(
    r"(^|[_.-])((api|access|auth|private|secret)_?key|key|token|secret|passw\w*|credentials?)$",
    re.IGNORECASE,
)
_ROWS = ("name", "model", "data", "loss", "steps", "tokens", "epochs", "batch", "optim", "lr")
_UNSHOWN = (*_ROWS, "env", "hosts", "launch")


def settings_rows(
    resolved: ResolvedJob, asked: JobConfig, command: str, spec: RunSpec, began: float
) -> list[tuple[str, str]]:
    """Return the rows, each a name and a text.

    Args:
        resolved: the job with each auto resolved.
        asked: the job as it was read: which keys it gives.
        command: by which it was started.
        spec: of its ranks: where the run begins.
        began: when this launch did, in seconds since 1970.
    """
    job = resolved.job
    rows = [
        ("started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))),
        ("command", without_secrets(command)),
        ("start", _start(spec)),
        ("model", _call(job.model)),
        ("data", _call(job.data)),
        ("loss", _call(job.loss) if job.loss is not None else ""),
        ("length", _length(job)),
        ("batch", str(resolved.batch)),
        ("optimizer", f"{job.optim.name}, {', '.join(_given(asked, 'optim', 'name', 'lr'))}"),
        ("rate", ", ".join([f"{job.optim.lr:g}", *_schedule(job, asked)])),
        ("other keys", ", ".join(_others(asked))),
    ]
    return [(name, text.removesuffix(", ")) for name, text in rows if text]


def without_secrets(command: str) -> str:
    """Return a command with `***` for the values of `env` and of what is named like a secret."""
    return shlex.join(_without_secret(word) for word in shlex.split(command))


def _without_secret(word: str) -> str:
    key, is_override, _ = word.partition("=")
    is_secret = key == "env" or key.startswith("env.") or _SECRET.search(key) is not None
    return f"{key}={_HIDDEN}" if is_override and is_secret else word


def _call(ref: Ref) -> str:
    """Return `train.py:build_model (depth 4, width 128)`."""
    args = ", ".join(f"{name} {_shown(name, value)}" for name, value in ref.args.items())
    return f"{ref.call} ({args})" if args else ref.call


def may_be_secret(name: str) -> bool:
    """Return whether the value of a key or an argument is not handed around, by its name."""
    return _SECRET.search(name) is not None


def _shown(name: str, value: Any) -> str:
    """Return a value as YAML has it, without secrets inside of it."""
    if may_be_secret(name):
        return _HIDDEN
    if isinstance(value, Mapping):
        inside = (f"{key}: {_shown(str(key), each)}" for key, each in value.items())
        return f"{{{', '.join(inside)}}}"
    return write(value)


def _start(spec: RunSpec) -> str:
    if spec.resume is None:
        return "at step 0"
    step = "the newest step" if spec.resume.step is None else f"step {spec.resume.step}"
    return f"after {step} of {spec.resume.folder}"


def _length(job: JobConfig) -> str:
    for name in ("steps", "tokens", "epochs"):
        value = getattr(job, name)
        if value is not None:
            return f"{value:,} {name}"
    return ""


def _schedule(job: JobConfig, asked: JobConfig) -> Iterator[str]:
    """Yield the schedule of the learning rate, then the other keys of `lr` that the job gives."""
    schedule = job.lr.schedule
    yield schedule.call if isinstance(schedule, Ref) else schedule
    yield from _given(asked, "lr", "schedule")


def _given(asked: JobConfig, section: str, *unless: str) -> list[str]:
    return [
        f"{'.'.join(leaf.path[1:])} {_shown(leaf.path[-1], leaf.value)}"
        for leaf in job_values(asked)
        if leaf.given and leaf.path[0] == section and leaf.path[1] not in unless
    ]


def _others(asked: JobConfig) -> list[str]:
    return [
        f"{short_key(asked, leaf)} {_shown(leaf.path[-1], leaf.value)}"
        for leaf in job_values(asked)
        if leaf.given and leaf.path[0] not in _UNSHOWN
    ]
