"""The CPUs of a host: NUMA nodes, cores and their hardware threads, and who gets which."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_SYSTEM = Path("/sys/devices/system")
# Whoever sets one of these places threads by hand.
USER_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")


@dataclass(frozen=True)
class NumaNode:
    """The cores of a node that this process may use, each as its hardware threads."""

    id: int
    cores: tuple[tuple[int, ...], ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(cpu for core in self.cores for cpu in core)


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the CPU numbers of a list as Linux writes it: `0-3,8` is (0, 1, 2, 3, 8).

    Raises:
        ValueError: the text is no such list.
    """
    text = text.strip()
    if not text:
        return ()
    cpus: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if found is None:
            raise ValueError(f"{text!r} is no list of numbers: write 0-3,8")
        cpus += range(int(found[1]), int(found[2] or found[1]) + 1)
    return tuple(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPU numbers as `parse_cpus` reads them, in order: `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(str(end) for end in run) for run in runs)


def read_nodes(usable: Collection[int], system: Path = _SYSTEM) -> tuple[NumaNode, ...]:
    """Return the nodes and cores of the `usable` CPUs.

    Where Linux does not tell, they are one node of cores of one thread each.
    """
    folders = {int(path.name[4:]): path for path in (system / "node").glob("node[0-9]*")}
    nodes: list[NumaNode] = []
    for number in sorted(folders):
        mine = [cpu for cpu in _listed(folders[number] / "cpulist") if cpu in usable]
        if mine:
            nodes.append(NumaNode(number, _cores(mine, system)))
    if {cpu for node in nodes for cpu in node.cpus} != set(usable):
        return (NumaNode(0, _cores(sorted(usable), system)),)
    return tuple(nodes)


def shares(nodes: Sequence[NumaNode], wanted: Sequence[int | None]) -> list[tuple[int, ...]]:
    """Divide a host's cores evenly among its ranks: whole cores, of a rank's node if it is known.

    Args:
        wanted: node of each rank; with None anywhere, all of the host is divided in the order of
            the ranks.

    Returns:
        the CPUs of each rank; none for a rank whose share is less than a core.
    """
    if None in wanted or not {node.id for node in nodes}.issuperset(wanted):
        return _divide([core for node in nodes for core in node.cores], len(wanted))
    found: list[tuple[int, ...]] = [()] * len(wanted)
    for node in nodes:
        ranks = [rank for rank, number in enumerate(wanted) if number == node.id]
        for rank, cpus in zip(ranks, _divide(node.cores, len(ranks)), strict=True):
            found[rank] = cpus
    return found


def _divide(cores: Sequence[tuple[int, ...]], parts: int) -> list[tuple[int, ...]]:
    if not parts:
        return []
    edges = [len(cores) * part // parts for part in range(parts + 1)]
    return [tuple(cpu for core in cores[a:b] for cpu in core) for a, b in itertools.pairwise(edges)]


def _cores(cpus: Sequence[int], system: Path) -> tuple[tuple[int, ...], ...]:
    cores: dict[tuple[int, ...], None] = {}
    for cpu in cpus:
        together = _listed(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") or (cpu,)
        cores[tuple(thread for thread in together if thread in cpus) or (cpu,)] = None
    return tuple(cores)


def _listed(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpus(path.read_text())
    except (OSError, ValueError):
        return ()
