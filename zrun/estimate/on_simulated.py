"""A job on a cluster that is not at hand, for `zrun check --simulate`: its plan, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zrun.estimate.answer import Answer
from zrun.estimate.machine import hosts_of
from zrun.estimate.plan_tables import fullest, pipeline_line, pipeline_table, tier_lines
from zrun.hosts.cluster import Cluster
from zrun.job.load import LoadedJob
from zrun.placement.plan import ResolvedJob, make_plan
from zrun_core.sizes import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zrun_core.hardware.hardware import Hardware


def plan_on(loaded: LoadedJob, hardware: Hardware) -> tuple[ResolvedJob, Cluster]:
    """Place a job on hardware by name, with a rank on each of its devices.

    Raises:
        JobError: as for `make_plan`.
        PreflightError: likewise.
    """
    cluster = hosts_of(hardware)
    config = loaded.config.model_copy(update={"device": "auto", "slots": "auto"})
    return make_plan(config, cluster), cluster


def memory_view(found: Answer, width: int) -> Iterator[RenderableType]:
    """Draw where a pipeline is cut, and what the fullest rank takes of its device."""
    chosen = found.chosen
    hardware = found.question.hardware
    if chosen.stages:
        yield pipeline_table(chosen, width)
        yield pipeline_line(chosen)
    rank = fullest(chosen)
    used = rank.device_used
    whose = "each rank" if len(chosen.ranks) == 1 else f"the fullest rank ({_role(rank.role)})"
    device = "its share of the host" if hardware.shares_memory else hardware.device.name
    free = f", {1 - used / chosen.capacity:.0%} free" if used <= chosen.capacity else ""
    yield (
        f"memory: {whose} takes {format_size(used)} of the {format_size(chosen.capacity)} of "
        f"{device}{free}; activations: {chosen.source}"
    )
    yield from tier_lines(chosen, hardware, found.tokens_per_sample)
    if found.verdict:
        yield found.verdict


def memory_facts(found: Answer) -> dict[str, Any]:
    """Return the same for JSON."""
    chosen = found.chosen
    return {
        "fits": found.fits,
        "sentence": found.sentence or None,
        "capacity": chosen.capacity,
        "ranks": {rank.role: rank.device_used for rank in chosen.ranks},
        "stages": [
            {"blocks": list(stage.blocks), "device_bytes": stage.device_used}
            for stage in chosen.stages
        ],
    }


def _role(role: str) -> str:
    return role if role.startswith("stage") else f"{role} stage"
