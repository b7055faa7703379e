"""Guarded reads of NVML: the GPUs of this machine that are NVIDIA's.

The same reading can be taken of a `zrun.topology.scenario`, which answers in the library's place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zrun.topology.boards import TO_GPU, TO_SWITCH, Board, Link, Reading, Slice, bus_id
from zrun.topology.nvml_health import read_health
from zrun.topology.nvml_source import GPU_IS_LOST, MachineSource, NotKnown, ask

FUNCTION_NOT_FOUND = 13  # of nvml.h

_MOST_LINKS = 36  # NVML_NVLINK_MAX_LINKS
_CPU_WORDS = 64  # 4096 CPUs; larger than any host is allowed, smaller is an error
_NODE_SCOPE = 0  # NVML_AFFINITY_SCOPE_NODE
_MEMORY_V2 = 0x02000028  # counts what the driver reserves apart from what is used
_FABRIC_COMPLETED = 3
_REMOTE = {0: TO_GPU, 2: TO_SWITCH}
# Why NVML does not start, where that can be set right; elsewhere there is no driver here.
_TROUBLE = {
    4: "an NVIDIA driver that this user may not ask: give it /dev/nvidiactl and /dev/nvidia*",
    9: "an NVIDIA library whose driver is not loaded: modprobe nvidia, then nvidia-smi; a "
    "container is started with --gpus all",
    18: "an NVIDIA driver and a library of different versions, as after an update: reboot, or load "
    "the driver again",
}
_NO_BOARD = (
    "NVIDIA driver {} sees none: compare nvidia-smi -L with lspci -d 10de:; a container is started "
    "with --gpus all"
)


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
def library() -> Iterator[MachineSource]:
    """Initialise NVML.

    Raises:
        NotKnown: there is no library, or no driver that it fits.
    """
    source = _Library()
    source.call("nvmlInit")
    try:
        yield source
    finally:
        ask(source, "nvmlShutdown")


def read_machine() -> Reading:
    """The GPUs of this machine; none where NVML does not work."""
    try:
        with library() as source:
            return read(source)
    except NotKnown as error:
        return Reading(trouble=_TROUBLE.get(error.code or 0))


def read(source: MachineSource) -> Reading:
    """The GPUs that `source` tells of."""
    count = ask(source, "nvmlDeviceGetCount") or 0
    handles: list[Any | None] = []
    devices: list[Board] = []
    for index in range(count):
        handle, device = _read_device(source, index)
        handles.append(handle)
        devices.append(device)
    ancestors = tuple(
        tuple(_ancestor(source, handles, a, b) for b in range(count)) for a in range(count)
    )
    cuda = ask(source, "nvmlSystemGetCudaDriverVersion_v2")
    driver = _text(ask(source, "nvmlSystemGetDriverVersion"))
    trouble = None if devices else _NO_BOARD.format(driver or "of an unknown version")
    return Reading(tuple(devices), ancestors, driver, cuda, trouble)


def _read_device(source: MachineSource, index: int) -> tuple[Any | None, Board]:
    try:
        handle = source.call("nvmlDeviceGetHandleByIndex", index)
        # A GPU that fell off the bus often still has a handle.
        uuid = _text(source.call("nvmlDeviceGetUUID", handle))
    except NotKnown as error:
        why = f"does not answer (NVML {error.code})"
        if error.code == GPU_IS_LOST:
            why = "is lost: it fell off the bus"
        return None, Board(index, why)
    memory = ask(source, "nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2)
    if not memory:
        memory = ask(source, "nvmlDeviceGetMemoryInfo", handle)
    running = ask(source, "nvmlDeviceGetComputeRunningProcesses", handle)
    pci = ask(source, "nvmlDeviceGetPciInfo", handle)
    capability = ask(source, "nvmlDeviceGetCudaComputeCapability", handle)
    # Not nvmlDeviceGetNumaNodeId: that is the node that a GPU's own memory makes, if it does.
    nodes = _bits(ask(source, "nvmlDeviceGetMemoryAffinity", handle, _CPU_WORDS, _NODE_SCOPE))
    return handle, Board(
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
        health=read_health(source, handle),
    )


def _links(source: MachineSource, handle: Any) -> tuple[Link, ...] | None:
    """Return the active NVLinks: () where the board has none, None where that is not known."""
    links: list[Link] = []
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
                Link(_REMOTE.get(-1 if remote is None else remote), pci and bus_id(pci.busId))
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
