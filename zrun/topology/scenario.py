"""Machines that are not here: a text file says what NVML would tell, and answers in its place.

A line each, words between spaces, `#` begins a comment; lists of GPUs and CPUs are written `0-3,8`:

    gpus 8                          how many; the first line
    name Tesla V100-SXM2-32GB       of each
    memory 32768                    MiB of each
    capability 7 0
    driver 535.161.08
    cuda 12 4                       the newest that the driver serves
    node 0 0-3 0-19,40-59           NUMA node, its GPUs (`-` for none), its CPUs
    path 0-3 0-3 PIX                PCIe class between all of the first and all of the second list:
                                    PIX, PXB, PHB, NODE, SYS; without a line NODE inside a node,
                                    else SYS
    link 0 3 2                      NVLinks between two GPUs
    switch 0-7 18                   NVLinks from each of these GPUs to switches
    fabric 00aa11bb 1               NVLink domain that spans hosts, and the clique in it
    mig 0 7 9856                    slices of a GPU, and the MiB of each
    process 2 4711                  a process that computes on a GPU
    lost 3                          a GPU that fell off the bus
    fails nvmlDeviceGetNvLinkState 13   every call of this function ends with this code of nvml.h
    hosts 8                         so many such hosts
    ram 262144                      MiB of each
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zrun.topology.cpus import NumaNode, parse_cpus
from zrun.topology.nvml import GPU_IS_LOST, NotKnown
from zrun_core.errors import JobError

# of nvml.h
_INVALID_ARGUMENT = 2
_NOT_SUPPORTED = 3
_NOT_FOUND = 6
_MOST_GPUS = 64
_MOST_HOSTS = 4096
_MOST_SLICES = 8
_LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
_MIB = 1 << 20
# ends of an NVLink
_GPU = 0
_SWITCH = 2


@dataclass
class Scenario:
    """A machine as a file describes it; a `zrun.topology.nvml.MachineSource`.

    Attributes:
        links: NVLinks of each GPU, as the other GPU's index or None for a switch.
    """

    num_gpus: int = 0
    name: str = "GPU"
    memory_mib: int = 0
    capability: tuple[int, int] = (8, 0)
    driver: str = "550.54.15"
    cuda: int = 12040
    nodes: list[NumaNode] = field(default_factory=list)
    node_of: dict[int, int] = field(default_factory=dict)
    levels: dict[tuple[int, int], int] = field(default_factory=dict)
    links: dict[int, list[int | None]] = field(default_factory=dict)
    fabric: tuple[bytes, int] | None = None
    slices: dict[int, tuple[int, int]] = field(default_factory=dict)
    processes: dict[int, list[int]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    fails: dict[str, int] = field(default_factory=dict)
    num_hosts: int = 1
    ram_mib: int = 65536

    @classmethod
    def read(cls, path: Path) -> Scenario:
        """Read the machine that a file describes.

        Raises:
            JobError: there is no such file, or a line of it is wrong.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why: str | None = "not UTF-8 text"
            if isinstance(error, OSError):
                why = error.strerror
            raise JobError(
                f"{path}: {why}: a description of a machine is wanted, see docs/topology.md"
            ) from None
        scenario = cls()
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            try:
                _READERS[words[0]](scenario, *words[1:])
            except KeyError:
                raise JobError(
                    f"{path}:{number}: {words[0]!r} is none of {', '.join(_READERS)}"
                ) from None
            except (ValueError, TypeError) as error:
                why = "words are missing, or there are too many"
                if isinstance(error, ValueError):
                    why = str(error)
                raise JobError(
                    f"{path}:{number}: {line.strip()!r}: {why}; see docs/topology.md"
                ) from None
        return scenario

    def call(self, name: str, *arguments: Any) -> Any:
        """Return what the function of pynvml of this name would."""
        symbol = name
        if name == "nvmlDeviceGetMemoryInfo" and len(arguments) == 2:
            symbol = f"{name}_v2"
        if symbol in self.fails:
            raise NotKnown(self.fails[symbol])
        if name == "nvmlDeviceGetCount":
            return self.num_gpus
        if name == "nvmlSystemGetDriverVersion":
            return self.driver
        if name == "nvmlSystemGetCudaDriverVersion_v2":
            return self.cuda
        if name == "nvmlDeviceGetHandleByIndex":
            return arguments[0]
        gpu = arguments[0]
        if isinstance(gpu, tuple):
            return self._of_slice(name, *gpu)
        if gpu in self.lost:
            raise NotKnown(GPU_IS_LOST)
        return _ANSWERS[name](self, *arguments)

    def _of_slice(self, name: str, gpu: int, number: int) -> Any:
        size = self.slices[gpu][1]
        if name == "nvmlDeviceGetUUID":
            return f"MIG-{gpu:08x}-0000-0000-0000-{number:012x}"
        if name == "nvmlDeviceGetName":
            return f"{self.name} MIG {size}MiB"
        return SimpleNamespace(total=size * _MIB, free=size * _MIB)

    def _memory(self, _: int, version: int = 0) -> Any:
        return SimpleNamespace(total=self.memory_mib * _MIB, free=self.memory_mib * _MIB)

    def _link(self, gpu: int, number: int) -> int | None:
        links = self.links.get(gpu, [])
        if number >= len(links):
            raise NotKnown(_INVALID_ARGUMENT if links else _NOT_SUPPORTED)
        return links[number]

    def _remote(self, gpu: int, number: int) -> Any:
        other = self._link(gpu, number)
        return SimpleNamespace(busId=_bus_id(0xC0 + number if other is None else 0x10 + other))

    def _ancestor(self, a: int, b: int) -> int:
        if {a, b} & self.lost:
            raise NotKnown(GPU_IS_LOST)
        same = a in self.node_of and self.node_of[a] == self.node_of.get(b)
        return self.levels.get((min(a, b), max(a, b)), _LEVELS["NODE" if same else "SYS"])

    def _words(self, numbers: tuple[int, ...], count: int) -> list[int]:
        if not numbers:
            raise NotKnown(_NOT_SUPPORTED)
        return [
            sum(1 << number % 64 for number in numbers if number // 64 == word)
            for word in range(count)
        ]

    def _cpus(self, gpu: int, count: int) -> list[int]:
        mine = (node.cpus for node in self.nodes if node.id == self.node_of.get(gpu))
        return self._words(next(mine, ()), count)

    def _memory_nodes(self, gpu: int, count: int, _: int) -> list[int]:
        return self._words((self.node_of[gpu],) if gpu in self.node_of else (), count)

    def _mig_mode(self, gpu: int) -> list[int]:
        if not self.slices:
            raise NotKnown(_NOT_SUPPORTED)
        return [int(gpu in self.slices)] * 2

    def _slice(self, gpu: int, number: int) -> tuple[int, int]:
        if number >= self.slices[gpu][0]:
            raise NotKnown(_NOT_FOUND)
        return gpu, number

    def _fabric_info(self, _: int) -> Any:
        if self.fabric is None:
            raise NotKnown(_NOT_SUPPORTED)
        return SimpleNamespace(state=3, clusterUuid=self.fabric[0], cliqueId=self.fabric[1])


_ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetUUID": lambda self, gpu: f"GPU-{gpu:08x}-0000-0000-0000-000000000000",
    "nvmlDeviceGetName": lambda self, gpu: self.name,
    "nvmlDeviceGetMemoryInfo": Scenario._memory,
    "nvmlDeviceGetComputeRunningProcesses": lambda self, gpu: [
        SimpleNamespace(pid=pid) for pid in self.processes.get(gpu, [])
    ],
    "nvmlDeviceGetPciInfo": lambda self, gpu: SimpleNamespace(busId=_bus_id(0x10 + gpu)),
    "nvmlDeviceGetCudaComputeCapability": lambda self, gpu: self.capability,
    "nvmlDeviceGetMemoryAffinity": Scenario._memory_nodes,
    "nvmlDeviceGetCpuAffinity": Scenario._cpus,
    "nvmlDeviceGetNvLinkState": lambda self, gpu, number: self._link(gpu, number) != gpu,
    "nvmlDeviceGetNvLinkRemoteDeviceType": lambda self, gpu, number: (
        _SWITCH if self._link(gpu, number) is None else _GPU
    ),
    "nvmlDeviceGetNvLinkRemotePciInfo": Scenario._remote,
    "nvmlDeviceGetMigMode": Scenario._mig_mode,
    "nvmlDeviceGetMaxMigDeviceCount": lambda self, gpu: _MOST_SLICES - 1,
    "nvmlDeviceGetMigDeviceHandleByIndex": Scenario._slice,
    "nvmlDeviceGetTopologyCommonAncestor": Scenario._ancestor,
    "nvmlDeviceGetGpuFabricInfoV": Scenario._fabric_info,
}


def _bus_id(bus: int) -> str:
    return f"00000000:{bus:02x}:00.0"


def _number(word: str, least: int = 0, most: int = 1 << 30) -> int:
    if not word.isdecimal() or not least <= int(word) <= most:
        raise ValueError(f"{word!r} is no number from {least} to {most}")
    return int(word)


def _gpus(scenario: Scenario, text: str) -> tuple[int, ...]:
    gpus = parse_cpus(text)
    if not all(gpu < scenario.num_gpus for gpu in gpus):
        raise ValueError(f"{text} names a GPU beyond the {scenario.num_gpus} of the gpus line")
    return gpus


def _read_gpus(scenario: Scenario, count: str) -> None:
    scenario.num_gpus = _number(count, 0, _MOST_GPUS)


def _read_name(scenario: Scenario, *words: str) -> None:
    scenario.name = " ".join(words)


def _read_memory(scenario: Scenario, mib: str) -> None:
    scenario.memory_mib = _number(mib)


def _read_capability(scenario: Scenario, major: str, minor: str) -> None:
    scenario.capability = _number(major, 1, 99), _number(minor, 0, 9)


def _read_driver(scenario: Scenario, version: str) -> None:
    scenario.driver = version


def _read_cuda(scenario: Scenario, major: str, minor: str) -> None:
    scenario.cuda = 1000 * _number(major, 1, 99) + 10 * _number(minor, 0, 99)


def _read_node(scenario: Scenario, number: str, gpus: str, cpus: str) -> None:
    node = NumaNode(_number(number, 0, 1023), tuple((cpu,) for cpu in parse_cpus(cpus)))
    scenario.nodes.append(node)
    scenario.node_of |= dict.fromkeys(_gpus(scenario, gpus.removeprefix("-")), node.id)


def _read_path(scenario: Scenario, a: str, b: str, level: str) -> None:
    if level not in _LEVELS:
        raise ValueError(f"{level!r} is none of {', '.join(_LEVELS)}")
    for one, other in itertools.product(_gpus(scenario, a), _gpus(scenario, b)):
        if one != other:
            scenario.levels[min(one, other), max(one, other)] = _LEVELS[level]


def _read_link(scenario: Scenario, a: str, b: str, count: str) -> None:
    (one,) = _gpus(scenario, a)
    (other,) = _gpus(scenario, b)
    for _ in range(_number(count, 1, 18)):
        scenario.links.setdefault(one, []).append(other)
        scenario.links.setdefault(other, []).append(one)


def _read_switch(scenario: Scenario, gpus: str, count: str) -> None:
    for gpu in _gpus(scenario, gpus):
        scenario.links.setdefault(gpu, []).extend([None] * _number(count, 1, 18))


def _read_fabric(scenario: Scenario, cluster: str, clique: str) -> None:
    scenario.fabric = bytes.fromhex(cluster).ljust(16, b"\0")[:16], _number(clique)


def _read_mig(scenario: Scenario, gpus: str, count: str, mib: str) -> None:
    each = _number(count, 0, _MOST_SLICES - 1), _number(mib)
    scenario.slices |= dict.fromkeys(_gpus(scenario, gpus), each)


def _read_process(scenario: Scenario, gpu: str, pid: str) -> None:
    for each in _gpus(scenario, gpu):
        scenario.processes.setdefault(each, []).append(_number(pid, 1))


def _read_lost(scenario: Scenario, gpus: str) -> None:
    scenario.lost |= set(_gpus(scenario, gpus))


def _read_fails(scenario: Scenario, function: str, code: str) -> None:
    scenario.fails[function] = _number(code, 1, 999)


def _read_hosts(scenario: Scenario, count: str) -> None:
    scenario.num_hosts = _number(count, 1, _MOST_HOSTS)


def _read_ram(scenario: Scenario, mib: str) -> None:
    scenario.ram_mib = _number(mib, 1)


_READERS: dict[str, Any] = {
    "gpus": _read_gpus,
    "name": _read_name,
    "memory": _read_memory,
    "capability": _read_capability,
    "driver": _read_driver,
    "cuda": _read_cuda,
    "node": _read_node,
    "path": _read_path,
    "link": _read_link,
    "switch": _read_switch,
    "fabric": _read_fabric,
    "mig": _read_mig,
    "process": _read_process,
    "lost": _read_lost,
    "fails": _read_fails,
    "hosts": _read_hosts,
    "ram": _read_ram,
}
