"""What each rank gets of its host, where the job leaves it open: slots, threads, cores.

Each function has a value for each host: what differs stays auto in the job, and the plan has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from zrun.hosts.cluster import Cluster, HostFacts, each, listed
from zrun_core.errors import PreflightError
from zrun_core.sizes import several
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.auto_values import AutoValue


def resolve_slots(
    job: JobConfig, cluster: Cluster, device: str
) -> tuple[dict[str, int], tuple[AutoValue, ...]]:
    """Return the ranks of each host, and why there are so many.

    Raises:
        PreflightError: a host has not as many slots or GPUs as the job asks for.
    """
    slots = {host.hostname: _slots_of(job, host, device) for host in cluster.hosts}
    if job.slots != "auto":
        return slots, ()
    if any(host.slots is not None or host.chosen is not None for host in cluster.hosts):
        why = "the slots given to each host"
    elif device == "cuda":
        why = f"one rank per GPU of {listed(list(slots))}"
    elif len(slots) > 1:
        why = "one rank where there is no GPU of each host"
    else:
        why = "one rank where there is no GPU"
    shown = each(cluster.hosts, lambda host: slots[host.hostname])
    return slots, (AutoValue("slots", shown, why),)


def _slots_of(job: JobConfig, host: HostFacts, device: str) -> int:
    """Return the ranks of a host: by the job, else by its list of hosts, else one per GPU."""
    num_gpus = len(host.gpus)
    given = len(host.chosen) if host.chosen is not None else host.slots
    if job.slots != "auto":
        slots = job.slots
        if given is not None and slots > given:
            raise PreflightError(
                f"more ranks than slots: slots: {slots}, but {host.hostname} is given "
                f"{several(given, 'slot')}: write slots: {given} or auto"
            )
    elif given is not None:
        slots = given
    elif device == "cuda":
        slots = num_gpus
    else:
        slots = 1
    highest = max((host.chosen or (-1,))[:slots]) + 1
    if device == "cuda" and max(slots, highest) > num_gpus:
        asked = f"slot {highest - 1} is wanted" if highest > slots else f"slots: {slots}"
        raise PreflightError(
            f"more ranks than slots: {asked}, but {host.hostname} has "
            f"{several(num_gpus, 'GPU')}: write slots: {num_gpus} or device: cpu"
        )
    return slots


def resolve_threads(
    job: JobConfig, cluster: Cluster, slots: Mapping[str, int]
) -> tuple[dict[str, int], tuple[AutoValue, ...]]:
    """Return the CPU threads of a rank on each host, and why; also where they share cores."""

    def number(host: HostFacts) -> int:
        if job.threads != "auto":
            return job.threads
        return max(1, host.cores // slots[host.hostname])

    def num_busy(host: HostFacts) -> int:
        return slots[host.hostname] * number(host)

    def why(host: HostFacts) -> str:
        reason = "as written"
        if job.threads == "auto":
            reason = f"{host.cores} usable cores / {several(slots[host.hostname], 'rank')}"
        if num_busy(host) > host.cores:
            shared = several(host.cores, "core")
            reason += f"; {num_busy(host)} threads share {shared}, which is slow"
        return reason

    threads = {host.hostname: number(host) for host in cluster.hosts}
    is_crowded = any(num_busy(host) > host.cores for host in cluster.hosts)
    if job.threads != "auto" and not is_crowded:
        return threads, ()
    shown = each(cluster.hosts, number)
    return threads, (AutoValue("threads", shown, each(cluster.hosts, why)),)


def resolve_bind(
    job: JobConfig, cluster: Cluster, unbound: Mapping[str, str | None]
) -> tuple[Literal["auto", "off"], tuple[AutoValue, ...]]:
    """Return off if no rank of any host is bound to cores, and why where the job leaves it open.

    Args:
        unbound: by host, why its ranks are not; None: they are.
    """
    bind: Literal["auto", "off"] = "auto" if None in unbound.values() else "off"
    if job.bind != "auto":
        return bind, ()
    own = "each rank keeps to cores of its own"
    why = each(cluster.hosts, lambda host: unbound[host.hostname] or own)
    return bind, (AutoValue("bind", bind, why),)


def shared(values: Mapping[str, int]) -> int | Literal["auto"]:
    """Return the value that all hosts have; auto if they differ: then the plan has it."""
    found = set(values.values())
    return found.pop() if len(found) == 1 else "auto"
