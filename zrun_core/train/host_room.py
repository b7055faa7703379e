"""Find this host's room for states beside the devices of its ranks: `host_room(spec, rank)`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from zrun_core.memory.room import Limit, Room
from zrun_core.spine import memory_limits
from zrun_core.spine.spec import RunSpec


def host_room(spec: RunSpec, rank: int) -> Room:
    """Return what the ranks of this host may take together, before any of them takes it.

    Args:
        spec: of the run. Where ranks are not held to a limit of memory, these are not either.
        rank: one of the host.
    """
    place = spec.plan.ranks[rank]
    ranks = len(spec.plan.ranks_on(place.host))
    if spec.memory_bytes is None:
        return Room(ranks)
    on_host = () if place.device == "cpu" else tuple(_of_memory(spec, ranks))
    on_disk = tuple(_of_disk(spec)) if spec.job.uses_disk else ()
    return Room(ranks, _smallest(on_host), _smallest(on_disk))


def _of_memory(spec: RunSpec, ranks: int) -> Iterator[Limit]:
    yield Limit(memory_limits.host_available(), "free now")
    process = memory_limits.process_available()
    if process is not None:
        yield Limit(ranks * process, "ulimit -d, all ranks together")
    if spec.job.limits.memory is not None:
        yield Limit(spec.job.limits.memory, "limits.memory")
    if spec.job.offload.host_memory is not None:
        yield Limit(spec.job.offload.host_memory, "offload.host_memory")


def _of_disk(spec: RunSpec) -> Iterator[Limit]:
    folder = spec.offload_folder
    with suppress(OSError):
        status = os.statvfs(folder)
        yield Limit(status.f_bavail * status.f_frsize, f"free in {folder}")
    if spec.job.offload.disk_space is not None:
        yield Limit(spec.job.offload.disk_space, "offload.disk_space")


def _smallest(limits: tuple[Limit, ...]) -> Limit | None:
    return min(limits, key=lambda each: each.num_bytes, default=None)
