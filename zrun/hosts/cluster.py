"""The hosts of a job and the facts of each, in the order of their ranks.

`probe_host` looks at this machine, and never fails. Facts cross from a host's agent to the launcher
as JSON. Nothing here imports torch, and NVML only where it is asked.
"""

from __future__ import annotations

import os
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from zrun.hosts.offload_disk import SwapFolder, look_at
from zrun.system import cgroup
from zrun.topology.boards import Board, Reading, Slice
from zrun.topology.cpus import USER_BINDING, NumaNode, read_nodes
from zrun.topology.links import LinkMatrix, link_matrix, usable
from zrun.topology.machine import read_machine
from zrun.topology.nvml import read
from zrun.topology.scenario import Scenario
from zrun.topology.visible import NamedGpu, visible
from zrun_core.sizes import format_size, several
from zrun_core.spine import memory_limits
from zrun_core.tiers.probe import DiskFacts

_NAMED = 3  # hosts that a message lists before it counts


@dataclass(frozen=True)
class Gpu:
    """A device for one rank: a GPU, or a MIG slice of one.

    Attributes:
        memory_bytes: 0 if that is not known.
        index: of the GPU, in PCI order, as `nvidia-smi` counts.
        numa: node of the CPUs next to it.
        fabric: NVLink domain that may span hosts.
        is_rocm: it is AMD's.
    """

    uuid: str
    name: str
    memory_bytes: int
    index: int = 0
    numa: int | None = None
    is_slice: bool = False
    fabric: str | None = None
    is_rocm: bool = False


@dataclass(frozen=True)
class HostFacts:
    """The resources that one machine offers to a job.

    Attributes:
        hostname: what messages and the plan call it; unique in a cluster.
        cores: usable: CPU affinity, cut by the control group's quota.
        gpus: those that the environment leaves (`zrun.topology.visible`), in its order.
        slots: ranks that the user gave this host; None: the job says, else its GPUs, else one.
        chosen: which of its slots the user wants; None: all.
        links: between the GPUs, in their order; None: not known.
        nodes: NUMA nodes with the usable cores; none: not known.
        unbound: why ranks are not to be bound to cores; None: they may.
        apart: each rank sees a GPU of its own, and no other.
        problems: GPUs that cannot be used, and why.
        no_gpus: why the driver shows none, where that can be set right.
        misnamed: what is wrong with the variable that names the GPUs to be used; None: nothing.
        hidden: which variable hides all GPUs on purpose, and how many; None: none does.
        memlock_bytes: that a process may lock in memory; None: any.
        disk: for states that the job keeps on one; None: it keeps none there.
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
    memlock_bytes: int | None = None
    disk: DiskFacts | None = None
    no_gpus: str | None = None
    misnamed: str | None = None
    hidden: str | None = None

    def __str__(self) -> str:
        names = Counter(gpu.name for gpu in self.gpus)
        gpus = [f"{count} x {name}" for name, count in names.items()] or ["no GPU"]
        facts = [several(self.cores, "core"), format_size(self.memory_bytes), *gpus, *self.problems]
        return f"{self.hostname}: {', '.join(facts)}"

    @property
    def why_no_gpus(self) -> str:
        """Return why there is no GPU to be used, as far as that is known; "" if it is not."""
        return "; ".join(filter(None, (self.misnamed, self.hidden, self.no_gpus, *self.problems)))

    @property
    def cpus(self) -> tuple[int, ...]:
        """Return every CPU that may be used, where the nodes are known."""
        return tuple(cpu for node in self.nodes for cpu in node.cpus)

    def called(
        self, name: str, slots: int | None = None, chosen: tuple[int, ...] | None = None
    ) -> HostFacts:
        """Return the same machine as the user names it, with the slots that the user gives it.

        Args:
            slots, chosen: as in `HostFacts`.
        """
        return replace(self, hostname=name, slots=slots, chosen=chosen)

    def limited(self, environ: Mapping[str, str]) -> HostFacts:
        """Return the same machine with those GPUs only that these variables leave."""
        named = [NamedGpu(gpu.index, gpu.uuid, gpu.is_rocm) for gpu in self.gpus]
        found = visible(named, environ)
        hidden = self.hidden
        if found.hidden is not None:
            hidden = f"{found.hidden} hides {self._own_gpus()}"
        return replace(
            self,
            gpus=tuple(self.gpus[place] for place in found.places),
            links=self.links.take(found.places) if self.links and found.places else None,
            misnamed=found.trouble or self.misnamed,
            hidden=hidden,
        )

    def _own_gpus(self) -> str:
        if len(self.gpus) == 1:
            return "its GPU"
        return f"its {len(self.gpus)} GPUs"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Self:
        """Return what `to_json` gave.

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
        """Return a line: the one host, or how many there are and what distinguishes them."""
        if len(self.hosts) == 1:
            return str(self.hosts[0])
        num_gpus = sum(len(host.gpus) for host in self.hosts)
        kinds = each(self.hosts, lambda host: str(host).partition(": ")[2])
        return f"{len(self.hosts)} hosts, {several(num_gpus, 'GPU')}: {kinds}"


def each(hosts: Iterable[HostFacts], value: Callable[[HostFacts], Any]) -> str:
    """Return one value per host as text: `4`, or `8 on a, b; 4 on c`."""
    names: dict[str, list[str]] = {}
    for host in hosts:
        names.setdefault(str(value(host)), []).append(host.hostname)
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{text} on {listed(where)}" for text, where in names.items())


def listed(names: list[str]) -> str:
    """Return a few names, and how many more: `a, b, c and 5 more`."""
    text = ", ".join(names[:_NAMED])
    if len(names) > _NAMED:
        text += f" and {len(names) - _NAMED} more"
    return text


def probe_host(swap: SwapFolder | None = None) -> HostFacts:
    """Return what this machine offers. Takes a few milliseconds without a GPU.

    Args:
        swap: on whose disk states of a job are to lie: a file is written there for a moment.
    """
    cpus = os.sched_getaffinity(0)
    quota = cgroup.cpu_quota()
    cores = len(cpus)
    if quota is not None:
        cores = max(1, min(cores, int(quota)))
    host = HostFacts(
        socket.gethostname(),
        cores,
        memory_limits.host_total(),
        nodes=read_nodes(cpus),
        unbound=_unbound(cpus, cores),
        memlock_bytes=_memlock(),
        disk=None if swap is None else look_at(swap),
    )
    return _with_gpus(host, read_machine()).limited(os.environ)


def simulate(scenario: Scenario) -> Cluster:
    """Return the hosts that a scenario describes."""
    nodes = tuple(scenario.nodes)
    cores = sum(len(node.cpus) for node in nodes) or 1
    host = _with_gpus(HostFacts("host", cores, scenario.ram_mib << 20, nodes=nodes), read(scenario))
    if scenario.num_hosts == 1:
        return Cluster((host,))
    return Cluster(tuple(host.called(f"host{number}") for number in range(scenario.num_hosts)))


def _unbound(cpus: set[int], cores: int) -> str | None:
    """Return why ranks are not to be bound to cores; None: they may be."""
    for name in USER_BINDING:
        if name in os.environ:
            return f"{name} is set"
    if cores < len(cpus):
        return f"a CPU quota of {cores} on {len(cpus)} CPUs, which others use too"
    allowed = cgroup.cpuset()
    if allowed is not None and cpus < allowed:
        return "an affinity is set already"
    return None


def _memlock() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _with_gpus(host: HostFacts, reading: Reading) -> HostFacts:
    """Return `host` with the GPUs of a reading, in PCI order, and their links."""
    gpus = tuple(
        _gpu(device, part, host.nodes)
        for device in usable(reading)
        for part in (device.slices or (None,))
    )
    return replace(
        host,
        gpus=gpus,
        links=link_matrix(reading) if gpus else None,
        problems=tuple(
            f"GPU {device.index} {device.problem or 'is in MIG mode and has no slices'}"
            for device in reading.devices
            if device not in usable(reading)
        ),
        driver=reading.driver,
        no_gpus=reading.trouble,
    )


def _gpu(device: Board, part: Slice | None, nodes: Sequence[NumaNode]) -> Gpu:
    near = device.numa
    if near is None and device.cpus:
        here = [node.id for node in nodes if set(node.cpus) <= set(device.cpus)]
        near = here[0] if len(here) == 1 else None
    name = (part.name if part else device.name) or "GPU"
    memory = (part.memory_bytes if part else device.memory_bytes) or 0
    uuid = part.uuid if part else device.uuid or ""
    return Gpu(
        uuid,
        name,
        memory,
        device.index,
        near,
        is_slice=part is not None,
        fabric=None if part else device.fabric,
        is_rocm=device.is_rocm,
    )
