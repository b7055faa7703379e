"""What a person is told of a plan that works: warnings of what costs, notes on what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zrun.hosts.cluster import Cluster, listed
from zrun.hosts.offload_disk import find_warnings
from zrun.placement.late_updates import notes_on_late_gradients
from zrun.placement.pipelines import notes_on_bubble, notes_on_late_weights
from zrun.placement.place import RankAssignment, group_on_hosts
from zrun_core.errors import JobError
from zrun_core.sizes import format_size, several
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.profile import why_no_ranks
from zrun_core.spine.spec import BatchPlan


def warnings_of(
    job: JobConfig, cluster: Cluster, device: str, slots: Mapping[str, int], found: RankAssignment
) -> Iterator[str]:
    """Yield what will be slow, or is not as the job says.

    Args:
        job: as written.
        slots: number of ranks, by host.

    Raises:
        JobError: ranks are to be profiled that do not exist.
    """
    num_ranks = len(found.ranks)
    if device == "cpu":
        yield from _idle_drivers(job, cluster)
        yield from _crowded(job, cluster, slots)
    yield from _across_hosts(found)
    yield from _absent(job, num_ranks)
    yield from _not_profiled(job, num_ranks)
    yield from _slow_disks(job, cluster)


def notes_of(job: JobConfig, cluster: Cluster, device: str, batch: BatchPlan) -> Iterator[str]:
    """Yield what a plan changes, keeps, or leaves without effect, where one may not expect it.

    Args:
        job: as written.
    """
    yield from notes_on_bubble(job, batch)
    yield from notes_on_late_weights(job, batch)
    yield from notes_on_late_gradients(job, batch)
    yield from _are_slices(job)
    yield from _hidden_gpus(job, cluster)
    if device == "cpu":
        yield from _stays_on_host(job)
    else:
        yield from _pageable(job, cluster)


# Warnings


def _idle_drivers(job: JobConfig, cluster: Cluster) -> Iterator[str]:
    """Warn of hosts that train on CPUs because of a driver that shows no GPU."""
    for host in cluster.hosts:
        if job.device == "auto" and host.why_no_gpus and not host.gpus and host.hidden is None:
            why = f"it has no usable GPU: {host.why_no_gpus}"
            yield f"{host.hostname} trains on its CPUs, for {why}"


def _crowded(job: JobConfig, cluster: Cluster, slots: Mapping[str, int]) -> Iterator[str]:
    """Warn of each host that has more ranks than cores."""
    model_ranks = job.parallel.model_ranks
    for host in cluster.hosts:
        ranks = slots[host.hostname]
        if ranks > host.cores:
            advice = "" if host.cores % model_ranks else f"; write slots: {host.cores}"
            yield (
                f"{ranks} ranks share {several(host.cores, 'core')} of {host.hostname}: they take "
                f"turns, no step gets faster than with {several(host.cores, 'rank')}, and each "
                f"takes memory of its own{advice}"
            )


def _across_hosts(found: RankAssignment) -> Iterator[str]:
    """Warn of tp groups whose messages go between hosts."""
    if found.spread:
        where = group_on_hosts(found.spread[0], found.ranks)
        yield (
            f"parallel.allow_cross_node_tp: {several(len(found.spread), 'tp group')} on several "
            f"hosts, such as {where}: the messages of each block wait for the network; a tp that "
            "divides the slots of every host keeps them inside"
        )


def _absent(job: JobConfig, num_ranks: int) -> Iterator[str]:
    """Warn of ranks whose output is to be shown and that do not exist: hosts may be missing."""
    if job.log.ranks == "all":
        return
    if (why := why_no_ranks(job.log.ranks, num_ranks)) is not None:
        yield f"log.ranks: {why}"


def _not_profiled(job: JobConfig, num_ranks: int) -> Iterator[str]:
    """Refuse to profile ranks that do not exist, or warn of them where hosts may be missing."""
    if job.profile is None or (why := why_no_ranks(job.profile.ranks, num_ranks)) is None:
        return
    if job.min_hosts is None:
        raise JobError(f"profile.ranks: {why}; write ranks: [0]")
    yield f"profile.ranks: {why}"


def _slow_disks(job: JobConfig, cluster: Cluster) -> Iterator[str]:
    for host in cluster.hosts:
        if host.disk is not None:
            yield from (f"{host.hostname}: {each}" for each in find_warnings(host.disk, job))


# Notes


def _are_slices(job: JobConfig) -> Iterator[str]:
    """Say that inputs of blocks cannot be divided again."""
    if job.activations.partition and job.parallel.sequence:
        yield (
            "activations.partition: with parallel.sequence the inputs of blocks are slices of the "
            "sequence already, so it changes nothing"
        )


def _hidden_gpus(job: JobConfig, cluster: Cluster) -> Iterator[str]:
    """Say which hosts train on CPUs because a variable hides their GPUs: it may be on purpose."""
    for host in cluster.hosts:
        if job.device == "auto" and host.hidden is not None:
            yield f"{host.hostname} trains on its CPUs, for {host.hidden}"


def _stays_on_host(job: JobConfig) -> Iterator[str]:
    """Say which keys change nothing where ranks train in the host's memory."""
    here = "this machine computes in the host's memory, so"
    offload = job.offload
    if offload.optimizer == "host":
        yield f"offload: host: {here} states stay where they are"
    elif "host" in offload.tiers:
        key = "param" if offload.param == "host" else "grad"
        yield f"offload.{key}: host: {here} they stay where they are"
    if job.activations.offload == "host":
        yield f"activations.offload: host: {here} activations stay where they are"


def _pageable(job: JobConfig, cluster: Cluster) -> Iterator[str]:
    """Say where the system may not let states on the host be pinned for the GPU's copies."""
    if "host" not in (*job.offload.tiers, job.activations.offload):
        return
    limits = {host.hostname: host.memlock_bytes for host in cluster.hosts}
    low = {name: limit for name, limit in limits.items() if limit is not None}
    if low:
        yield (
            f"ulimit -l (locked memory) is {format_size(min(low.values()))} on "
            f"{listed(list(low))}: a driver that keeps to it leaves states on the host pageable, "
            "and copies take longer; set memlock unlimited in /etc/security/limits.conf, or "
            "--ulimit memlock=-1 for a container"
        )
