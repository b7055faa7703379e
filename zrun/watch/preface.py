"""What is about to run: every value that takes effect, so that no default is silent."""

from __future__ import annotations

import shutil
from typing import TextIO

from zrun.job.load import leaves
from zrun.job.scalars import write
from zrun.launch.cluster import Cluster
from zrun.launch.hosts import Backend, HostEntry
from zrun.launch.plan import Resolved
from zrun_core.config import JobConfig

_UNSHOWN = ("name", "batch", "env")
_HOSTS_SHOWN = 64


def print_preface(resolved: Resolved, cluster: Cluster, out: TextIO) -> None:
    """Print it as wide as `out` is."""
    width = shutil.get_terminal_size().columns if out.isatty() else None
    print(preface(resolved, cluster, width), file=out)


def preface(resolved: Resolved, cluster: Cluster, width: int | None = None) -> str:
    """A paragraph for each section of the job, then each auto with its value and reason.

    Args:
        width: columns, so that no value is cut at a terminal's border; None: one line each.
    """
    plan = resolved.plan
    ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"
    lines = [f"{resolved.job.name}: {ranks} on {cluster}", f"batch: {resolved.batch}"]
    for section, values in _sections(resolved.job).items():
        lines += _paragraph(f"{section}: ", values, width)
    lines += [f"auto: {each.key} = {each.value} ({each.why})" for each in resolved.reasons]
    lines += [f"warning: {warning}" for warning in resolved.warnings]
    return "\n".join(lines)


def hosts_preface(backend: Backend) -> str:
    """How ranks are started, then a line for each host."""
    hosts = backend.hosts or ()
    more = len(hosts) - _HOSTS_SHOWN
    lines = [f"hosts: {backend}", *(f"  {_host(each)}" for each in hosts[:_HOSTS_SHOWN])]
    return "\n".join([*lines, f"  and {more} more"] if more > 0 else lines)


def _host(entry: HostEntry) -> str:
    user = f"{entry.user}@" if entry.user is not None else ""
    slots = "its GPUs, or 1 slot" if entry.slots is None else f"slots={entry.slots}"
    if entry.chosen is not None:
        slots = f"slots {','.join(map(str, entry.chosen))}" + ("" if entry.slots is None else f" of {entry.slots}")
    return f"{user}{entry}  {slots}  ({entry.where})"


def _paragraph(head: str, values: list[str], width: int | None) -> list[str]:
    """`head` and the values between commas; lines after the first are indented."""
    lines = [head + values[0]]
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
    for leaf in leaves(job):
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
