"""What there is to run on: the facts of each host, in the order in which ranks are seated.

`probe_host` looks at this machine, and never fails. Facts cross from a host's agent to the launcher as JSON. Nothing
here imports torch, and NVML only where it is asked.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from zrun.launch import cgroup
from zrun_core.sizes import format_size

_NAMED = 3  # hosts that a message lists before it counts


@dataclass(frozen=True)
class Gpu:
    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class HostFacts:
    """What one machine offers to a job.

    Attributes:
        hostname: what messages and the plan call it; unique in a cluster.
        cores: usable: CPU affinity, cut by the control group's quota.
        gpus: those that CUDA_VISIBLE_DEVICES leaves, in its order.
        slots: ranks that the user gave this host; None: the job says, else its GPUs, else one.
        chosen: which of its slots the user wants; None: all.
    """

    hostname: str
    cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    slots: int | None = None
    chosen: tuple[int, ...] | None = None

    def __str__(self) -> str:
        gpus = f"{len(self.gpus)} x {self.gpus[0].name}" if self.gpus else "no GPU"
        return f"{self.hostname}: {several(self.cores, 'core')}, {format_size(self.memory_bytes)}, {gpus}"

    def called(self, name: str, slots: int | None = None, chosen: tuple[int, ...] | None = None) -> HostFacts:
        """The same machine as the user names it, with the slots that the user gives it."""
        return replace(self, hostname=name, slots=slots, chosen=chosen)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Self:
        """What `as_json` gave.

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
    affinity = len(os.sched_getaffinity(0))
    quota = cgroup.cpu_quota()
    cores = affinity if quota is None else max(1, min(affinity, int(quota)))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = min(total, cgroup.memory_limit() or total)
    return HostFacts(
        socket.gethostname(), cores, memory, _visible(_nvml_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    )


def _nvml_gpus() -> tuple[Gpu, ...]:
    """The host's GPUs in PCI order; none where NVML, its driver or a device fails."""
    import pynvml  # type: ignore[import-untyped]  # 50 ms that `zrun --help` must not pay

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Gpu(
                pynvml.nvmlDeviceGetUUID(handle),
                pynvml.nvmlDeviceGetName(handle),
                int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for handle in handles
        )
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _visible(gpus: tuple[Gpu, ...], wanted: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects, by index or start of a UUID; like CUDA, up to the first miss."""
    if wanted is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in wanted.split(","):
        name = entry.strip()
        if name.isdigit():
            match = gpus[int(name)] if int(name) < len(gpus) else None
        else:
            match = next((gpu for gpu in gpus if name and gpu.uuid.startswith(name)), None)
        if match is None:
            break
        chosen.append(match)
    return tuple(chosen)
