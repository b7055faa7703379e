"""What there is to run on: the facts of each host, in the order in which ranks are seated.

`probe_host` looks at this machine, and never fails. Facts cross from a host's agent to the launcher as JSON. Nothing
here imports torch, and NVML only where it is asked.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from zrun.system import cgroup
from zrun.topology.cpus import USER_BINDING, NumaNode, read_nodes
from zrun.topology.links import LinkMatrix, link_matrix, usable
from zrun.topology.nvml import NvmlDevice, Reading, Slice, read, read_machine
from zrun.topology.scenario import Scenario
from zrun_core.spine import memory_limits
from zrun_core.spine.sizes import format_size

_NAMED = 3  # hosts that a message lists before it counts


@dataclass(frozen=True)
class Gpu:
    """What a rank may have: a GPU, or a MIG slice of one.

    Attributes:
        memory_bytes: 0 if that is not known.
        index: of the GPU, in PCI order, as `nvidia-smi` counts.
        numa: node of the CPUs next to it.
        fabric: NVLink domain that may span hosts.
    """

    uuid: str
    name: str
    memory_bytes: int
    index: int = 0
    numa: int | None = None
    is_slice: bool = False
    fabric: str | None = None


@dataclass(frozen=True)
class HostFacts:
    """What one machine offers to a job.

    Attributes:
        hostname: what messages and the plan call it; unique in a cluster.
        cores: usable: CPU affinity, cut by the control group's quota.
        gpus: those that CUDA_VISIBLE_DEVICES leaves, in its order.
        slots: ranks that the user gave this host; None: the job says, else its GPUs, else one.
        chosen: which of its slots the user wants; None: all.
        links: between the GPUs, in their order; None: not known.
        nodes: NUMA nodes with the usable cores; none: not known.
        unbound: why ranks are not to be bound to cores; None: they may.
        apart: each rank sees a GPU of its own, and no other.
        problems: GPUs that cannot be used, and why.
    """

    hostname: str
    cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    slots: int | None = None
    chosen: tuple[int, ...] | None = None
    links: LinkMatrix | None = None
    nodes: tuple[NumaNode, ...] = ()
    unbound: str | None = None
    apart: bool = False
    problems: tuple[str, ...] = ()
    driver: str | None = None

    def __str__(self) -> str:
        gpus = [
            f"{count} x {name}" for name, count in Counter(gpu.name for gpu in self.gpus).items()
        ] or ["no GPU"]
        facts = [several(self.cores, "core"), format_size(self.memory_bytes), *gpus, *self.problems]
        return f"{self.hostname}: {', '.join(facts)}"

    @property
    def cpus(self) -> tuple[int, ...]:
        """Every CPU that may be used, where the nodes are known."""
        return tuple(cpu for node in self.nodes for cpu in node.cpus)

    def called(
        self, name: str, slots: int | None = None, chosen: tuple[int, ...] | None = None
    ) -> HostFacts:
        """The same machine as the user names it, with the slots that the user gives it."""
        return replace(self, hostname=name, slots=slots, chosen=chosen)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Self:
        """What `to_json` gave.

        Raises:
            pydantic.ValidationError: it is something else.
        """
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_python(facts)


@dataclass(frozen=True)
class Cluster:
    """The hosts of a job, in the order of their ranks."""

    hosts: tuple[HostFacts, ...]

    def __post_init__(self) -> None:
        names = [host.hostname for host in self.hosts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a cluster has one or more hosts, each once: {names}")

    def __str__(self) -> str:
        """A line: the one host, or how many there are and what distinguishes them."""
        if len(self.hosts) == 1:
            return str(self.hosts[0])
        num_gpus = sum(len(host.gpus) for host in self.hosts)
        kinds = each(self.hosts, lambda host: str(host).partition(": ")[2])
        return f"{len(self.hosts)} hosts, {several(num_gpus, 'GPU')}: {kinds}"


def each(hosts: Iterable[HostFacts], value: Callable[[HostFacts], Any]) -> str:
    """One value per host as text: `4`, or `8 on a, b; 4 on c`."""
    names: dict[str, list[str]] = {}
    for host in hosts:
        names.setdefault(str(value(host)), []).append(host.hostname)
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{text} on {listed(where)}" for text, where in names.items())


def listed(names: list[str]) -> str:
    """A few names, and how many more: `a, b, c and 5 more`."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def probe_host() -> HostFacts:
    """What this machine offers. Reads only; takes a few milliseconds without a GPU."""
    cpus = os.sched_getaffinity(0)
    quota = cgroup.cpu_quota()
    cores = len(cpus) if quota is None else max(1, min(len(cpus), int(quota)))
    host = HostFacts(
        socket.gethostname(),
        cores,
        memory_limits.host_total(),
        nodes=read_nodes(cpus),
        unbound=_unbound(cpus, cores),
    )
    return _with_gpus(host, read_machine(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def simulate(scenario: Scenario) -> Cluster:
    """The hosts that a scenario describes."""
    nodes = tuple(scenario.nodes)
    cores = sum(len(node.cpus) for node in nodes) or 1
    host = _with_gpus(
        HostFacts("host", cores, scenario.ram_mib << 20, nodes=nodes), read(scenario), None
    )
    if scenario.num_hosts == 1:
        return Cluster((host,))
    return Cluster(tuple(host.called(f"host{number}") for number in range(scenario.num_hosts)))


def _unbound(cpus: set[int], cores: int) -> str | None:
    """Who already decided where threads run, or why nobody should."""
    if by_hand := [name for name in USER_BINDING if name in os.environ]:
        return f"{by_hand[0]} is set"
    if cores < len(cpus):
        return f"a CPU quota of {cores} on {len(cpus)} CPUs, which others use too"
    allowed = cgroup.cpuset()
    if allowed is not None and cpus < allowed:
        return "an affinity is set already"
    return None


def _with_gpus(host: HostFacts, reading: Reading, visible: str | None) -> HostFacts:
    """`host` with those of its GPUs that CUDA would find; their links in the same order."""
    gpus = tuple(
        _gpu(device, part, host.nodes)
        for device in usable(reading)
        for part in (device.slices or (None,))
    )
    kept = _visible(gpus, visible)
    return replace(
        host,
        gpus=tuple(gpus[number] for number in kept),
        links=link_matrix(reading).take(kept) if kept else None,
        problems=tuple(
            f"GPU {device.index} {device.problem or 'is in MIG mode and has no slices'}"
            for device in reading.devices
            if device not in usable(reading)
        ),
        driver=reading.driver,
    )


def _gpu(device: NvmlDevice, part: Slice | None, nodes: Sequence[NumaNode]) -> Gpu:
    near = device.numa
    if near is None and device.cpus:
        here = [node.id for node in nodes if set(node.cpus) <= set(device.cpus)]
        near = here[0] if len(here) == 1 else None
    name = (part.name if part else device.name) or "GPU"
    memory = (part.memory_bytes if part else device.memory_bytes) or 0
    uuid = part.uuid if part else device.uuid or ""
    return Gpu(
        uuid, name, memory, device.index, near, part is not None, None if part else device.fabric
    )


def _visible(gpus: Sequence[Gpu], wanted: str | None) -> list[int]:
    """The places in `gpus` of those that CUDA_VISIBLE_DEVICES selects.

    By number or by the start of a UUID; like CUDA, up to the first miss, and the first slice of a GPU in MIG mode.
    """
    if wanted is None:
        return list(range(len(gpus)))
    chosen: list[int] = []
    for entry in wanted.split(","):
        name = entry.strip()
        fits = (
            place
            for place, gpu in enumerate(gpus)
            if (gpu.index == int(name) if name.isdecimal() else name and gpu.uuid.startswith(name))
        )
        if (match := next(fits, None)) is None:
            break
        chosen.append(match)
    return chosen
