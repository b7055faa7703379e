"""Links, groups and seats as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zrun.hosts.cluster import Cluster, HostFacts, listed, several
from zrun.topology.cpus import format_cpus
from zrun.topology.grouping import best_groups, weakest_pair
from zrun.topology.links import LinkMatrix
from zrun.watch.console import open_console
from zrun_core.spine.printable import printable
from zrun_core.spine.sizes import format_size

if TYPE_CHECKING:  # 80 ms of 300: a table of links needs no job
    from zrun_core.spine.spec import RankPlace

_MOST_ROWS = 64  # of a table of ranks


@dataclass(frozen=True)
class Grouping:
    """How the GPUs of a host divide into tp groups of one size, chosen and by their numbers.

    Attributes:
        groups, by_number: places of the GPUs in the host's list.
        bottleneck, naive_bottleneck: GB/s between the weakest pair of any group.
    """

    tp: int
    groups: list[tuple[int, ...]]
    bottleneck: float
    by_number: list[tuple[int, ...]]
    naive_bottleneck: float


def groupings(host: HostFacts) -> list[Grouping]:
    """For each size that divides the GPUs of a host; none where the links are not known, or are those of slices."""
    count, links = len(host.gpus), host.links
    if links is None or any(gpu.is_slice for gpu in host.gpus):
        return []
    found: list[Grouping] = []
    for tp in (number for number in range(2, count + 1) if count % number == 0):
        groups = best_groups(links.bandwidth, tp)
        by_number = [tuple(range(start, start + tp)) for start in range(0, count, tp)]
        low, naive = (weakest_pair(links.bandwidth, each) for each in (groups, by_number))
        found.append(Grouping(tp, groups, low, by_number, naive))
    return found


def topology(cluster: Cluster, ranks: Sequence[RankPlace]) -> RenderableType:
    """The links and groups of each kind of host, then the ranks if there are any."""
    parts: list[RenderableType] = []
    for hosts in _alike(cluster):
        parts += [_title(hosts), *_links(hosts[0]), *_groups(hosts[0]), ""]
    if ranks:
        parts.append(seats_table(ranks, cluster))
    return Group(*parts[: None if ranks else -1])


def topology_facts(cluster: Cluster, ranks: Sequence[RankPlace]) -> dict[str, Any]:
    """The same for JSON. GPUs are named by their number, as `nvidia-smi` counts."""
    return {
        "hosts": [_host_facts(host) for host in cluster.hosts],
        "ranks": [place.model_dump() for place in ranks],
    }


def show_seats(ranks: Sequence[RankPlace], cluster: Cluster, out: TextIO) -> None:
    """Print where the ranks sit, if there are several."""
    if len(ranks) > 1:
        open_console(out).print(seats_table(ranks, cluster))


def show_topology(cluster: Cluster, ranks: Sequence[RankPlace], out: TextIO) -> None:
    """Print the links and groups."""
    open_console(out).print(topology(cluster, ranks))


def seats_table(ranks: Sequence[RankPlace], cluster: Cluster) -> RenderableType:
    """A row per rank: host, GPU, place along the axes, CPUs."""
    table = Table(box=None, pad_edge=False)
    for column in ("rank", "host", "GPU", "pp", "dp", "tp", "node", "CPUs"):
        table.add_column(
            column, justify="left" if column in ("host", "CPUs") else "right", overflow="fold"
        )
    numbers = {
        (host.hostname, gpu.uuid): _number(host, place)
        for host in cluster.hosts
        for place, gpu in enumerate(host.gpus)
    }
    for place in ranks[:_MOST_ROWS]:
        gpu = numbers.get((place.host, place.uuid or ""), "-")
        node = "-" if place.numa is None else str(place.numa)
        where = [str(place.pp), str(place.dp), str(place.tp)]
        table.add_row(
            str(place.rank), printable(place.host), gpu, *where, node, place.cpus or "any"
        )
    more = len(ranks) - _MOST_ROWS
    return (
        Group(table, f"and {several(more, 'rank')} more: --json lists all") if more > 0 else table
    )


def _alike(cluster: Cluster) -> list[list[HostFacts]]:
    """Hosts that differ in nothing but their names, together."""
    kinds: dict[HostFacts, list[HostFacts]] = {}
    for host in cluster.hosts:
        kinds.setdefault(host.called("", host.slots, host.chosen), []).append(host)
    return list(kinds.values())


def _title(hosts: list[HostFacts]) -> Text:
    host, names = hosts[0], listed([host.hostname for host in hosts])
    facts = str(host).removeprefix(f"{host.hostname}: ")
    driver = f", driver {host.driver}" if host.driver else ""
    links = f"; {host.links.kind}" if host.links is not None else ""
    return Text(printable(f"{names}: {facts}{driver}{links}"), style="bold")


def _links(host: HostFacts) -> list[RenderableType]:
    if host.links is None:
        return []
    table = Table(box=None, pad_edge=False)
    labels = [_number(host, place) for place in range(len(host.gpus))]
    for column in ("GPU", *labels, "memory", "node", "CPUs near it"):
        table.add_column(
            column, justify="left" if column == "CPUs near it" else "right", overflow="fold"
        )
    near = {node.id: format_cpus(node.cpus) for node in host.nodes}
    for label, gpu, paths in zip(labels, host.gpus, host.links.paths, strict=True):
        numa = "-" if gpu.numa is None else str(gpu.numa)
        memory = format_size(gpu.memory_bytes) if gpu.memory_bytes else "-"
        table.add_row(
            label, *(_path(path) for path in paths), memory, numa, near.get(gpu.numa or 0, "-")
        )
    return [table]


def _path(path: str) -> Text:
    return Text(
        path,
        style="bold cyan"
        if path.startswith("NV")
        else "dim"
        if path in ("X", "?", "MIG", "SYS")
        else "",
    )


def _groups(host: HostFacts) -> list[RenderableType]:
    if any(gpu.is_slice for gpu in host.gpus):
        return ["MIG slices have no links to each other: parallel.tp must be 1 here"]
    links = host.links
    if links is None or len(links) == 1:
        return []
    if not any(any(row) for row in links.bandwidth):
        return ["No path is known: GPUs are taken in the order of their numbers"]
    table = Table(box=None, pad_edge=False)
    for column in ("tp", "groups", "weakest pair", "by number", "weakest pair "):
        table.add_column(
            column,
            justify="left" if column in ("groups", "by number") else "right",
            overflow="fold",
        )
    for each in groupings(host):
        chosen, naive = _sets(host, each.groups), _sets(host, each.by_number)
        table.add_row(
            str(each.tp),
            chosen,
            f"{each.bottleneck:g} GB/s",
            "the same" if chosen == naive else naive,
            f"{each.naive_bottleneck:g} GB/s",
        )
    explained = (
        "tp: ranks that share a layer; groups: the division whose weakest pair of GPUs has the strongest link; "
        "by number: what the order of the GPUs would give. GB/s in one direction as NCCL reckons, not measured"
    )
    return [table, Text(explained, "dim")]


def _sets(host: HostFacts, groups: list[tuple[int, ...]]) -> str:
    return " ".join(
        "{" + ",".join(_number(host, place) for place in group) + "}" for group in groups
    )


def _number(host: HostFacts, place: int) -> str:
    """What `nvidia-smi` calls a device: the GPU's number, for a slice followed by its own."""
    gpu = host.gpus[place]
    if not gpu.is_slice:
        return str(gpu.index)
    return f"{gpu.index}:{sum(other.index == gpu.index for other in host.gpus[:place])}"


def _host_facts(host: HostFacts) -> dict[str, Any]:
    links = host.links or LinkMatrix((), ())
    return {
        "host": host.hostname,
        "driver": host.driver,
        "cores": host.cores,
        "memory_bytes": host.memory_bytes,
        "nodes": {str(node.id): format_cpus(node.cpus) for node in host.nodes},
        "unbound": host.unbound,
        "problems": list(host.problems),
        "gpus": [
            {
                "gpu": _number(host, place),
                "uuid": gpu.uuid,
                "name": gpu.name,
                "memory_bytes": gpu.memory_bytes or None,
                "numa": gpu.numa,
                "mig": gpu.is_slice,
                "fabric": gpu.fabric,
            }
            for place, gpu in enumerate(host.gpus)
        ],
        "links": links.kind,
        "paths": links.paths,
        "bandwidth_gb_s": links.bandwidth,
        "groups": [
            {
                "tp": each.tp,
                "groups": [[host.gpus[place].index for place in group] for group in each.groups],
                "bottleneck_gb_s": each.bottleneck,
                "naive_groups": [
                    [host.gpus[place].index for place in group] for group in each.by_number
                ],
                "naive_bottleneck_gb_s": each.naive_bottleneck,
            }
            for each in groupings(host)
        ],
    }
