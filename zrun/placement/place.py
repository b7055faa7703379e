"""Assign each rank a host, a device and cores. Pure: a function of the job and of the hosts.

Ranks are numbered along the axes of parallelism, by default rank = pp * (DP * TP) + dp * TP + tp,
and fill the hosts in their order, so that those of a host are contiguous. Two hosts of 4 GPUs with
tp 2, pp 2 and dp 2:

    rank      0  1  2  3 | 4  5  6  7
    host      a  a  a  a | b  b  b  b
    pp        0  0  0  0 | 1  1  1  1
    dp        0  0  1  1 | 0  0  1  1
    tp        0  1  0  1 | 0  1  0  1

The GPU of a host that a rank gets follows from the links between them: `zrun.topology.grouping`
keeps a tp group on the best connected ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zrun.hosts.cluster import Cluster, Gpu, HostFacts, listed
from zrun.topology.cpus import USER_BINDING, format_cpus, shares
from zrun.topology.grouping import Arrangement, arrange
from zrun_core.errors import PreflightError
from zrun_core.sizes import several
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.spine.spec import RankPlace

_GIB = 1 << 30
_NUM_SHOWN = 3  # hosts or kinds of GPU in a message
_RANKS_SHOWN = 8  # of a group in a message
_SHARES_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(frozen=True)
class RankAssignment:
    """The place of every rank.

    Attributes:
        unbound: by host, why its ranks are not bound to cores; None: they are.
        spread: tp groups on several hosts, which the job allows.
    """

    ranks: list[RankPlace]
    unbound: dict[str, str | None]
    spread: list[tuple[int, ...]]


def assign_ranks(
    job: JobConfig,
    cluster: Cluster,
    device: Literal["cpu", "cuda"],
    dims: ParallelDims,
    slots: Mapping[str, int],
    threads: Mapping[str, int],
) -> RankAssignment:
    """Return the place of every rank.

    Args:
        cluster: the hosts, in the order of their ranks.
        slots: number of ranks, by host.
        threads: CPU threads of a rank by host.

    Raises:
        PreflightError: a tp group would span hosts or slices of a GPU, several ranks would be on
            slices of one, or ranks that must have the same kind of GPU would not.
    """
    places: list[RankPlace] = []
    gpus: list[Gpu | None] = []
    unbound: dict[str, str | None] = {}
    for host in cluster.hosts:
        count = slots[host.hostname]
        base = len(places)
        chosen: list[Gpu | None] = [None] * count
        if device == "cuda":
            chosen = _gpus_in_order(job, host, dims, base, count)
        gpus += chosen
        cpus, unbound[host.hostname] = _cpus(job, host, chosen, threads[host.hostname])
        for local_rank, gpu in enumerate(chosen):
            where = dims.coordinates(base + local_rank)
            place = RankPlace(
                rank=base + local_rank,
                host=host.hostname,
                local_rank=local_rank,
                device=_device_name(host, gpu, local_rank),
                uuid=(gpu.uuid or None) if gpu is not None else None,
                pp=where.pp,
                dp=where.dp,
                tp=where.tp,
                threads=threads[host.hostname],
                cpus=format_cpus(cpus[local_rank]) or None,
                numa=gpu.numa if gpu is not None else _node(host, cpus[local_rank]),
            )
            places.append(place)
    spread = _spread_groups(dims, places, gpus)
    _check_tp(job, dims, places, gpus, spread)
    _check_slices(job, dims, places, gpus)
    _check_alike(dims, places, gpus)
    return RankAssignment(places, unbound, spread)


def _device_name(host: HostFacts, gpu: Gpu | None, local_rank: int) -> str:
    """Return the name by which a rank's process knows its device."""
    if gpu is None:
        return "cpu"
    # CUDA shows a process one slice at most; apart: each process is given one GPU.
    sees_one = gpu.is_slice or host.apart
    return "cuda:0" if sees_one else f"cuda:{local_rank}"


def arrangement(
    host: HostFacts, dims: ParallelDims, base: int, devices: Sequence[int], shard_group: int = 1
) -> Arrangement:
    """Return the order in which devices of a host serve its ranks: groups on well-linked devices.

    Example: 8 devices, tp 2, dp 4 with a shard group of 2 make groups of 2 (tp) in groups of 4
    (shard) in one of 8; `zrun.topology.grouping.arrange` is given the sizes 2, 2, 2.

    Args:
        host: whose links are known, or not.
        base: the first rank of this host.
        devices: of the host that are used.
        shard_group: neighbouring dp ranks that share one copy of the states.
    """
    levels: list[int] = []  # sizes of the groups, from the innermost axis outwards
    for axis in dims.order:
        if axis == "dp" and 1 < shard_group < dims.dp and dims.dp % shard_group == 0:
            levels += [shard_group, dims.dp // shard_group]
        else:
            levels.append(dims.size(axis))
    sizes: list[int] = []
    left = len(devices)
    aligned = base
    for size in levels:
        spans_hosts = bool(left % size or aligned % size)
        if spans_hosts:  # what is here belongs to few groups of this level
            break
        sizes.append(size)
        left //= size
        aligned //= size
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
    devices = host.chosen if host.chosen is not None else range(len(host.gpus))
    shard_group = 1
    if isinstance(job.zero.shard_group, int) and job.zero.stage > 0:
        shard_group = job.zero.shard_group
    found = arrangement(host, dims, base, devices[:count], shard_group)
    return [host.gpus[place] for place in found.order]


def _cpus(
    job: JobConfig, host: HostFacts, gpus: Sequence[Gpu | None], threads: int
) -> tuple[list[tuple[int, ...]], str | None]:
    """Return the CPUs that each rank of a host is bound to; or nothing for each of them, and why.

    `job` may forbid it, and the cores of `host` may be unknown. `threads` is how many a rank needs
    cores for.
    """
    free: list[tuple[int, ...]] = [()] * len(gpus)
    if job.bind == "off":
        return free, "as written"
    by_hand = [name for name in USER_BINDING if name in job.env]
    if by_hand:
        return free, f"env.{by_hand[0]} is set"
    if host.unbound is not None:
        return free, host.unbound
    if not host.nodes:
        return free, "its cores are not known"
    found = shares(host.nodes, [gpu.numa if gpu is not None else None for gpu in gpus])
    if found == [host.cpus]:
        return free, "one rank has all cores"
    if all(len(cpus) >= threads for cpus in found):
        return found, None
    if len(host.cpus) < threads * len(gpus):
        return free, "ranks share cores"
    return free, "too few cores near its GPU"


def _node(host: HostFacts, cpus: tuple[int, ...]) -> int | None:
    """Return the NUMA node that has all of these CPUs; None: there is none."""
    if not cpus:
        return None
    return next((node.id for node in host.nodes if set(cpus) <= set(node.cpus)), None)


def _spread_groups(
    dims: ParallelDims, places: Sequence[RankPlace], gpus: Sequence[Gpu | None]
) -> list[tuple[int, ...]]:
    """Return the tp groups whose ranks sit on several hosts without a fabric of NVLinks."""
    spread = []
    for group in dims.groups("tensor") if dims.tp > 1 else ():
        hosts = {places[rank].host for rank in group}
        fabrics: set[str | None] = set()  # an NVLink fabric may span hosts
        for rank in group:
            gpu = gpus[rank]
            fabrics.add(gpu.fabric if gpu is not None else None)
        is_one_fabric = None not in fabrics and len(fabrics) == 1
        if len(hosts) > 1 and not is_one_fabric:
            spread.append(group)
    return spread


def _check_tp(
    job: JobConfig,
    dims: ParallelDims,
    places: Sequence[RankPlace],
    gpus: Sequence[Gpu | None],
    spread: Sequence[tuple[int, ...]],
) -> None:
    """Refuse tp groups whose ranks have no fast links to each other; `spread` is on many hosts."""
    if dims.tp == 1:
        return
    with_slices = (places[rank].host for rank, gpu in enumerate(gpus) if gpu and gpu.is_slice)
    sliced = list(dict.fromkeys(with_slices))
    if sliced:
        offer = "offers" if len(sliced) == 1 else "offer"
        raise PreflightError(
            f"parallel.tp: {dims.tp}, but {listed(sliced)} {offer} MIG slices, which have no links "
            "to each other: write parallel.tp: 1, or turn MIG off"
        )
    if job.parallel.allow_cross_node_tp or not spread:
        return
    hosts = list(dict.fromkeys(places[rank].host for group in spread for rank in group))
    counts = []
    for host in hosts[:_NUM_SHOWN]:
        count = sum(place.host == host for place in places)
        counts.append(f"{host} has {several(count, 'rank')}")
    if len(hosts) > _NUM_SHOWN:
        counts.append("...")
    raise PreflightError(
        f"parallel.tp: {dims.tp} ranks of one tp group would sit on several hosts "
        f"({', '.join(counts)}), such as {group_on_hosts(spread[0], places)}: write a tp that "
        "divides the slots of every host, or parallel.allow_cross_node_tp: true if their network "
        "is fast enough"
    )


def group_on_hosts(group: Sequence[int], places: Sequence[RankPlace]) -> str:
    """Return a group of ranks by name: `ranks 2, 3, 4, 5 on host0, host1`."""
    shown = ", ".join(map(str, group))
    if len(group) > _RANKS_SHOWN:
        first = ", ".join(map(str, group[:_NUM_SHOWN]))
        shown = f"{first} ... {group[-1]}"
    hosts = list(dict.fromkeys(places[rank].host for rank in group))
    return f"ranks {shown} on {listed(hosts)}"


def _check_slices(
    job: JobConfig, dims: ParallelDims, places: Sequence[RankPlace], gpus: Sequence[Gpu | None]
) -> None:
    """Refuse several ranks on slices of one GPU: NCCL knows them by the GPU, and takes it once."""
    if len(places) == 1 or job.env.get(_SHARES_GPUS) == "1":
        return
    seen: dict[tuple[str, int], int] = {}
    for place, gpu in zip(places, gpus, strict=True):
        if gpu is None or not gpu.is_slice:
            continue
        other = seen.setdefault((place.host, gpu.index), place.rank)
        if other != place.rank:
            raise PreflightError(
                f"slots: ranks {other} and {place.rank} would be on MIG slices of one GPU, GPU "
                f"{gpu.index} of {place.host}, and NCCL takes a GPU once, whatever its slices: "
                "write slots: 1 and give each job a slice, or turn MIG off. NCCL 2.30 and newer "
                f"can share one with env: {{{_SHARES_GPUS}: '1'}}"
            )


def _check_alike(
    dims: ParallelDims,
    places: Sequence[RankPlace],
    gpus: Sequence[Gpu | None],
) -> None:
    """Refuse different GPUs for ranks that compute the same layers in step.

    Stages of a pipeline may run on different ones.
    """
    for stage in range(dims.pp):
        kinds: dict[str, dict[str, list[int]]] = {}  # by host, the numbers of the GPUs
        for place, gpu in zip(places, gpus, strict=True):
            if gpu is not None and place.pp == stage:
                kind = f"{gpu.name} ({round(gpu.memory_bytes / _GIB)} GiB)"
                kinds.setdefault(kind, {}).setdefault(place.host, []).append(gpu.index)
        if len(kinds) > 1:
            shown = itertools.islice(kinds.items(), _NUM_SHOWN)
            where = " and ".join(f"{kind} on {_where(kinds, hosts)}" for kind, hosts in shown)
            what = f"stage {stage} of the pipeline" if dims.pp > 1 else "the ranks"
            raise PreflightError(
                f"parallel: {what} would run on different GPUs: {where}. The slowest would set all "
                "their pace, and the smallest their memory: leave some out with slots or "
                "CUDA_VISIBLE_DEVICES, or give each kind stages of its own by parallel.pp and the "
                "order of the hosts"
            )


def _where(kinds: Mapping[str, Mapping[str, list[int]]], hosts: Mapping[str, list[int]]) -> str:
    """Name the hosts of a kind of GPU, and the GPUs where a host has others too."""
    names = []
    for host, numbers in hosts.items():
        is_mixed = sum(host in others for others in kinds.values()) > 1
        gpus = f" (GPU {', '.join(map(str, sorted(numbers)))})" if is_mixed else ""
        names.append(f"{host}{gpus}")
    return listed(names)
