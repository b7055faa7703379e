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
    board 2-3 40960 8 0 NVIDIA A100-SXM4-40GB   GPUs unlike the rest: MiB, capability, name
    used 0-7 30000                  MiB of each that are taken
    sensors 0-7 54 312 700 97 1410 1980   degrees, W, its limit, % of use, MHz, the most
    slowed 3 72                     why clocks of a GPU are low, the bits of nvml.h's event reasons
    ecc 2 5 1                       memory errors of a GPU: corrected, uncorrected
    remap 2 pending                 rows of its memory are to be replaced; failed: none are left
    pcie 3 8 16                     its lanes: in use, and those that there are
    xid 2 79                        an error of it; one that is added in a run is told of there
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
from zrun.topology.nvml_source import GPU_IS_LOST, NotKnown
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
_SENSORS = ("degrees", "watts", "most_watts", "use", "mhz", "most_mhz")
_REMAPS = ("pending", "failed")
# ends of an NVLink
_GPU = 0
_SWITCH = 2


@dataclass
class Scenario:
    """A machine as a file describes it; a `zrun.topology.nvml_source.MachineSource`.

    Attributes:
        boards: MiB, capability and name of GPUs that are unlike the rest.
        links: NVLinks of each GPU, as the other GPU's index or None for a switch.
        sensors: of each GPU, by the names in `_SENSORS`.
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
    boards: dict[int, tuple[int, tuple[int, int], str]] = field(default_factory=dict)
    used_mib: dict[int, int] = field(default_factory=dict)
    sensors: dict[int, dict[str, int]] = field(default_factory=dict)
    slowed: dict[int, int] = field(default_factory=dict)
    errors: dict[int, tuple[int, int]] = field(default_factory=dict)
    remaps: dict[int, str] = field(default_factory=dict)
    lanes: dict[int, tuple[int, int]] = field(default_factory=dict)
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
        if name not in _ANSWERS:
            raise NotKnown(_NOT_SUPPORTED)
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
            return f"{self._board(gpu)[2]} MIG {size}MiB"
        return SimpleNamespace(total=size * _MIB, free=size * _MIB)

    def _board(self, gpu: int) -> tuple[int, tuple[int, int], str]:
        return self.boards.get(gpu, (self.memory_mib, self.capability, self.name))

    def _memory(self, gpu: int, version: int = 0) -> Any:
        total = self._board(gpu)[0] * _MIB
        used = self.used_mib.get(gpu, 0) * _MIB
        return SimpleNamespace(total=total, free=total - used, used=used)

    def _sensor(self, name: str, gpu: int) -> int:
        if gpu not in self.sensors:
            raise NotKnown(_NOT_SUPPORTED)
        return self.sensors[gpu][name]

    def _errors(self, gpu: int, kind: int, _: int) -> int:
        if not self.errors:
            raise NotKnown(_NOT_SUPPORTED)
        return self.errors.get(gpu, (0, 0))[kind]

    def _remapped(self, gpu: int) -> tuple[int, int, int, int]:
        if not self.remaps:
            raise NotKnown(_NOT_SUPPORTED)
        state = self.remaps.get(gpu)
        return 0, int(state is not None), int(state == "pending"), int(state == "failed")

    def _lanes(self, gpu: int, place: int) -> int:
        if gpu not in self.lanes:
            raise NotKnown(_NOT_SUPPORTED)
        return self.lanes[gpu][place]

    def _reasons(self, gpu: int) -> int:
        if not self.slowed:
            raise NotKnown(_NOT_SUPPORTED)
        return self.slowed.get(gpu, 0)

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
    "nvmlDeviceGetName": lambda self, gpu: self._board(gpu)[2],
    "nvmlDeviceGetMemoryInfo": Scenario._memory,
    "nvmlDeviceGetComputeRunningProcesses": lambda self, gpu: [
        SimpleNamespace(pid=pid) for pid in self.processes.get(gpu, [])
    ],
    "nvmlDeviceGetPciInfo": lambda self, gpu: SimpleNamespace(busId=_bus_id(0x10 + gpu)),
    "nvmlDeviceGetCudaComputeCapability": lambda self, gpu: self._board(gpu)[1],
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
    "nvmlDeviceGetTemperature": lambda self, gpu, _: self._sensor("degrees", gpu),
    "nvmlDeviceGetPowerUsage": lambda self, gpu: 1000 * self._sensor("watts", gpu),
    "nvmlDeviceGetEnforcedPowerLimit": lambda self, gpu: 1000 * self._sensor("most_watts", gpu),
    "nvmlDeviceGetUtilizationRates": lambda self, gpu: SimpleNamespace(
        gpu=self._sensor("use", gpu)
    ),
    "nvmlDeviceGetClockInfo": lambda self, gpu, _: self._sensor("mhz", gpu),
    "nvmlDeviceGetMaxClockInfo": lambda self, gpu, _: self._sensor("most_mhz", gpu),
    "nvmlDeviceGetCurrentClocksEventReasons": Scenario._reasons,
    "nvmlDeviceGetTotalEccErrors": Scenario._errors,
    "nvmlDeviceGetRemappedRows": Scenario._remapped,
    "nvmlDeviceGetCurrPcieLinkWidth": lambda self, gpu: self._lanes(gpu, 0),
    "nvmlDeviceGetMaxPcieLinkWidth": lambda self, gpu: self._lanes(gpu, 1),
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


def _read_board(
    scenario: Scenario, gpus: str, mib: str, major: str, minor: str, *words: str
) -> None:
    board = _number(mib), (_number(major, 1, 99), _number(minor, 0, 9)), " ".join(words)
    scenario.boards |= dict.fromkeys(_gpus(scenario, gpus), board)


def _read_used(scenario: Scenario, gpus: str, mib: str) -> None:
    scenario.used_mib |= dict.fromkeys(_gpus(scenario, gpus), _number(mib))


def _read_sensors(scenario: Scenario, gpus: str, *values: str) -> None:
    if len(values) != len(_SENSORS):
        raise TypeError
    found = dict(zip(_SENSORS, map(_number, values), strict=True))
    scenario.sensors |= dict.fromkeys(_gpus(scenario, gpus), found)


def _read_slowed(scenario: Scenario, gpus: str, bits: str) -> None:
    scenario.slowed |= dict.fromkeys(_gpus(scenario, gpus), _number(bits))


def _read_ecc(scenario: Scenario, gpus: str, corrected: str, uncorrected: str) -> None:
    counts = _number(corrected), _number(uncorrected)
    scenario.errors |= dict.fromkeys(_gpus(scenario, gpus), counts)


def _read_remap(scenario: Scenario, gpus: str, state: str) -> None:
    if state not in _REMAPS:
        raise ValueError(f"{state!r} is none of {', '.join(_REMAPS)}")
    scenario.remaps |= dict.fromkeys(_gpus(scenario, gpus), state)


def _read_pcie(scenario: Scenario, gpus: str, lanes: str, most: str) -> None:
    found = _number(lanes, 1, 32), _number(most, 1, 32)
    scenario.lanes |= dict.fromkeys(_gpus(scenario, gpus), found)


def _read_xid(scenario: Scenario, gpus: str, number: str) -> None:
    # Told by a library that a run watches: a machine that is not here runs nothing.
    _gpus(scenario, gpus)
    _number(number, 1, 999)


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
    "board": _read_board,
    "used": _read_used,
    "sensors": _read_sensors,
    "slowed": _read_slowed,
    "ecc": _read_ecc,
    "remap": _read_remap,
    "pcie": _read_pcie,
    "xid": _read_xid,
    "fails": _read_fails,
    "hosts": _read_hosts,
    "ram": _read_ram,
}
