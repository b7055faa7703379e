"""Guarded reads of NVML: the GPUs of this machine.

Any call may fail: the driver is old, the board cannot, the GPU fell off the bus. The answer is None
then: not known. The same reading can be taken of a `zrun.topology.scenario`, which answers in the
library's place.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

# of nvml.h
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
TO_GPU = "gpu"
TO_SWITCH = "switch"

_MOST_LINKS = 36  # NVML_NVLINK_MAX_LINKS
_CPU_WORDS = 64  # 4096 CPUs; larger than any host is allowed, smaller is an error
_NODE_SCOPE = 0  # NVML_AFFINITY_SCOPE_NODE
_MEMORY_V2 = 0x02000028  # counts what the driver reserves apart from what is used
_FABRIC_COMPLETED = 3
_REMOTE = {0: TO_GPU, 2: TO_SWITCH}


class NotKnown(Exception):  # noqa: N818
    """A call failed. `code` is NVML's, or None where the binding itself could not make it."""

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code


class MachineSource(Protocol):
    """The library, or a scenario in its place."""

    def call(self, name: str, *arguments: Any) -> Any:
        """Return the answer of the function of this name.

        Raises:
            NotKnown: there is none.
        """


@dataclass(frozen=True)
class NvLink:
    """One active link of a GPU."""

    remote: str | None  # TO_GPU, TO_SWITCH; None: neither, or not known
    bus_id: str | None  # of the other end


@dataclass(frozen=True)
class Slice:
    """A MIG device."""

    uuid: str
    name: str | None
    memory_bytes: int | None


@dataclass(frozen=True)
class NvmlDevice:
    """One GPU. None: not known."""

    index: int
    problem: str | None = None  # why nothing can run on it
    uuid: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    processes: tuple[int, ...] | None = None  # that compute on it
    capability: tuple[int, int] | None = None
    bus_id: str | None = None
    links: tuple[NvLink, ...] | None = None  # the active ones
    cpus: tuple[int, ...] | None = None  # near it
    numa: int | None = None  # node of those
    slices: tuple[Slice, ...] | None = None  # None: MIG is off
    fabric: str | None = None  # NVLink domain and clique that may span hosts


@dataclass(frozen=True)
class Reading:
    """The GPUs of a machine in PCI order.

    Attributes:
        ancestors: NVML's level of the nearest common ancestor of two GPUs: 0, 10, ... 50.
        cuda: the newest that the driver serves: 12040 is 12.4.
    """

    devices: tuple[NvmlDevice, ...] = ()
    ancestors: tuple[tuple[int | None, ...], ...] = ()
    driver: str | None = None
    cuda: int | None = None


class _Library:
    """The driver's own libnvidia-ml, by way of pynvml."""

    def __init__(self) -> None:
        import pynvml  # type: ignore[import-untyped]  # 50 ms that `zrun --help` must not pay

        self._pynvml = pynvml

    def call(self, name: str, *arguments: Any) -> Any:
        try:
            if name == "nvmlDeviceGetGpuFabricInfoV":
                info = self._pynvml.c_nvmlGpuFabricInfo_v2_t()
                self._pynvml.nvmlDeviceGetGpuFabricInfoV(*arguments, ctypes.byref(info))
                return info
            return getattr(self._pynvml, name)(*arguments)
        except self._pynvml.NVMLError as error:
            raise NotKnown(error.value) from None
        except (AttributeError, TypeError, ValueError, OSError, ctypes.ArgumentError):
            raise NotKnown(None) from None


@contextmanager
def library() -> Iterator[MachineSource | None]:
    """Initialise NVML; None where there is no library or no driver that it fits."""
    source = _Library()
    try:
        source.call("nvmlInit")
    except NotKnown:
        yield None
        return
    try:
        yield source
    finally:
        ask(source, "nvmlShutdown")


def ask(source: MachineSource, name: str, *arguments: Any) -> Any | None:
    """The answer, or None where it is not known."""
    try:
        return source.call(name, *arguments)
    except NotKnown:
        return None


def read_machine() -> Reading:
    """The GPUs of this machine; none where NVML does not work."""
    with library() as source:
        return Reading() if source is None else read(source)


def read(source: MachineSource) -> Reading:
    """The GPUs that `source` tells of."""
    count = ask(source, "nvmlDeviceGetCount") or 0
    handles: list[Any | None] = []
    devices: list[NvmlDevice] = []
    for index in range(count):
        handle, device = _read_device(source, index)
        handles.append(handle)
        devices.append(device)
    ancestors = tuple(
        tuple(_ancestor(source, handles, a, b) for b in range(count)) for a in range(count)
    )
    cuda = ask(source, "nvmlSystemGetCudaDriverVersion_v2")
    return Reading(
        tuple(devices), ancestors, _text(ask(source, "nvmlSystemGetDriverVersion")), cuda
    )


def _read_device(source: MachineSource, index: int) -> tuple[Any | None, NvmlDevice]:
    try:
        handle = source.call("nvmlDeviceGetHandleByIndex", index)
        # A GPU that fell off the bus often still has a handle.
        uuid = _text(source.call("nvmlDeviceGetUUID", handle))
    except NotKnown as error:
        why = f"does not answer (NVML {error.code})"
        if error.code == GPU_IS_LOST:
            why = "is lost: it fell off the bus"
        return None, NvmlDevice(index, why)
    memory = ask(source, "nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2)
    if not memory:
        memory = ask(source, "nvmlDeviceGetMemoryInfo", handle)
    running = ask(source, "nvmlDeviceGetComputeRunningProcesses", handle)
    pci = ask(source, "nvmlDeviceGetPciInfo", handle)
    capability = ask(source, "nvmlDeviceGetCudaComputeCapability", handle)
    # Not nvmlDeviceGetNumaNodeId: that is the node that a GPU's own memory makes, if it does.
    nodes = _bits(ask(source, "nvmlDeviceGetMemoryAffinity", handle, _CPU_WORDS, _NODE_SCOPE))
    return handle, NvmlDevice(
        index,
        uuid=uuid,
        name=_text(ask(source, "nvmlDeviceGetName", handle)),
        memory_bytes=memory and int(memory.total),
        free_bytes=memory and int(memory.free),
        processes=None if running is None else tuple(int(each.pid) for each in running),
        capability=capability and (int(capability[0]), int(capability[1])),
        bus_id=pci and bus_id(pci.busId),
        links=_links(source, handle),
        cpus=_bits(ask(source, "nvmlDeviceGetCpuAffinity", handle, _CPU_WORDS)),
        numa=nodes[0] if nodes is not None and len(nodes) == 1 else None,
        slices=_slices(source, handle),
        fabric=_fabric(ask(source, "nvmlDeviceGetGpuFabricInfoV", handle)),
    )


def _links(source: MachineSource, handle: Any) -> tuple[NvLink, ...] | None:
    """Return the active NVLinks: () where the board has none, None where that is not known."""
    links: list[NvLink] = []
    for number in range(_MOST_LINKS):
        try:
            is_active = source.call("nvmlDeviceGetNvLinkState", handle, number)
        except NotKnown as error:
            if error.code in (None, FUNCTION_NOT_FOUND, GPU_IS_LOST):
                return None
            break  # not supported, or past the last link
        if is_active:
            remote = ask(source, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
            pci = ask(source, "nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
            links.append(
                NvLink(_REMOTE.get(-1 if remote is None else remote), pci and bus_id(pci.busId))
            )
    return tuple(links)


def _slices(source: MachineSource, handle: Any) -> tuple[Slice, ...] | None:
    mode = ask(source, "nvmlDeviceGetMigMode", handle)  # current and pending
    if not mode or not mode[0]:
        return None
    slices: list[Slice] = []
    for number in range(ask(source, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        inner = ask(source, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        uuid = _text(ask(source, "nvmlDeviceGetUUID", inner)) if inner is not None else None
        if uuid is not None:
            memory = ask(source, "nvmlDeviceGetMemoryInfo", inner)
            name = _text(ask(source, "nvmlDeviceGetName", inner))
            slices.append(Slice(uuid, name, memory and int(memory.total)))
    return tuple(slices)


def _ancestor(source: MachineSource, handles: list[Any | None], a: int, b: int) -> int | None:
    if a == b or handles[a] is None or handles[b] is None:
        return None
    level = ask(source, "nvmlDeviceGetTopologyCommonAncestor", handles[a], handles[b])
    return None if level is None else int(level)


def _fabric(info: Any | None) -> str | None:
    if info is None or info.state != _FABRIC_COMPLETED or not any(info.clusterUuid):
        return None
    return f"{bytes(info.clusterUuid).hex()}/{info.cliqueId}"


def _bits(words: Any | None) -> tuple[int, ...] | None:
    """Return the numbers of the bits that are set in 64-bit words; None for none: no answer."""
    found = []
    for number, word in enumerate(words or ()):
        found += [64 * number + bit for bit in range(64) if int(word) >> bit & 1]
    return tuple(found) or None


def _text(value: str | bytes | None) -> str | None:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value


def bus_id(text: str | bytes) -> str | None:
    """Return a PCI address as `00000000:06:00.0`: libraries differ in the length of its domain."""
    address = (_text(text) or "").strip().lower()
    found = re.fullmatch(r"([0-9a-f]+):([0-9a-f]+:[0-9a-f]+\.[0-9a-f])", address)
    if not found:
        return None
    return f"{int(found[1], 16):08x}:{found[2]}"
