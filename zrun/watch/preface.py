"""The job that is about to run: in short before a training, all of it for `zrun check`."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Literal, TextIO

from zrun.hosts.backend import Backend, HostEntry
from zrun.hosts.cluster import Cluster
from zrun.hosts.offload_disk import in_words
from zrun.job.hidden import shown_command
from zrun.job.load import JobValue, job_values
from zrun.job.scalars import write
from zrun.job.script import KEYS
from zrun.placement.plan import ResolvedJob
from zrun.runs.listing import reference
from zrun_core.sizes import several
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.section import Section
from zrun_core.spine.spec import ScriptSpec

_UNSHOWN = ("name", "batch", "env")
_HOSTS_SHOWN = 64


def width_of(out: TextIO) -> int | None:
    """Return the columns of a terminal; None if `out` is none, and lines need not be cut."""
    if not out.isatty():
        return None
    return shutil.get_terminal_size().columns


def brief(
    resolved: ResolvedJob, asked: JobConfig, cluster: Cluster, width: int | None = None
) -> str:
    """Return what the job itself says of the training, and what each auto became.

    Args:
        asked: the job as it was read.
        width: as in `preface`.
    """
    said = [
        f"{short_key(asked, leaf)} {write(leaf.value)}"
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
    return "\n".join([*lines, *_remarks(resolved)])


def script_brief(
    resolved: ResolvedJob, script: ScriptSpec, cluster: Cluster, width: int | None = None
) -> str:
    """Return what is launched, and what each auto of the launch became.

    Args:
        width: as in `preface`.
    """
    ranks = several(resolved.plan.world_size, "rank")
    what = [*(["-m"] if script.is_module else []), script.name, *script.args]
    autos = [
        f"{each.key} {each.value} ({each.why})"
        for each in resolved.reasons
        if each.key.partition(".")[0] in KEYS
    ]
    warnings = [f"warning: {warning}" for warning in resolved.warnings]
    head = [
        f"{resolved.job.name}: {ranks} on {cluster}",
        f"script: {shown_command(shlex.join(what))}",
    ]
    return "\n".join([*head, *_paragraph("auto: ", autos, width), *warnings])


def places(
    run_dir: Path,
    shown: list[int] | Literal["all"],
    num_ranks: int,
    *,
    is_job: bool = True,
) -> str:
    """Return where a run keeps what is known of it, and where its ranks' output goes.

    Args:
        shown: ranks whose output is shown, `log.ranks` of the job.
        is_job: it has a job, and runs no script.
    """
    whose = "no rank"
    if shown == "all":
        whose = "every rank"
    elif there := [str(rank) for rank in shown if rank < num_ranks]:
        whose = f"rank {', '.join(there)}"
    whole = " (the whole job: job.yaml)" if is_job else ""
    return (
        f"run: {run_dir}{whole}\noutput: {whose} is shown here (log.ranks); "
        f"all ranks: zrun logs {reference(run_dir)}, or logs/ in that folder"
    )


def preface(resolved: ResolvedJob, cluster: Cluster, width: int | None = None) -> str:
    """Return a paragraph for each section of the job, then each auto with its value and reason.

    Args:
        width: columns, so that no value is cut at a terminal's border; None: one line each.
    """
    lines = _head(resolved, cluster)
    for section, values in _sections(resolved.job).items():
        lines += _paragraph(f"{section}: ", values, width)
    lines += [f"auto: {each.key} = {each.value} ({each.why})" for each in resolved.reasons]
    return "\n".join([*lines, *_remarks(resolved)])


def hosts_preface(backend: Backend) -> str:
    """Return a line that says how ranks are started, then one for each host."""
    hosts = backend.hosts or ()
    lines = [f"hosts: {backend}"]
    lines += [f"  {_host(each)}" for each in hosts[:_HOSTS_SHOWN]]
    if len(hosts) > _HOSTS_SHOWN:
        lines.append(f"  and {len(hosts) - _HOSTS_SHOWN} more")
    return "\n".join(lines)


def _head(resolved: ResolvedJob, cluster: Cluster) -> list[str]:
    ranks = several(resolved.plan.world_size, "rank")
    head = [f"{resolved.job.name}: {ranks} on {cluster}", f"batch: {resolved.batch}"]
    disks = {host.hostname: host.disk for host in cluster.hosts if host.disk is not None}
    if disks:
        name, disk = min(disks.items(), key=lambda each: each[1].free_bytes)
        whose = "" if len(disks) == 1 else f" ({name}, which has least of {len(disks)} hosts)"
        head.append(f"disk: {in_words(disk)}{whose}")
    return head


def _remarks(resolved: ResolvedJob) -> list[str]:
    warnings = [f"warning: {warning}" for warning in resolved.warnings]
    return [*warnings, *(f"note: {note}" for note in resolved.notes)]


def _is_worth_a_word(leaf: JobValue) -> bool:
    """Return whether a key belongs into a few lines: arguments of the user's own code do not."""
    return leaf.path[0] not in (*_UNSHOWN, "hosts") and "args" not in leaf.path


def short_key(job: JobConfig, leaf: JobValue) -> str:
    """Return a key as a job file has it in short: `zero` of `zero: 2`, for `zero.stage`."""
    section: object = job
    for name in leaf.path[:-1]:
        section = getattr(section, name, None)
    path = leaf.path
    if isinstance(section, Section) and section.short is not None and section.short[0] == path[-1]:
        path = path[:-1]
    return ".".join(path)


def _host(entry: HostEntry) -> str:
    user = ""
    if entry.user is not None:
        user = f"{entry.user}@"
    slots = "its GPUs, or 1 slot"
    if entry.slots is not None:
        slots = f"slots={entry.slots}"
    if entry.chosen is not None:
        slots = f"slots {','.join(map(str, entry.chosen))}"
        if entry.slots is not None:
            slots += f" of {entry.slots}"
    return f"{user}{entry}  {slots}  ({entry.where})"


def _paragraph(head: str, values: list[str], width: int | None) -> list[str]:
    """Return `head` and the values between commas; nothing if there are none.

    Lines after the first are indented.
    """
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
        name = "job"
        key = section
        if rest:
            name = section
            key = ".".join(rest)
        sections.setdefault(name, []).append(f"{key} {write(leaf.value)}")
    return sections


def _has_effect(job: JobConfig, key: str) -> bool:
    """Return whether a key takes effect beside the others: loss scaling does with fp16 only."""
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
    if key.startswith("offload."):
        return job.uses_disk or job.offload.tiers != {"device"}
    if key == "parallel.schedule":
        return job.parallel.pp > 1 or job.parallel.facts.goes_in_slices
    if key in ("parallel.virtual", "parallel.split"):
        return job.parallel.pp > 1
    if key.startswith("parallel."):
        return job.parallel.model_ranks > 1
    if key == "lr.power":
        return job.lr.schedule == "polynomial"
    return True
