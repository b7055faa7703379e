"""Sensors, counters and errors of NVIDIA's GPUs, read once or watched while a job runs."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from typing import Any

from zrun.topology import xids
from zrun.topology.boards import (
    HARDWARE,
    HOT_HARDWARE,
    HOT_SOFTWARE,
    POWER_BRAKE,
    POWER_CAP,
    Fault,
    Health,
)
from zrun.topology.nvml_source import GPU_IS_LOST, MachineSource, NotKnown, ask

# of nvml.h
_TIMEOUT = 10
_ON_DIE = 0  # NVML_TEMPERATURE_GPU
_CORE_CLOCK = 1  # NVML_CLOCK_SM
_CORRECTED = 0
_UNCORRECTED = 1
_VOLATILE = 0  # NVML_VOLATILE_ECC: since the driver was loaded
_XID_EVENT = 0x8
# Reasons for a lower clock, worst first. An idle GPU's, and clocks that somebody set, are none.
_SLOWED = (
    (0x40, HOT_HARDWARE),
    (0x80, POWER_BRAKE),
    (0x20, HOT_SOFTWARE),
    (0x4, POWER_CAP),
)
_HARDWARE_BIT = 0x8  # set beside the first two, or alone


def read_health(source: MachineSource, handle: Any) -> Health:
    """Return what a GPU says of itself."""
    power = ask(source, "nvmlDeviceGetPowerUsage", handle)
    limit = ask(source, "nvmlDeviceGetEnforcedPowerLimit", handle)
    rates = ask(source, "nvmlDeviceGetUtilizationRates", handle)
    memory = ask(source, "nvmlDeviceGetMemoryInfo", handle)
    return Health(
        temperature_c=ask(source, "nvmlDeviceGetTemperature", handle, _ON_DIE),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        utilisation=None if rates is None else int(rates.gpu),
        used_bytes=None if memory is None else int(memory.used),
        clock_mhz=ask(source, "nvmlDeviceGetClockInfo", handle, _CORE_CLOCK),
        max_clock_mhz=ask(source, "nvmlDeviceGetMaxClockInfo", handle, _CORE_CLOCK),
        slowed=_slowed(_reasons(source, handle)),
        corrected=_errors(source, handle, _CORRECTED),
        uncorrected=_errors(source, handle, _UNCORRECTED),
        remap=_remap(source, handle),
        pcie_width=ask(source, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        max_pcie_width=ask(source, "nvmlDeviceGetMaxPcieLinkWidth", handle),
    )


class NvmlMonitor:
    """Watches some GPUs by NVML; a `zrun.topology.boards.Monitor`."""

    def __init__(self, source: MachineSource, uuids: Iterable[str]) -> None:
        """Begin to watch; errors from now on are told.

        Args:
            source: the library, which stays open meanwhile.
            uuids: of GPUs, or of slices: these are watched as the GPUs that they are part of.
        """
        self._source = source
        self._handles: dict[str, Any] = {}
        self._wholes: dict[str, str] = {}  # by slice, the GPU that it is part of
        for uuid in uuids:
            handle = ask(source, "nvmlDeviceGetHandleByUUID", uuid)
            if handle is not None:
                whole = ask(source, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
                self._handles[uuid] = handle if whole is None else whole
                self._wholes[uuid] = self._uuid(self._handles[uuid]) or uuid
        self._errors = {uuid: self._count(uuid) for uuid in self._handles}
        self._lost: set[str] = set()
        self._events = ask(source, "nvmlEventSetCreate")
        if self._events is not None:
            for handle in self._handles.values():
                ask(source, "nvmlDeviceRegisterEvents", handle, _XID_EVENT, self._events)

    def health(self) -> dict[str, Health]:
        """Return what each GPU says now, by UUID; a GPU that does not answer is missing."""
        return {
            uuid: read_health(self._source, handle)
            for uuid, handle in self._handles.items()
            if uuid not in self._lost
        }

    def changes(self) -> list[Fault]:
        """Return the errors since the last call that counters and silence tell of."""
        return [*self._counted(), *self._gone()]

    def faults(self, patience_s: float) -> list[Fault]:
        """Return the errors that were reported since the last call; wait a while for one."""
        if self._events is None:
            time.sleep(patience_s)
            return []
        found: list[Fault] = []
        left_ms = round(1000 * patience_s)
        while True:
            try:
                event = self._source.call("nvmlEventSetWait_v2", self._events, left_ms)
            except NotKnown as error:
                if error.code not in (_TIMEOUT, GPU_IS_LOST) and not found:
                    time.sleep(patience_s)  # it will not wait either
                return found
            left_ms = 0  # take what else is there
            for uuid in self._named(event.device):
                fault = xids.fault_of(uuid, int(event.eventData))
                if fault is not None:
                    found.append(fault)

    def _named(self, device: Any) -> list[str]:
        """Return the GPU, or the slices of it, of a handle that an event names."""
        told = self._uuid(device)
        if told is not None:
            return [uuid for uuid, whole in self._wholes.items() if whole == told]
        where = _address(device)  # a GPU that is lost does not say its name any more
        return [uuid for uuid, handle in self._handles.items() if _address(handle) == where]

    def _uuid(self, handle: Any) -> str | None:
        found = ask(self._source, "nvmlDeviceGetUUID", handle)
        return found.decode(errors="replace") if isinstance(found, bytes) else found

    def _counted(self) -> list[Fault]:
        """Return the growth of counters, where a driver has no events or an error made none."""
        found: list[Fault] = []
        for uuid, before in self._errors.items():
            now = self._count(uuid)
            if now is not None and before is not None and now > before:
                found.append(xids.memory_fault(uuid, now - before))
            self._errors[uuid] = before if now is None else now
        return found

    def _gone(self) -> list[Fault]:
        found: list[Fault] = []
        for uuid, handle in self._handles.items():
            try:
                self._source.call("nvmlDeviceGetUUID", handle)
            except NotKnown as error:
                if error.code == GPU_IS_LOST and uuid not in self._lost:
                    self._lost.add(uuid)
                    found.append(xids.lost_fault(uuid))
        return found

    def _count(self, uuid: str) -> int | None:
        return _errors(self._source, self._handles[uuid], _UNCORRECTED)


def _address(handle: Any) -> Any:
    """Return the number of a handle: the pointer that holds it is made anew in each call."""
    if hasattr(handle, "contents"):
        return ctypes.cast(handle, ctypes.c_void_p).value
    return handle


def _reasons(source: MachineSource, handle: Any) -> int:
    found = ask(source, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if found is None:  # the name that it had before driver 535
        found = ask(source, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return int(found or 0)


def _slowed(reasons: int) -> tuple[str, ...]:
    found = [text for bit, text in _SLOWED if reasons & bit]
    if reasons & _HARDWARE_BIT and not {HOT_HARDWARE, POWER_BRAKE} & set(found):
        found.insert(0, HARDWARE)
    return tuple(found)


def _errors(source: MachineSource, handle: Any, kind: int) -> int | None:
    found = ask(source, "nvmlDeviceGetTotalEccErrors", handle, kind, _VOLATILE)
    return None if found is None else int(found)


def _remap(source: MachineSource, handle: Any) -> str | None:
    rows = ask(source, "nvmlDeviceGetRemappedRows", handle)  # corrected, not, pending, failed
    if rows is not None:
        if rows[3]:
            return "failed"
        return "pending" if rows[2] else None
    pages = ask(source, "nvmlDeviceGetRetiredPagesPendingStatus", handle)  # before Ampere
    return "pending" if pages else None
