"""Resolve each `auto` of a job on a cluster, and assign its ranks: `make_plan(job, cluster)`.

Sections resolve their own (`resolve` in `spine.sections`); here are those that hosts decide.
`make_plan` is pure, so that a plan for other machines needs only their `HostFacts`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zrun.hosts.backend import Backend, with_backend
from zrun.hosts.cluster import Cluster
from zrun.placement.gpus import (
    check_gpus,
    hosts_without,
    lacks_gpus,
    resolve_device,
    visible_gpus,
)
from zrun.placement.host_shares import resolve_bind, resolve_slots, resolve_threads, shared
from zrun.placement.late_updates import check_device
from zrun.placement.pipelines import check_micro_batches
from zrun.placement.place import assign_ranks
from zrun.placement.remarks import notes_of, warnings_of
from zrun_core.errors import JobError, PreflightError
from zrun_core.sizes import several
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.spine.sections.auto_values import AutoValue
from zrun_core.spine.sections.section import MAX_RANKS
from zrun_core.spine.spec import BatchPlan, LaunchPlan


@dataclass(frozen=True)
class ResolvedJob:
    """A job on a cluster, with every decision made and explained."""

    job: JobConfig  # without any auto
    plan: LaunchPlan
    batch: BatchPlan
    reasons: tuple[AutoValue, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def make_plan(job: JobConfig, cluster: Cluster) -> ResolvedJob:
    """Assign the ranks of `job` to `cluster`, and resolve what it leaves to auto.

    What differs from host to host stays auto in the job: the plan has it for each rank.

    Raises:
        PreflightError: a host lacks the GPUs, slots or links that the job asks for, or a variable
            of the environment names GPUs that it does not have.
        JobError: `parallel`, the batch or `zero.shard_group` does not divide over the ranks, each
            micro-batch is a step and steps have several, the learning rate has no end to decay
            to, or an asynchronous server would train on GPUs.
    """
    cluster = visible_gpus(job, cluster)
    device, why_device = resolve_device(job, cluster)
    check_device(job, device)
    slots, why_slots = resolve_slots(job, cluster, device)
    threads, why_threads = resolve_threads(job, cluster, slots)
    num_ranks = sum(slots.values())
    if num_ranks > MAX_RANKS:
        raise JobError(
            f"slots: {num_ranks} ranks on {several(len(slots), 'host')}, and zrun plans "
            f"{MAX_RANKS} at most"
        )
    known = job.launch_facts(device, num_ranks)
    parallel, why_parallel = job.parallel.resolve(known)
    dims = ParallelDims.of(parallel)
    found = assign_ranks(job, cluster, device, dims, slots, threads)
    sizes, why_batch = job.batch.resolve(known)
    batch = BatchPlan.of(sizes, dims.dp)
    _check_shard_group(job, dims.dp)
    check_micro_batches(job, batch)
    plan = LaunchPlan(ranks=found.ranks)
    plan.shard_size(job.zero)  # refuses hosts that would hold different parts of the states
    _check_decay(job)
    bind, why_bind = resolve_bind(job, cluster, found.unbound)
    placed = job.model_copy(
        update={
            "device": device,
            "slots": shared(slots),
            "threads": shared(threads),
            "bind": bind,
            "parallel": parallel,
            "batch": sizes,
        }
    )
    resolved, why_others = placed.resolve(known)
    return ResolvedJob(
        resolved,
        plan,
        batch,
        reasons=(
            *why_device,
            *why_slots,
            *why_threads,
            *why_parallel,
            *why_batch,
            *why_bind,
            *why_others,
        ),
        warnings=tuple(warnings_of(job, cluster, device, slots, found)),
        notes=tuple(notes_of(job, cluster, device, batch)),
    )


def plan_on_backend(job: JobConfig, backend: Backend, cluster: Cluster) -> ResolvedJob:
    """Resolve `job` as a launch does: with the keys that the hosts of `backend` decide.

    Raises:
        JobError: as for `check_gpus` and `make_plan`.
        PreflightError: likewise.
    """
    config, reasons = with_backend(job, backend)
    check_gpus(backend.gpus, config, cluster)
    resolved = make_plan(config, cluster)
    return replace(resolved, reasons=(*reasons, *resolved.reasons))


def plan_every_gpu(cluster: Cluster, tp: int, pp: int) -> LaunchPlan:
    """Return the plan of a job that takes every GPU, to show where its ranks would be.

    Where there are none, each host has the ranks of one model, on its cores.

    Raises:
        PreflightError: some hosts have no GPU, or a tp group would span hosts.
        JobError: tp and pp do not divide the ranks.
    """
    without = hosts_without(cluster)
    if without and len(without) < len(cluster.hosts):
        raise PreflightError(
            f"{lacks_gpus(cluster, without)}, and the others have some: leave these hosts out, "
            "or leave out --tp and --pp"
        )
    keys: dict[str, Any] = {
        "name": "topo",
        "model": "m:f",
        "data": "m:f",
        "steps": 1,
        "batch": {"micro": 1},
    }
    if without:
        keys |= {"device": "cpu", "slots": tp * pp}
    job = JobConfig.model_validate(keys | {"parallel": {"tp": tp, "pp": pp}})
    return make_plan(job, cluster).plan


def _check_shard_group(job: JobConfig, slots: int) -> None:
    group = job.zero.shard_group
    if isinstance(group, int) and job.zero.stage > 0 and slots % group:
        raise JobError(
            f"zero.shard_group: groups of {group} do not divide {several(slots, 'rank')}: write a "
            "divisor, or all"
        )


def _check_decay(job: JobConfig) -> None:
    """Refuse a learning rate that decays to an end that nothing tells; epochs do, by the data."""
    if job.lr.decays and job.epochs is None:
        job.lr.decay_end(job.steps)
