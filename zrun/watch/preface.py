"""What is about to run: every value that takes effect, so that no default is silent."""

from __future__ import annotations

from zrun.job.load import leaves
from zrun.job.scalars import write
from zrun.launch.plan import HostFacts, Resolved
from zrun_core.config import JobConfig

_UNSHOWN = ("name", "env")


def preface(resolved: Resolved, host: HostFacts) -> str:
    """A line for each section of the job, then each auto with its value and reason."""
    plan = resolved.plan
    ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"
    hosts = f"{len(plan.hosts)} host{'s' if len(plan.hosts) > 1 else ''}, {len(host.gpus)} GPUs"
    lines = [f"{resolved.job.name}: {ranks} on {hosts} ({host})", f"batch: {resolved.batch}"]
    lines += [f"{section}: {', '.join(values)}" for section, values in _sections(resolved.job).items()]
    lines += [f"auto: {each.key} = {each.value} ({each.why})" for each in resolved.reasons]
    return "\n".join(lines)


def _sections(job: JobConfig) -> dict[str, list[str]]:
    """`section -> ["key value", ...]`; keys that stand alone share a line."""
    sections: dict[str, list[str]] = {"job": []}
    for leaf in leaves(job):
        section, *rest = leaf.path
        if section in _UNSHOWN or section == "batch":
            continue
        name, key = (section, ".".join(rest)) if rest else ("job", section)
        sections.setdefault(name, []).append(f"{key} {write(leaf.value)}")
    return sections
