"""Links, groups and seats as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zrun.hosts.cluster import Cluster, HostFacts, listed
from zrun.topology.cpus import format_cpus
from zrun.topology.grouping import best_groups, weakest_pair
from zrun.topology.links import LinkMatrix, is_fast
from zrun.watch.console import open_console
from zrun_core.sizes import format_size, several
from zrun_core.spine.printable import printable

if TYPE_CHECKING:  # 80 ms of 300: a table of links needs no job
    from zrun_core.spine.parallel_dims import GroupAxis
    from zrun_core.spine.spec import RankPlace

_MOST_ROWS = 64  # of a table of ranks
_AXES: tuple[GroupAxis, ...] = ("tensor", "data", "pipe")
_MOST_MEMBERS = 8  # of a group that are listed


@dataclass(frozen=True)
class Grouping:
    """The division of a host's GPUs into tp groups of one size, as chosen and by their numbers.

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
    """Return a grouping for each size that divides the GPUs of a host.

    There is none where the links are not known, or are those of slices.
    """
    count = len(host.gpus)
    links = host.links
    if links is None or any(gpu.is_slice for gpu in host.gpus):
        return []
    found: list[Grouping] = []
    for tp in range(2, count + 1):
        if count % tp:
            continue
        groups = best_groups(links.bandwidth, tp)
        by_number = [tuple(range(start, start + tp)) for start in range(0, count, tp)]
        low = weakest_pair(links.bandwidth, groups)
        naive = weakest_pair(links.bandwidth, by_number)
        found.append(Grouping(tp, groups, low, by_number, naive))
    return found


def topology(cluster: Cluster, ranks: Sequence[RankPlace]) -> RenderableType:
    """Draw the links and groups of each kind of host, then the ranks if there are any."""
    parts: list[RenderableType] = []
    for hosts in _alike(cluster):
        if parts:
            parts.append("")
        parts += [_title(hosts), *_links(hosts[0]), *_groups(hosts[0])]
    if ranks:
        parts += ["", seats_table(ranks, cluster), *groups_table(ranks)]
    return Group(*parts)


def topology_facts(cluster: Cluster, ranks: Sequence[RankPlace]) -> dict[str, Any]:
    """Return the same for JSON. GPUs are named by their number, as `nvidia-smi` counts."""
    return {
        "hosts": [_host_facts(host) for host in cluster.hosts],
        "ranks": [place.model_dump() for place in ranks],
    }


def show_seats(ranks: Sequence[RankPlace], cluster: Cluster, out: TextIO) -> None:
    """Print the table of ranks, if there are several, and that of their groups."""
    if len(ranks) > 1:
        open_console(out).print(seats_table(ranks, cluster), *groups_table(ranks))


def show_topology(cluster: Cluster, ranks: Sequence[RankPlace], out: TextIO) -> None:
    """Print the links and groups.

    Args:
        ranks: printed too, if there are any.
    """
    open_console(out).print(topology(cluster, ranks))


def seats_table(ranks: Sequence[RankPlace], cluster: Cluster) -> RenderableType:
    """Draw a row per rank: host, GPU, place along the axes, CPUs."""
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
    if more <= 0:
        return table
    return Group(table, f"and {several(more, 'rank')} more: --json lists all")


def groups_table(ranks: Sequence[RankPlace]) -> list[RenderableType]:
    """Draw a row per kind of group, with the hosts that one spans; none of data-parallel ranks."""
    from zrun_core.spine.parallel_dims import groups_along

    places = [place.coordinates for place in ranks]
    if all(place.tp == place.pp == 0 for place in places):
        return []
    table = Table(box=None, pad_edge=False)
    for column in ("group", "number", "ranks", "on", "the first"):
        table.add_column(column, justify="right" if column in ("number", "ranks") else "left")
    for axis in _AXES:
        groups = groups_along(axis, places, shard_size=1)
        if len(groups[0]) > 1:
            spans = [len({ranks[rank].host for rank in group}) for group in groups]
            table.add_row(
                axis,
                str(len(groups)),
                str(len(groups[0])),
                _hosts_of_a_group(min(spans), max(spans)),
                _members(groups[0]),
            )
    return [table]


def _hosts_of_a_group(fewest: int, most: int) -> str:
    if fewest == most:
        return f"{several(most, 'host')} each"
    return f"{fewest} to {several(most, 'host')}"


def _members(group: Sequence[int]) -> str:
    if len(group) <= _MOST_MEMBERS:
        return ", ".join(map(str, group))
    return f"{', '.join(map(str, group[: _MOST_MEMBERS - 2]))}, ... {group[-1]}"


def _alike(cluster: Cluster) -> list[list[HostFacts]]:
    """Return the hosts, those together that differ in nothing but their names."""
    kinds: dict[HostFacts, list[HostFacts]] = {}
    for host in cluster.hosts:
        kinds.setdefault(host.called("", host.slots, host.chosen), []).append(host)
    return list(kinds.values())


def _title(hosts: list[HostFacts]) -> Text:
    host = hosts[0]
    names = listed([each.hostname for each in hosts])
    facts = str(host).removeprefix(f"{host.hostname}: ")
    title = f"{names}: {facts}"
    if host.driver:
        title += f", driver {host.driver}"
    if host.links is not None:
        title += f"; {host.links.kind}"
    return Text(printable(title), style="bold")


def _troubles(host: HostFacts) -> list[str]:
    """Return what the variables and the driver do to a host's GPUs."""
    return [each for each in (host.misnamed, host.hidden, host.no_gpus) if each is not None]


def _links(host: HostFacts) -> list[RenderableType]:
    wrong: list[RenderableType] = [Text(printable(each)) for each in _troubles(host)]
    if host.links is None:
        return wrong
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
    return [*wrong, table]


def _path(path: str) -> Text:
    if is_fast(path):
        return Text(path, style="bold cyan")
    if path in ("X", "?", "MIG", "SYS"):
        return Text(path, style="dim")
    return Text(path)


def _groups(host: HostFacts) -> list[RenderableType]:
    if any(gpu.is_slice for gpu in host.gpus):
        return ["MIG slices have no links to each other: parallel.tp must be 1 here"]
    links = host.links
    if links is None or len(links) == 1:
        return []
    if not any(any(row) for row in links.bandwidth):
        return ["Links are not known: GPUs are used in the order of their numbers"]
    table = Table(box=None, pad_edge=False)
    for column in ("tp", "groups", "weakest pair", "by number", "weakest pair "):
        table.add_column(
            column,
            justify="left" if column in ("groups", "by number") else "right",
            overflow="fold",
        )
    for each in groupings(host):
        chosen = _sets(host, each.groups)
        naive = _sets(host, each.by_number)
        if chosen == naive:
            naive = "the same"
        low = f"{each.bottleneck:g} GB/s"
        naive_low = f"{each.naive_bottleneck:g} GB/s"
        table.add_row(str(each.tp), chosen, low, naive, naive_low)
    explained = (
        "tp: ranks that share a layer; groups: the division whose weakest pair of GPUs has the "
        "strongest link; by number: what the order of the GPUs would give. GB/s in one direction "
        "by NCCL's table of links, not measured"
    )
    return [table, Text(explained, "dim")]


def _sets(host: HostFacts, groups: list[tuple[int, ...]]) -> str:
    return " ".join(
        "{" + ",".join(_number(host, place) for place in group) + "}" for group in groups
    )


def _number(host: HostFacts, place: int) -> str:
    """Return the number by which `nvidia-smi` knows a GPU; a slice's own number follows it."""
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
        "problems": [*_troubles(host), *host.problems],
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
