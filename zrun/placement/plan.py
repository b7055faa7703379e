"""Resolve each `auto` of a job on a cluster, and assign its ranks: `make_plan(job, cluster)`.

`make_plan` is pure, so that a plan for other machines needs only their `HostFacts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from zrun.hosts.backend import Backend, with_backend
from zrun.hosts.cluster import Cluster, HostFacts, each, listed
from zrun.hosts.offload_disk import find_warnings
from zrun.job.problems import AutoValue
from zrun.placement.late_updates import check_device, notes_on_late_gradients
from zrun.placement.pipelines import check_micro_batches, notes_on_bubble, notes_on_late_weights
from zrun.placement.place import RankAssignment, assign_ranks, group_on_hosts, resolve_dims
from zrun_core.errors import JobError, PreflightError
from zrun_core.sizes import format_size, several
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.optimizer_args import OWN_DEFAULTS
from zrun_core.spine.sections.profile import why_no_ranks
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
    reasons: list[AutoValue] = []
    cluster = _visible_gpus(job, cluster)
    device = _device(job, cluster, reasons)
    check_device(job, device)
    slots = _slots(job, cluster, device, reasons)
    threads = _threads(job, cluster, slots, reasons)
    num_ranks = sum(slots.values())
    if num_ranks > MAX_RANKS:
        raise JobError(
            f"slots: {num_ranks} ranks on {several(len(slots), 'host')}, and zrun plans "
            f"{MAX_RANKS} at most"
        )
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
    resolved = job.model_copy(
        update={
            "device": device,
            "slots": _shared(slots),
            "threads": _shared(threads),
            "parallel": job.parallel.model_copy(update={"dp": dims.dp}),
            "bind": _bind(job, cluster, found, reasons),
            "batch": job.batch.model_copy(
                update={"global_": batch.global_size, "micro": batch.micro}
            ),
            "zero": job.zero.model_copy(update={"bucket": _bucket(job, device, reasons)}),
            "lr": job.lr.model_copy(update={"decay_steps": _decay_steps(job, reasons)}),
            "optim": job.optim.model_copy(update=_own_defaults(job, reasons)),
        }
    )
    warnings = [*_across_hosts(found), *_absent(job, num_ranks), *_not_profiled(job, num_ranks)]
    notes = [
        *notes_on_bubble(job, batch),
        *notes_on_late_weights(job, batch),
        *notes_on_late_gradients(job, batch),
        *_are_slices(job),
        *_hidden_gpus(job, cluster),
    ]
    if device == "cpu":
        warnings = [
            *_idle_drivers(job, cluster),
            *_crowded(cluster, slots, dims.tp * dims.pp),
            *warnings,
        ]
        notes += _stays_on_host(job)
    else:
        notes += _pageable(job, cluster)
    warnings += _slow_disks(job, cluster)
    return ResolvedJob(resolved, plan, batch, tuple(reasons), tuple(warnings), tuple(notes))


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
    without = [host.hostname for host in cluster.hosts if not host.gpus]
    if without and len(without) < len(cluster.hosts):
        raise PreflightError(
            f"{_lacks_gpus(cluster, without)}, and the others have some: leave these hosts out, "
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


def check_gpus(asked: int | None, job: JobConfig, cluster: Cluster) -> None:
    """Refuse `--gpus` where ranks would train on CPUs.

    Args:
        asked: the value of `--gpus`; None: it was not given.

    Raises:
        JobError: the job wants no GPU.
        PreflightError: a host has none.
    """
    if asked is None:
        return
    if job.device == "cpu":
        raise JobError(
            f"--gpus {asked} asks for GPUs, and the job has device: cpu: write --slots {asked} for "
            f"{several(asked, 'rank')} on CPUs, or leave device out"
        )
    without = [host for host in cluster.hosts if not host.gpus]
    if without:
        names = listed([host.hostname for host in without])
        have = "has" if len(without) == 1 else "have"
        found = str(without[0])
        advice = f"write --slots {asked} for {several(asked, 'rank')} on CPUs"
        if without[0].hidden is not None:
            found += f"; {without[0].hidden}"
            advice = f"unset it, or {advice}"
        raise PreflightError(
            f"--gpus {asked} asks for GPUs, and {names} {have} none that is usable (found "
            f"{found}): {advice}"
        )


def _crowded(cluster: Cluster, slots: dict[str, int], num_model: int) -> Iterator[str]:
    """Warn of each host that has more ranks than cores; one model takes `num_model` ranks."""
    for host in cluster.hosts:
        ranks = slots[host.hostname]
        if ranks > host.cores:
            advice = "" if host.cores % num_model else f"; write slots: {host.cores}"
            yield (
                f"{ranks} ranks share {several(host.cores, 'core')} of {host.hostname}: they take "
                f"turns, no step gets faster than with {several(host.cores, 'rank')}, and each "
                f"takes memory of its own{advice}"
            )


def _idle_drivers(job: JobConfig, cluster: Cluster) -> Iterator[str]:
    """Warn of hosts that train on CPUs because of a driver that shows no GPU."""
    for host in cluster.hosts:
        if job.device == "auto" and host.why_no_gpus and not host.gpus and host.hidden is None:
            why = f"it has no usable GPU: {host.why_no_gpus}"
            yield f"{host.hostname} trains on its CPUs, for {why}"


def _hidden_gpus(job: JobConfig, cluster: Cluster) -> Iterator[str]:
    """Say which hosts train on CPUs because a variable hides their GPUs: it may be on purpose."""
    for host in cluster.hosts:
        if job.device == "auto" and host.hidden is not None:
            yield f"{host.hostname} trains on its CPUs, for {host.hidden}"


def _across_hosts(found: RankAssignment) -> Iterator[str]:
    """Warn of tp groups whose messages go between hosts."""
    if found.spread:
        where = group_on_hosts(found.spread[0], found.ranks)
        yield (
            f"parallel.allow_cross_node_tp: {several(len(found.spread), 'tp group')} on several "
            f"hosts, such as {where}: the messages of each block wait for the network; a tp that "
            "divides the slots of every host keeps them inside"
        )


def _are_slices(job: JobConfig) -> Iterator[str]:
    """Say that inputs of blocks cannot be divided again."""
    if job.activations.partition and job.parallel.sequence:
        yield (
            "activations.partition: with parallel.sequence the inputs of blocks are slices of the "
            "sequence already, so it changes nothing"
        )


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


def _slow_disks(job: JobConfig, cluster: Cluster) -> Iterator[str]:
    for host in cluster.hosts:
        if host.disk is not None:
            yield from (f"{host.hostname}: {each}" for each in find_warnings(host.disk, job))


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


def _shared(values: dict[str, int]) -> int | Literal["auto"]:
    """Return the value that all hosts have; auto if they differ: then the plan has it."""
    found = set(values.values())
    return found.pop() if len(found) == 1 else "auto"


def _device(job: JobConfig, cluster: Cluster, reasons: list[AutoValue]) -> Literal["cpu", "cuda"]:
    without = [host.hostname for host in cluster.hosts if not host.gpus]
    some_have = len(without) < len(cluster.hosts)
    wants_gpus = job.device == "cuda" or (job.device == "auto" and some_have)
    if without and wants_gpus:
        advice = "write device: cpu or auto"
        if some_have:
            advice = "leave out the hosts without, or write device: cpu"
        elif cluster.hosts[0].hidden is not None:
            advice = "unset it, or write device: cpu"
        raise PreflightError(f"device: {job.device}, but {_lacks_gpus(cluster, without)}: {advice}")
    if job.device != "auto":
        return job.device
    device: Literal["cpu", "cuda"] = "cpu" if without else "cuda"
    reasons.append(AutoValue("device", device, str(cluster)))
    return device


def _lacks_gpus(cluster: Cluster, without: list[str]) -> str:
    """Say which hosts have no GPU, and why, as far as the first of them knows."""
    have = "has" if len(without) == 1 else "have"
    first = next(host for host in cluster.hosts if host.hostname == without[0])
    why = f" ({first.why_no_gpus})" if first.why_no_gpus else ""
    return f"{listed(without)} {have} no usable GPU{why}"


def _visible_gpus(job: JobConfig, cluster: Cluster) -> Cluster:
    """Return the hosts with those GPUs that the job's own environment leaves.

    Raises:
        PreflightError: a variable names GPUs that are not there.
    """
    environ = {name: value for name, value in job.env.items() if value is not None}
    limited = Cluster(tuple(host.limited(environ) for host in cluster.hosts))
    if job.device == "cpu":
        return limited
    for host in limited.hosts:
        if host.misnamed is not None:
            raise PreflightError(
                f"{host.hostname}: {host.misnamed}: correct it, unset it for all GPUs, or write "
                "device: cpu"
            )
    return limited


def _slots(
    job: JobConfig, cluster: Cluster, device: str, reasons: list[AutoValue]
) -> dict[str, int]:
    """Return the ranks of each host."""
    slots = {host.hostname: _slots_of(job, host, device) for host in cluster.hosts}
    if job.slots != "auto":
        return slots
    if any(host.slots is not None or host.chosen is not None for host in cluster.hosts):
        why = "the slots given to each host"
    elif device == "cuda":
        why = f"one rank per GPU of {listed(list(slots))}"
    elif len(slots) > 1:
        why = "one rank where there is no GPU of each host"
    else:
        why = "one rank where there is no GPU"
    shown = each(cluster.hosts, lambda host: slots[host.hostname])
    reasons.append(AutoValue("slots", shown, why))
    return slots


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


def _threads(
    job: JobConfig, cluster: Cluster, slots: dict[str, int], reasons: list[AutoValue]
) -> dict[str, int]:
    """Return the CPU threads of a rank on each host."""

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

    is_crowded = any(num_busy(host) > host.cores for host in cluster.hosts)
    if job.threads == "auto" or is_crowded:
        reasons.append(AutoValue("threads", each(cluster.hosts, number), each(cluster.hosts, why)))
    return {host.hostname: number(host) for host in cluster.hosts}


def _bind(
    job: JobConfig, cluster: Cluster, found: RankAssignment, reasons: list[AutoValue]
) -> Literal["auto", "off"]:
    """Return off if no rank of any host is bound to cores."""
    is_bound = None in found.unbound.values()
    bind: Literal["auto", "off"] = "auto" if is_bound else "off"
    if job.bind == "auto":
        own = "each rank keeps to cores of its own"
        why = each(cluster.hosts, lambda host: found.unbound[host.hostname] or own)
        reasons.append(AutoValue("bind", bind, why))
    return bind


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
