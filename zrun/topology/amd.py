"""Guarded reads of amdsmi: the GPUs of this machine that are AMD's.

The module `amdsmi` is ROCm's own, installed with it or from its folder share/amd_smi; without it no
AMD GPU is known. Its functions differ a little from one ROCm to the next: what one of them cannot
tell is None.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from zrun.topology.boards import (
    HOT_HARDWARE,
    HOT_SOFTWARE,
    POWER_CAP,
    TO_GPU,
    XGMI,
    Board,
    Fault,
    Health,
    Link,
    Reading,
    bus_id,
)

_KFD = "/dev/kfd"  # the compute driver's file
_MIB = 1 << 20
_MOMENT_S = 0.2  # that a driver may be busy
_XGMI = 2  # of amdsmi_topo_get_link_type
# GB/s in one direction over one xGMI link, by the start of the architecture, as RCCL reckons.
_LINK_RATES = {"gfx95": 48.0, "gfx94": 48.0, "gfx90a": 36.0}
_OTHER_LINK_RATE = 24.0
# Levels of the nearest common ancestor, as NVML counts: amdsmi tells the NUMA node only.
_SAME_NODE = 40
_OTHER_NODE = 50
_NO_NODE = 1 << 16
_SLOWED = (
    ("active_prochot_thrm", HOT_HARDWARE),
    ("active_socket_thrm", HOT_SOFTWARE),
    ("active_vr_thrm", HOT_SOFTWARE),
    ("active_hbm_thrm", HOT_SOFTWARE),
    ("active_ppt_pwr", POWER_CAP),
)
_PAGES = {"PENDING": "pending", "UNRESERVABLE": "failed"}
_NO_MODULE = (
    "an AMD driver, and no module amdsmi that reads it: python -m pip install "
    "/opt/rocm/share/amd_smi, or the amdsmi of your ROCm"
)
_NO_DRIVER = (
    "an AMD driver that does not answer ({}): is amdgpu loaded, and is this user in the groups "
    "render and video?"
)
_NO_BOARD = (
    "an AMD driver that sees none: compare amd-smi list with lspci -d 1002:; a container is "
    "started with --device /dev/kfd --device /dev/dri"
)


_RESET = (
    "leave this GPU out until it was reset (amd-smi reset --gpureset, with no process on it), "
    "and have it replaced if that comes again"
)
_REBOOT = (
    "leave this host out and reboot it; if it comes again, have the board, its slot and its power "
    "looked at"
)


class NotThere(Exception):  # noqa: N818
    """There is no AMD driver that answers. Its text is what to do about it; "": nothing."""


class Amdsmi:
    """The module amdsmi, whose functions may fail."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def ask(self, name: str, *arguments: Any) -> Any | None:
        """Return the answer of a function, or None where it is not known."""
        try:
            return getattr(self._module, name)(*arguments)
        except self._module.AmdSmiException:
            return None
        except (AttributeError, TypeError, ValueError, OSError, KeyError):
            return None

    def constant(self, name: str, otherwise: int) -> Any:
        """Return a member of an enumeration of the module: `AmdSmiClkType.GFX`."""
        group, _, member = name.partition(".")
        return getattr(getattr(self._module, group, None), member, otherwise)


@contextmanager
def library() -> Iterator[Amdsmi]:
    """Initialise amdsmi.

    Raises:
        NotThere: there is no such module, or no driver that it fits.
    """
    if importlib.util.find_spec("amdsmi") is None:
        raise NotThere(_NO_MODULE if os.path.exists(_KFD) else "")
    try:
        module = importlib.import_module("amdsmi")
        module.amdsmi_init()
    except Exception as error:  # it loads a library, and looks for it in several places
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise NotThere(_NO_DRIVER.format(reason[0]) if os.path.exists(_KFD) else "") from None
    source = Amdsmi(module)
    try:
        yield source
    finally:
        source.ask("amdsmi_shut_down")


def read_machine() -> Reading:
    """The AMD GPUs of this machine; none where there is no amdsmi."""
    try:
        with library() as source:
            return read(source)
    except NotThere as error:
        return Reading(trouble=str(error) or None)


def read(source: Amdsmi) -> Reading:
    """The GPUs that amdsmi tells of, in PCI order."""
    handles = _handles(source)
    names = [_unique_id(source, handle) for handle in handles]
    addresses = [bus_id(_text(source.ask("amdsmi_get_gpu_device_bdf", h)) or "") for h in handles]
    boards = tuple(
        _board(source, index, handles, names[index], addresses) for index in range(len(handles))
    )
    ancestors = tuple(tuple(_ancestor(a, b) for b in boards) for a in boards)
    info = _mapping(source.ask("amdsmi_get_gpu_driver_info", handles[0])) if handles else {}
    driver = _text(info.get("driver_version"))
    return Reading(boards, ancestors, driver, None, None if boards else _NO_BOARD)


def read_health(source: Amdsmi, handle: Any) -> Health:
    """Return what a GPU says of itself."""
    power = _mapping(source.ask("amdsmi_get_power_info", handle))
    cap = _mapping(source.ask("amdsmi_get_power_cap_info", handle))
    clock = _mapping(
        source.ask("amdsmi_get_clock_info", handle, source.constant("AmdSmiClkType.GFX", 0))
    )
    activity = _mapping(source.ask("amdsmi_get_gpu_activity", handle))
    memory = _mapping(source.ask("amdsmi_get_gpu_vram_usage", handle))
    errors = _mapping(source.ask("amdsmi_get_gpu_total_ecc_count", handle))
    pcie = _mapping(source.ask("amdsmi_get_pcie_info", handle))
    draw = _first(power, "current_socket_power", "socket_power", "average_socket_power")
    limit = _number(cap.get("power_cap"))
    used = _number(memory.get("vram_used"))
    return Health(
        temperature_c=_temperature(source, handle),
        power_w=None if draw is None else float(draw),
        power_limit_w=None if limit is None else _watts(limit),
        utilisation=_number(activity.get("gfx_activity")),
        used_bytes=None if used is None else used * _MIB,
        clock_mhz=_first(clock, "clk", "cur_clk"),
        max_clock_mhz=_number(clock.get("max_clk")),
        slowed=_slowed(_mapping(source.ask("amdsmi_get_violation_status", handle))),
        corrected=_number(errors.get("correctable_count")),
        uncorrected=_number(errors.get("uncorrectable_count")),
        remap=_remap(source, handle),
        pcie_width=_number(_mapping(pcie.get("pcie_metric")).get("pcie_width")),
        max_pcie_width=_number(_mapping(pcie.get("pcie_static")).get("max_pcie_width")),
    )


class AmdMonitor:
    """Watches some GPUs by amdsmi's counters; a `zrun.topology.boards.Monitor`."""

    def __init__(self, source: Amdsmi, uuids: Iterable[str]) -> None:
        """Begin to watch.

        Args:
            source: amdsmi, which stays open meanwhile.
        """
        wanted = frozenset(uuids)
        self._source = source
        known = {_unique_id(source, handle): handle for handle in _handles(source)}
        self._handles = {uuid: known[uuid] for uuid in known if uuid in wanted}
        self._errors = {uuid: self._count(uuid) for uuid in self._handles}
        self._lost: set[str] = set()

    def health(self) -> dict[str, Health]:
        """Return what each GPU says now, by UUID; a GPU that does not answer is missing."""
        return {
            uuid: read_health(self._source, handle)
            for uuid, handle in self._handles.items()
            if uuid not in self._lost
        }

    def faults(self, patience_s: float) -> list[Fault]:
        """Return nothing after a while: AMD's driver tells errors by its counters."""
        time.sleep(patience_s)
        return []

    def changes(self) -> list[Fault]:
        """Return the errors since the last call that counters and silence tell of."""
        found: list[Fault] = []
        for uuid, handle in self._handles.items():
            if uuid in self._lost:
                continue
            before = self._errors[uuid]
            now = self._count(uuid)
            if now is not None and before is not None and now > before:
                what = f"uncorrectable errors of its memory ({now - before}, ECC)"
                found.append(Fault(uuid, None, what, _RESET, is_fatal=False))
            self._errors[uuid] = before if now is None else now
            if self._is_gone(handle):
                self._lost.add(uuid)
                found.append(Fault(uuid, None, "the GPU is gone", _REBOOT, is_fatal=True))
        return found

    def _is_gone(self, handle: Any) -> bool:
        """Return whether a GPU answers nothing, and again nothing after a moment.

        Its rank is ended then, and amdsmi has no error of its own for a GPU that is lost: one call
        that fails, as of a driver that is busy, is not enough.
        """
        for again in range(2):
            if again:
                time.sleep(_MOMENT_S)
            memory = self._source.ask("amdsmi_get_gpu_vram_usage", handle)
            if memory is not None or _unique_id(self._source, handle) is not None:
                return False
        return True

    def _count(self, uuid: str) -> int | None:
        errors = self._source.ask("amdsmi_get_gpu_total_ecc_count", self._handles[uuid])
        return _number(_mapping(errors).get("uncorrectable_count"))


def _handles(source: Amdsmi) -> list[Any]:
    found: Sequence[Any] = source.ask("amdsmi_get_processor_handles") or ()
    return list(found)


def _board(
    source: Amdsmi,
    index: int,
    handles: Sequence[Any],
    uuid: str | None,
    addresses: Sequence[str | None],
) -> Board:
    handle = handles[index]
    asic = _mapping(source.ask("amdsmi_get_gpu_asic_info", handle))
    memory = _mapping(source.ask("amdsmi_get_gpu_vram_usage", handle))
    total = _number(memory.get("vram_total"))
    used = _number(memory.get("vram_used")) or 0
    if uuid is None and not asic and total is None:
        return Board(index, "does not answer (amdsmi)")
    node = _number(source.ask("amdsmi_topo_get_numa_node_number", handle))
    shared = sum(address == addresses[index] for address in addresses) > 1
    return Board(
        index,
        # Partitions of a GPU have one serial number: they are found by their order.
        uuid=None if shared else uuid,
        name=_text(asic.get("market_name")),
        memory_bytes=None if total is None else total * _MIB,
        free_bytes=None if total is None else (total - used) * _MIB,
        processes=_processes(source.ask("amdsmi_get_gpu_process_list", handle)),
        bus_id=addresses[index],
        links=_links(source, index, handles, addresses),
        link_kind=XGMI,
        is_rocm=True,
        link_rate=_link_rate(_text(asic.get("target_graphics_version")) or ""),
        numa=node if node is not None and node < _NO_NODE else None,
        health=read_health(source, handle),
    )


def _links(
    source: Amdsmi, index: int, handles: Sequence[Any], addresses: Sequence[str | None]
) -> tuple[Link, ...] | None:
    """Return the xGMI links of a GPU; None where nothing is told of any pair."""
    names = ("AmdSmiIoLinkType.XGMI", "AmdSmiLinkType.XGMI", "AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI")
    found = [source.constant(name, -1) for name in names]
    xgmi = next((int(each) for each in found if each != -1), _XGMI)
    links: list[Link] = []
    is_told = len(handles) == 1
    for other, handle in enumerate(handles):
        if other == index:
            continue
        told = _mapping(source.ask("amdsmi_topo_get_link_type", handles[index], handle))
        is_told |= bool(told)
        if _number(told.get("type")) == xgmi and _number(told.get("hops")) == 1:
            count = _bundle(source, handles[index], handle)
            links += [Link(TO_GPU, addresses[other])] * count
    return tuple(links) if is_told else None


def _bundle(source: Amdsmi, one: Any, other: Any) -> int:
    """Return the xGMI links between two GPUs, as RCCL counts: all of them move the most."""
    rates = _mapping(source.ask("amdsmi_get_minmax_bandwidth_between_processors", one, other))
    least = _number(rates.get("min_bandwidth"))
    most = _number(rates.get("max_bandwidth"))
    if not least or not most:
        return 1
    return max(1, most // least)


def _link_rate(architecture: str) -> float:
    for start, rate in _LINK_RATES.items():
        if architecture.startswith(start):
            return rate
    return _OTHER_LINK_RATE


def _unique_id(source: Amdsmi, handle: Any) -> str | None:
    """Return the name by which ROCR_VISIBLE_DEVICES knows a GPU: `GPU-` and its serial number."""
    serial = _text(_mapping(source.ask("amdsmi_get_gpu_asic_info", handle)).get("asic_serial"))
    try:
        return f"GPU-{int(serial or '', 16):016x}"
    except ValueError:
        return None


def _processes(told: Any) -> tuple[int, ...] | None:
    if told is None:
        return None
    pids = [_number(_mapping(each).get("pid")) for each in told]
    if None in pids:
        return None  # of an older version, whose list has handles
    return tuple(filter(None, pids))


def _ancestor(a: Board, b: Board) -> int | None:
    if a.index == b.index or a.problem is not None or b.problem is not None:
        return None
    if a.numa is None or b.numa is None:
        return None
    return _SAME_NODE if a.numa == b.numa else _OTHER_NODE


def _temperature(source: Amdsmi, handle: Any) -> int | None:
    """Return the temperature of the hottest place, else of the board."""
    now = source.constant("AmdSmiTemperatureMetric.CURRENT", 0)
    for name, number in (("HOTSPOT", 1), ("JUNCTION", 1), ("EDGE", 0)):
        kind = source.constant(f"AmdSmiTemperatureType.{name}", number)
        found = _number(source.ask("amdsmi_get_temp_metric", handle, kind, now))
        if found:
            return found if found < 1000 else found // 1000  # of some versions in thousandths
    return None


def _slowed(status: Mapping[str, Any]) -> tuple[str, ...]:
    found = [why for field, why in _SLOWED if status.get(field) in (True, 1)]
    return tuple(dict.fromkeys(found))


def _remap(source: Amdsmi, handle: Any) -> str | None:
    """Return whether pages of memory are still to be retired."""
    states: set[str] = set()
    for page in source.ask("amdsmi_get_gpu_bad_page_info", handle) or ():
        status = _mapping(page).get("status")
        states.add(str(getattr(status, "name", status)))
    for name, state in reversed(_PAGES.items()):
        if any(text.endswith(name) for text in states):
            return state
    return None


def _watts(limit: int) -> float:
    return limit / 1e6 if limit > 100_000 else float(limit)  # of older versions in watts


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _first(told: Mapping[str, Any], *names: str) -> int | None:
    numbers = (_number(told.get(name)) for name in names)
    return next((number for number in numbers if number is not None), None)


def _number(value: Any) -> int | None:
    """Return a number as such; amdsmi says "N/A" where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value not in ("", "N/A") else None
