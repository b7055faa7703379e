"""What is about to run: in short before a training, and every value that takes effect for `zrun check`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal, TextIO

from zrun.hosts.backend import Backend, HostEntry
from zrun.hosts.cluster import Cluster
from zrun.job.load import JobValue, job_values
from zrun.job.scalars import write
from zrun.placement.plan import ResolvedJob
from zrun.runs.listing import reference
from zrun_core.spine.config import JobConfig, Section

_UNSHOWN = ("name", "batch", "env")
_HOSTS_SHOWN = 64


def width_of(out: TextIO) -> int | None:
    """Return the columns of a terminal; None: it is none, and lines need not be cut."""
    return shutil.get_terminal_size().columns if out.isatty() else None


def brief(
    resolved: ResolvedJob, asked: JobConfig, cluster: Cluster, width: int | None = None
) -> str:
    """Return what the job itself says of the training, and what each auto became.

    Args:
        asked: the job as it was read.
        width: as in `preface`.
    """
    said = [
        _in_short(asked, leaf)
        for leaf in job_values(asked)
        if leaf.given and _is_worth_a_word(leaf)
    ]
    autos = [
        f"{each.key} {each.value} ({each.why})"
        for each in resolved.reasons
        if not each.key.startswith("optim.")  # the optimizer's own defaults
    ]
    lines = [
        *_head(resolved, cluster),
        *_paragraph("job: ", said, width),
        *_paragraph("auto: ", autos, width),
    ]
    return "\n".join([*lines, *_warnings(resolved)])


def places(run_dir: Path, shown: list[int] | Literal["all"], num_ranks: int) -> str:
    """Return where a run keeps what is known of it, and where its ranks' output goes.

    Args:
        shown: ranks whose output is shown, `log.ranks` of the job.
    """
    there = shown if shown == "all" else [rank for rank in shown if rank < num_ranks]
    whose = (
        "every rank"
        if there == "all"
        else f"rank {', '.join(map(str, there))}"
        if there
        else "no rank"
    )
    return (
        f"run: {run_dir} (every value of the job: job.yaml)\n"
        f"output: of {whose} here (log.ranks); of all: zrun logs {reference(run_dir)}, or logs/ of that folder"
    )


def preface(resolved: ResolvedJob, cluster: Cluster, width: int | None = None) -> str:
    """A paragraph for each section of the job, then each auto with its value and reason.

    Args:
        width: columns, so that no value is cut at a terminal's border; None: one line each.
    """
    lines = _head(resolved, cluster)
    for section, values in _sections(resolved.job).items():
        lines += _paragraph(f"{section}: ", values, width)
    lines += [f"auto: {each.key} = {each.value} ({each.why})" for each in resolved.reasons]
    return "\n".join([*lines, *_warnings(resolved)])


def hosts_preface(backend: Backend) -> str:
    """How ranks are started, then a line for each host."""
    hosts = backend.hosts or ()
    more = len(hosts) - _HOSTS_SHOWN
    lines = [f"hosts: {backend}", *(f"  {_host(each)}" for each in hosts[:_HOSTS_SHOWN])]
    return "\n".join([*lines, f"  and {more} more"] if more > 0 else lines)


def _head(resolved: ResolvedJob, cluster: Cluster) -> list[str]:
    size = resolved.plan.world_size
    return [
        f"{resolved.job.name}: {size} rank{'s' if size > 1 else ''} on {cluster}",
        f"batch: {resolved.batch}",
    ]


def _warnings(resolved: ResolvedJob) -> list[str]:
    return [f"warning: {warning}" for warning in resolved.warnings]


def _is_worth_a_word(leaf: JobValue) -> bool:
    """Whether a key belongs into a few lines: what the user's own code is given does not."""
    return leaf.path[0] not in (*_UNSHOWN, "hosts") and "args" not in leaf.path


def _in_short(job: JobConfig, leaf: JobValue) -> str:
    """Return a key and its value as a job file would have them in short: `zero 2` for `zero: {stage: 2}`."""
    section: object = job
    for name in leaf.path[:-1]:
        section = getattr(section, name, None)
    is_main = (
        isinstance(section, Section)
        and section.short is not None
        and section.short[0] == leaf.path[-1]
    )
    return f"{'.'.join(leaf.path[:-1] if is_main else leaf.path)} {write(leaf.value)}"


def _host(entry: HostEntry) -> str:
    user = f"{entry.user}@" if entry.user is not None else ""
    slots = "its GPUs, or 1 slot" if entry.slots is None else f"slots={entry.slots}"
    if entry.chosen is not None:
        slots = f"slots {','.join(map(str, entry.chosen))}" + (
            "" if entry.slots is None else f" of {entry.slots}"
        )
    return f"{user}{entry}  {slots}  ({entry.where})"


def _paragraph(head: str, values: list[str], width: int | None) -> list[str]:
    """Return `head` and the values between commas; lines after the first are indented. Nothing without values."""
    lines = [head + value for value in values[:1]]
    for value in values[1:]:
        if width is not None and len(lines[-1]) + len(value) + 3 > width:
            lines[-1] += ","
            lines.append(f"  {value}")
        else:
            lines[-1] += f", {value}"
    return lines


def _sections(job: JobConfig) -> dict[str, list[str]]:
    """`section -> ["key value", ...]`; keys that stand alone share a line."""
    sections: dict[str, list[str]] = {"job": []}
    for leaf in job_values(job):
        section, *rest = leaf.path
        if section in _UNSHOWN or not _has_effect(job, str(leaf)):
            continue
        name, key = (section, ".".join(rest)) if rest else ("job", section)
        sections.setdefault(name, []).append(f"{key} {write(leaf.value)}")
    return sections


def _has_effect(job: JobConfig, key: str) -> bool:
    """Whether a key means anything next to the others: loss scaling without fp16 does not."""
    if key.startswith("precision.loss_scale"):
        return job.precision.compute == "fp16"
    if key == "activations.n":
        return job.activations.checkpoint == "every_n"
    if key in ("optim.betas", "optim.eps"):  # null: the class has none, or is not ours to know
        return getattr(job.optim, key.removeprefix("optim.")) is not None
    if key in ("launch.ssh", "launch.python"):
        return job.launch.backend == "ssh"
    if key == "hosts":  # they are listed beforehand
        return False
    if key.startswith("parallel."):
        return job.parallel.tp * job.parallel.pp > 1
    if key == "lr.power":
        return job.lr.schedule == "polynomial"
    return True
