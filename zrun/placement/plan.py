"""Resolve each `auto` of a job on a cluster, and assign its ranks: `make_plan(job, cluster)`.

`make_plan` is pure, so that a plan for other machines needs only their `HostFacts`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from zrun.hosts.backend import Backend, with_backend
from zrun.hosts.cluster import Cluster
from zrun.job.problems import AutoValue
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
from zrun.placement.place import assign_ranks, resolve_dims
from zrun.placement.remarks import notes_of, warnings_of
from zrun_core.errors import JobError, PreflightError
from zrun_core.sizes import format_size, several
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.optimizer_args import OWN_DEFAULTS
from zrun_core.spine.sections.section import MAX_RANKS
from zrun_core.spine.spec import BatchPlan, LaunchPlan, resolve_batch, resolve_bucket

_DECAYING = ("linear", "cosine", "polynomial", "wsd")


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
    reasons = [*why_device, *why_slots, *why_threads]
    dims = resolve_dims(job.parallel, num_ranks)
    if job.parallel.dp == "auto" and dims.tp * dims.pp > 1:
        why = f"{several(num_ranks, 'rank')} / (tp {dims.tp} x pp {dims.pp})"
        reasons.append(AutoValue("parallel.dp", str(dims.dp), why))
    found = assign_ranks(job, cluster, device, dims, slots, threads)
    batch = _batch(job, dims.dp, reasons)
    _check_shard_group(job, dims.dp)
    check_micro_batches(job, batch)
    plan = LaunchPlan(ranks=found.ranks)
    plan.shard_size(job.zero)  # refuses hosts that would hold different parts of the states
    bind, why_bind = resolve_bind(job, cluster, found.unbound)
    reasons += why_bind
    resolved = job.model_copy(
        update={
            "device": device,
            "slots": shared(slots),
            "threads": shared(threads),
            "parallel": job.parallel.model_copy(update={"dp": dims.dp}),
            "bind": bind,
            "batch": job.batch.model_copy(
                update={"global_": batch.global_size, "micro": batch.micro}
            ),
            "zero": job.zero.model_copy(update={"bucket": _bucket(job, device, reasons)}),
            "lr": job.lr.model_copy(update={"decay_steps": _decay_steps(job, reasons)}),
            "optim": job.optim.model_copy(update=_own_defaults(job, reasons)),
        }
    )
    return ResolvedJob(
        resolved,
        plan,
        batch,
        tuple(reasons),
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


def _batch(job: JobConfig, slots: int, reasons: list[AutoValue]) -> BatchPlan:
    batch = resolve_batch(job, slots)
    ranks = several(slots, "rank")
    if job.batch.global_ == "auto":
        why = f"micro {batch.micro} x {ranks}"
        reasons.append(AutoValue("batch.global", str(batch.global_size), why))
    if job.batch.micro == "auto":
        why = f"global {batch.global_size} / {ranks}, no accumulation"
        reasons.append(AutoValue("batch.micro", str(batch.micro), why))
    return batch


def _check_shard_group(job: JobConfig, slots: int) -> None:
    group = job.zero.shard_group
    if isinstance(group, int) and job.zero.stage > 0 and slots % group:
        raise JobError(
            f"zero.shard_group: groups of {group} do not divide {several(slots, 'rank')}: write a "
            "divisor, or all"
        )


def _bucket(job: JobConfig, device: str, reasons: list[AutoValue]) -> int:
    bucket = resolve_bucket(job.zero, device)
    if job.zero.bucket == "auto":
        reasons.append(AutoValue("zero.bucket", format_size(bucket), f"on {device}"))
    return bucket


def _decay_steps(job: JobConfig, reasons: list[AutoValue]) -> int | Literal["auto"]:
    """Return the steps of the decay; auto if it has no end, or one that only the data knows."""
    from zrun_core.optim.lr import make_schedule

    if job.epochs is not None and job.lr.schedule in _DECAYING:
        if job.lr.decay_steps == "auto":
            what = "the steps of the run" if job.lr.schedule != "wsd" else "a fifth of the run"
            why = f"{what}, known once the data is open: epochs {job.epochs}"
            reasons.append(AutoValue("lr.decay_steps", "auto", why))
        return job.lr.decay_steps
    if isinstance(job.lr.schedule, str):
        make_schedule(job.lr, job.steps)  # refuses a decay without an end
    if job.lr.decay_steps != "auto" or job.lr.schedule not in _DECAYING or job.steps is None:
        return job.lr.decay_steps
    steps = job.steps
    why = "the run's steps"
    if job.lr.schedule == "wsd":
        steps = max(1, steps // 5)
        why = "a fifth of the run"
    reasons.append(AutoValue("lr.decay_steps", str(steps), why))
    return steps


def _own_defaults(job: JobConfig, reasons: list[AutoValue]) -> dict[str, Any]:
    """Return the hyper-parameters that the job leaves to the optimizer."""
    name = job.optim.name.lower()
    defaults = OWN_DEFAULTS.get(name, {})
    found = {key: value for key, value in defaults.items() if getattr(job.optim, key) is None}
    for key, value in found.items():
        shown = f"{value:g}" if isinstance(value, float) else str(list(value))
        reasons.append(AutoValue(f"optim.{key}", shown, f"{name}'s own"))
    return found
