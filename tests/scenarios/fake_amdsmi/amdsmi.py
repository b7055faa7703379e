"""A module `amdsmi` that tells of the GPUs in the JSON file that ZRUN_FAKE_AMDSMI names.

The file is read anew in each call: what a test writes there is true from then on. A board has the
fields of `_BOARD`; `links` has the least and the most MB/s of xGMI between two of them. Without the
variable the driver is not loaded.
"""

from __future__ import annotations

import json
import os
from enum import IntEnum
from pathlib import Path
from typing import Any

_BOARD = {
    "serial": "0x1",
    "name": "AMD Instinct MI300X",
    "gfx": "gfx942",
    "mib": 196608,
    "used": 0,
    "node": 0,
    "bdf": "0000:05:00.0",
    "degrees": 41,
    "watts": 140,
    "most_watts": 750,
    "use": 0,
    "mhz": 132,
    "most_mhz": 2100,
    "errors": [0, 0],
    "lanes": [16, 16],
    "pids": [],
    "slowed": {},
    "pages": [],
    "lost": False,
}


class AmdSmiException(Exception):  # noqa: N818
    """What each function may raise."""


class AmdSmiIoLinkType(IntEnum):
    UNDEFINED = 0
    PCIEXPRESS = 1
    XGMI = 2


class AmdSmiClkType(IntEnum):
    SYS = 0
    GFX = 0


class AmdSmiTemperatureType(IntEnum):
    EDGE = 0
    HOTSPOT = 1


class AmdSmiTemperatureMetric(IntEnum):
    CURRENT = 0


class AmdSmiMemoryPageStatus(IntEnum):
    RESERVED = 0
    PENDING = 1


def _told() -> dict[str, Any]:
    path = os.environ.get("ZRUN_FAKE_AMDSMI")
    if path is None:
        raise AmdSmiException("Error code: 34 | AMDSMI_STATUS_DRIVER_NOT_LOADED")
    told: dict[str, Any] = json.loads(Path(path).read_text())
    return told


def _board(handle: int) -> dict[str, Any]:
    board = _BOARD | _told()["boards"][handle]
    if board["lost"]:
        raise AmdSmiException("Error code: 2 | AMDSMI_STATUS_NOT_SUPPORTED")
    return board


def amdsmi_init() -> None:
    _told()


def amdsmi_shut_down() -> None:
    pass


def amdsmi_get_processor_handles() -> list[int]:
    return list(range(len(_told()["boards"])))


def amdsmi_get_gpu_device_bdf(handle: int) -> str:
    return str(_board(handle)["bdf"])


def amdsmi_get_gpu_driver_info(handle: int) -> dict[str, str]:
    return {"driver_name": "amdgpu", "driver_version": "6.10.5", "driver_date": "N/A"}


def amdsmi_get_gpu_asic_info(handle: int) -> dict[str, Any]:
    board = _board(handle)
    found = {"market_name": board["name"], "asic_serial": board["serial"]}
    return found | {"target_graphics_version": board["gfx"], "oam_id": "N/A"}


def amdsmi_get_gpu_vram_usage(handle: int) -> dict[str, int]:
    return {"vram_total": _board(handle)["mib"], "vram_used": _board(handle)["used"]}


def amdsmi_get_gpu_process_list(handle: int) -> list[dict[str, Any]]:
    return [{"name": "N/A", "pid": pid} for pid in _board(handle)["pids"]]


def amdsmi_topo_get_numa_node_number(handle: int) -> int:
    return int(_board(handle)["node"])


def _pair(one: int, other: int) -> list[int] | None:
    links = _told().get("links", {})
    found: list[int] | None = links.get(f"{min(one, other)}-{max(one, other)}", links.get("all"))
    return found


def amdsmi_topo_get_link_type(one: int, other: int) -> dict[str, int]:
    _board(one), _board(other)
    is_linked = _pair(one, other) is not None
    kind = AmdSmiIoLinkType.XGMI if is_linked else AmdSmiIoLinkType.PCIEXPRESS
    return {"hops": 1 if is_linked else 2, "type": int(kind)}


def amdsmi_get_minmax_bandwidth_between_processors(one: int, other: int) -> dict[str, int]:
    least, most = _pair(one, other) or [0, 0]
    return {"min_bandwidth": least, "max_bandwidth": most}


def amdsmi_get_power_info(handle: int) -> dict[str, Any]:
    return {"current_socket_power": _board(handle)["watts"], "average_socket_power": "N/A"}


def amdsmi_get_power_cap_info(handle: int) -> dict[str, int]:
    return {"power_cap": _board(handle)["most_watts"] * 1_000_000}


def amdsmi_get_clock_info(handle: int, kind: int) -> dict[str, Any]:
    board = _board(handle)
    return {"clk": board["mhz"], "max_clk": board["most_mhz"], "clk_locked": "N/A"}


def amdsmi_get_gpu_activity(handle: int) -> dict[str, Any]:
    return {"gfx_activity": _board(handle)["use"], "mm_activity": "N/A"}


def amdsmi_get_temp_metric(handle: int, kind: int, metric: int) -> int:
    return int(_board(handle)["degrees"])


def amdsmi_get_gpu_total_ecc_count(handle: int) -> dict[str, int]:
    corrected, uncorrected = _board(handle)["errors"]
    return {"correctable_count": corrected, "uncorrectable_count": uncorrected}


def amdsmi_get_pcie_info(handle: int) -> dict[str, Any]:
    lanes, most = _board(handle)["lanes"]
    return {"pcie_static": {"max_pcie_width": most}, "pcie_metric": {"pcie_width": lanes}}


def amdsmi_get_violation_status(handle: int) -> dict[str, Any]:
    found: dict[str, Any] = {"active_ppt_pwr": "N/A", **_board(handle)["slowed"]}
    return found


def amdsmi_get_gpu_bad_page_info(handle: int) -> list[dict[str, Any]]:
    return [{"status": AmdSmiMemoryPageStatus[name]} for name in _board(handle)["pages"]]
