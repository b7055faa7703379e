"""What SIMULATED_GPU says: `devices=2,delay_us=300,seed=7`, read by each process that it reaches.

The module imports nothing of torch's: it runs before torch is imported.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from simulated_gpu.nccl import settings as nccl

VARIABLE = "SIMULATED_GPU"
STARTUP = Path(__file__).resolve().parents[1] / "startup"
DEVICES = 2  # where nothing says how many, and bytes of one where nothing says that
MEMORY = 80 << 30
NAMES: dict[str, type] = {
    "devices": int,  # of the host; CUDA_VISIBLE_DEVICES says which of them a process sees
    "delay_us": float,  # the longest delay before a kernel
    "delay_share": float,  # of the kernels that are delayed
    "seed": int,  # of the delays; each rank has delays of its own
    "poison": int,  # 0: freed memory keeps its values
    "memory": int,  # bytes of a device
    "most_bytes": int,  # of a kernel that is run: larger ones do nothing, and values are anything
    "races": int,  # 0: nobody looks for them, 1: they are noted, 2: an error (as without)
    "stall_s": float,  # after which streams and hosts that stand still are told of
    "strict_register": int,  # 0: a copy may go beyond a range of memory that was registered
    **nccl.NAMES,
}


def read(text: str) -> dict[str, Any]:
    """Settings from `name=value,name=value`."""
    found = {}
    for each in filter(None, text.split(",")):
        name, _, value = each.partition("=")
        if name not in NAMES:
            raise ValueError(f"{VARIABLE}: no setting {name!r}; there are {', '.join(NAMES)}")
        found[name] = NAMES[name](value)
    return found


def write(settings: dict[str, Any]) -> str:
    """The text that `read` reads."""
    text = ",".join(f"{name}={value}" for name, value in settings.items())
    read(text)
    return text


def environment(**settings: Any) -> dict[str, str]:
    """The environment of a process that shall find simulated GPUs, and of all that it starts."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(STARTUP), *(path for path in before if path and path != str(STARTUP))]
    return {**os.environ, VARIABLE: write(settings), "PYTHONPATH": os.pathsep.join(paths)}


def visible(count: int, chosen: str | None) -> list[int]:
    """Which of `count` devices CUDA_VISIBLE_DEVICES lets a process see, by its rules.

    The first name that no device has hides those after it. A slice of a device is that device, and
    then the only one.
    """
    if chosen is None:
        return list(range(count))
    by_name = {uuid(number): number for number in range(count)}
    found: list[int] = []
    for name in chosen.split(","):
        name = name.strip()
        if name.lstrip("-").isdigit():
            number = int(name)
        elif name.startswith("MIG-"):
            return [int(name[4:12], 16)]
        else:
            named = [by_name[each] for each in by_name if name and each.startswith(name)]
            number = named[0] if len(named) == 1 else -1
        if not 0 <= number < count or number in found:
            break
        found.append(number)
    return found


def uuid(number: int) -> str:
    """The name of a device of the host, by which NVML's stand-in (tests/scenarios) knows it too."""
    return f"GPU-{number:08x}-0000-0000-0000-000000000000"
