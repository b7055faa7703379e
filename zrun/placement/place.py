"""Which rank sits where. Pure: a function of what the job asks and what the hosts are.

Ranks are numbered along the axes of parallelism, by default rank = pp * (DP * TP) + dp * TP + tp, and fill the hosts in
their order, so that those of a host are contiguous. Which of a host's GPUs a rank gets follows from the links between
them: `zrun.topology.grouping` keeps a tp group on the best connected ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zrun.hosts.cluster import Cluster, Gpu, HostFacts, listed, several
from zrun.topology.cpus import USER_BINDING, format_cpus, shares
from zrun.topology.grouping import Arrangement, arrange
from zrun_core.errors import JobError, PreflightError
from zrun_core.spine.config import JobConfig, ParallelConfig
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.spine.spec import RankPlace

_GIB = 1 << 30


def resolve_dims(parallel: ParallelConfig, num_ranks: int) -> ParallelDims:
    """Return the axes that a job asks for, on this many ranks.

    Raises:
        JobError: they do not come to that many.
    """
    model = parallel.tp * parallel.pp
    what = f"tp {parallel.tp} x pp {parallel.pp}"
    if parallel.dp == "auto":
        if num_ranks % model:
            raise JobError(
                f"parallel: {what} = {several(model, 'rank')} do not divide the "
                f"{several(num_ranks, 'rank')} of the hosts: write divisors, or slots that give a "
                f"multiple of {model}"
            )
        dp = num_ranks // model
    else:
        dp = parallel.dp
        asked = model * dp
        if asked != num_ranks:
            raise JobError(
                f"parallel: {what} x dp {dp} = {several(asked, 'rank')}, but the hosts have "
                f"{several(num_ranks, 'slot')}: write dp: auto, or slots that give {asked}"
            )
    return ParallelDims(dp, parallel.tp, parallel.pp, order=parallel.order)


@dataclass(frozen=True)
class RankAssignment:
    """Every rank's place, and for each host why its ranks are not bound to cores; None: they are."""

    ranks: list[RankPlace]
    unbound: dict[str, str | None]


def assign_ranks(
    job: JobConfig,
    cluster: Cluster,
    device: Literal["cpu", "cuda"],
    dims: ParallelDims,
    slots: Mapping[str, int],
    threads: Mapping[str, int],
) -> RankAssignment:
    """The place of every rank.

    Args:
        slots: ranks by host.
        threads: CPU threads of a rank by host.

    Raises:
        PreflightError: a tp group would span hosts or slices of a GPU, or ranks that must be alike are not.
    """
    places: list[RankPlace] = []
    gpus: list[Gpu | None] = []
    unbound: dict[str, str | None] = {}
    for host in cluster.hosts:
        count, base = slots[host.hostname], len(places)
        chosen = (
            _gpus_in_order(job, host, dims, base, count) if device == "cuda" else [None] * count
        )
        gpus += chosen
        cpus, unbound[host.hostname] = _cpus(job, host, chosen, threads[host.hostname])
        for local_rank, gpu in enumerate(chosen):
            # CUDA shows a process one slice at most.
            number = 0 if gpu is not None and (gpu.is_slice or host.apart) else local_rank
            where = dims.coordinates(base + local_rank)
            places.append(
                RankPlace(
                    rank=base + local_rank,
                    host=host.hostname,
                    local_rank=local_rank,
                    device=f"cuda:{number}" if device == "cuda" else "cpu",
                    uuid=gpu.uuid or None if gpu is not None else None,
                    pp=where.pp,
                    dp=where.dp,
                    tp=where.tp,
                    threads=threads[host.hostname],
                    cpus=format_cpus(cpus[local_rank]) or None,
                    numa=gpu.numa if gpu is not None else _node(host, cpus[local_rank]),
                )
            )
    _check_tp(job, dims, places, gpus)
    _check_alike(dims, places, gpus)
    return RankAssignment(places, unbound)


def arrangement(
    host: HostFacts, dims: ParallelDims, base: int, devices: Sequence[int], shard_group: int = 1
) -> Arrangement:
    """The order in which `devices` of a host serve its ranks, of which `base` is the first.

    Args:
        shard_group: neighbouring dp ranks that share one copy of the states.
    """
    sizes: list[int] = []
    left, aligned = len(devices), base
    inner = [shard_group] if 1 < shard_group < dims.dp and dims.dp % shard_group == 0 else []
    steps = [
        size
        for axis in dims.order
        for size in ([*inner, dims.dp // (inner or [1])[0]] if axis == "dp" else [dims.size(axis)])
    ]
    for size in steps:
        if (
            left % size or aligned % size
        ):  # this level's groups span hosts: all that is here belongs to few of them
            break
        sizes.append(size)
        left, aligned = left // size, aligned // size
    sizes.append(left)
    sizes = [size for size in sizes if size > 1] or [1]
    if host.links is None or host.links.is_flat:
        return Arrangement(tuple(devices), tuple(sizes))
    found = arrange(host.links.take(devices).bandwidth, sizes)
    return Arrangement(tuple(devices[place] for place in found.order), found.sizes)


def _gpus_in_order(
    job: JobConfig,
    host: HostFacts,
    dims: ParallelDims,
    base: int,
    count: int,
) -> list[Gpu | None]:
    devices = (host.chosen if host.chosen is not None else range(len(host.gpus)))[:count]
    group = job.zero.shard_group
    shard_group = group if isinstance(group, int) and job.zero.stage > 0 else 1
    return [host.gpus[place] for place in arrangement(host, dims, base, devices, shard_group).order]


def _cpus(
    job: JobConfig, host: HostFacts, gpus: Sequence[Gpu | None], threads: int
) -> tuple[list[tuple[int, ...]], str | None]:
    """The CPUs that each rank of a host keeps to, or nothing for any of them, and why."""
    free: list[tuple[int, ...]] = [()] * len(gpus)
    if job.bind == "off":
        return free, "as written"
    if by_hand := [name for name in USER_BINDING if name in job.env]:
        return free, f"env.{by_hand[0]} is set"
    if host.unbound is not None or not host.nodes:
        return free, host.unbound or "its cores are not known"
    found = shares(host.nodes, [gpu.numa if gpu is not None else None for gpu in gpus])
    if found == [host.cpus]:
        return free, "one rank has all cores"
    if any(len(cpus) < threads for cpus in found):
        return free, "ranks share cores" if len(host.cpus) < threads * len(
            gpus
        ) else "too few cores near its GPU"
    return found, None


def _node(host: HostFacts, cpus: tuple[int, ...]) -> int | None:
    """The node that all of these CPUs are of."""
    return next((node.id for node in host.nodes if cpus and set(cpus) <= set(node.cpus)), None)


def _check_tp(
    job: JobConfig,
    dims: ParallelDims,
    places: Sequence[RankPlace],
    gpus: Sequence[Gpu | None],
) -> None:
    if dims.tp == 1:
        return
    if sliced := list(
        dict.fromkeys(places[rank].host for rank, gpu in enumerate(gpus) if gpu and gpu.is_slice)
    ):
        raise PreflightError(
            f"parallel.tp: {dims.tp}, but {listed(sliced)} {'offers' if len(sliced) == 1 else 'offer'} MIG slices, "
            "which have no links to each other: write parallel.tp: 1, or turn MIG off"
        )
    if job.parallel.allow_cross_node_tp:
        return
    spread: dict[str, None] = {}
    for group in dims.groups("tensor"):
        hosts = dict.fromkeys(places[rank].host for rank in group)
        fabrics = {gpu.fabric if (gpu := gpus[rank]) is not None else None for rank in group}
        if len(hosts) > 1 and (None in fabrics or len(fabrics) > 1):
            spread |= hosts
    if spread:
        per_host = {host: sum(place.host == host for place in places) for host in spread}
        counts = ", ".join(
            f"{host} has {several(count, 'rank')}" for host, count in list(per_host.items())[:3]
        )
        raise PreflightError(
            f"parallel.tp: {dims.tp} ranks of one tp group would sit on several hosts ({counts}"
            f"{', ...' * (len(per_host) > 3)}): write a tp that divides the slots of every host, or "
            "parallel.allow_cross_node_tp: true if their network is fast enough"
        )


def _check_alike(
    dims: ParallelDims,
    places: Sequence[RankPlace],
    gpus: Sequence[Gpu | None],
) -> None:
    """Stages of a pipeline may run on different GPUs; what computes the same layers in step may not."""
    for stage in range(dims.pp):
        kinds: dict[str, list[str]] = {}
        for place, gpu in zip(places, gpus, strict=True):
            if gpu is not None and place.pp == stage:
                kind = f"{gpu.name} ({round(gpu.memory_bytes / _GIB)} GiB)"
                hosts = kinds.setdefault(kind, [])
                if place.host not in hosts:
                    hosts.append(place.host)
        if len(kinds) > 1:
            where = " and ".join(
                f"{kind} on {listed(hosts)}" for kind, hosts in itertools.islice(kinds.items(), 3)
            )
            what = f"stage {stage} of the pipeline" if dims.pp > 1 else "the ranks"
            raise PreflightError(
                f"parallel: {what} would run on different GPUs: {where}. The slowest would set all their pace, and the "
                "smallest their memory: leave some out with slots or CUDA_VISIBLE_DEVICES, or give each kind stages "
                "of its own by parallel.pp and the order of the hosts"
            )
