"""NVML's stand-in for the devices of a command: a board on PCIe each, which nothing happens to.

Machines of which NVML tells more are `machine.Machine`.
"""

from __future__ import annotations

import os
from pathlib import Path

from simulated_gpu import build
from simulated_gpu.settings import DEVICES, MEMORY

_DESCRIPTION = "ZRUN_FAKE_NVML"


def added_to(
    environment: dict[str, str], devices: int = DEVICES, memory: int = MEMORY, **_: object
) -> dict[str, str]:
    """Return `environment` with what makes NVML tell of the boards; as it is where it has some.

    Args:
        memory: bytes of each GPU.
    """
    if _DESCRIPTION in environment:
        return environment
    folder = build.nvml_library().parent
    paths = [str(folder), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
    return {
        **environment,
        "LD_LIBRARY_PATH": os.pathsep.join(paths),
        _DESCRIPTION: str(_write(folder, devices, memory >> 20)),
    }


def _write(folder: Path, devices: int, mib: int) -> Path:
    """Write a description (`zrun/topology/scenario.py` has its words), whole or not at all."""
    on_board = f"0-{devices - 1}" if devices else "-"
    lines = [
        f"gpus {devices}",
        "name Simulated GPU",
        f"memory {mib}",
        "capability 9 0",
        f"node 0 {on_board} 0-{(os.cpu_count() or 1) - 1}",
    ]
    path = folder / f"boards-{devices}-{mib}.txt"
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text("".join(f"{line}\n" for line in lines))
    return new.replace(path)
