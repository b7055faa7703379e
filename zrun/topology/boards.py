"""The GPUs of a machine as their driver tells of them, in words that fit every vendor.

`nvml.py` and `amd.py` make these of their libraries' answers, and everything else reads these. Any
call may fail: the driver is old, the board cannot, the GPU fell off the bus. The answer is None
then: not known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

TO_GPU = "gpu"
TO_SWITCH = "switch"
# kinds of fast links
NVLINK = "NVLink"
XGMI = "xGMI"
# reasons for which a GPU runs slower than it could, worst first
HOT_HARDWARE = "it is too hot (its own protection)"
POWER_BRAKE = "the power supply brakes it"
HARDWARE = "its own protection (power or heat)"
HOT_SOFTWARE = "it is too hot (the driver's limit)"
POWER_CAP = "its power limit"


@dataclass(frozen=True)
class Link:
    """One fast link of a GPU that is up: NVLink, xGMI."""

    remote: str | None  # TO_GPU, TO_SWITCH; None: neither, or not known
    bus_id: str | None  # of the other end


@dataclass(frozen=True)
class Slice:
    """A MIG device."""

    uuid: str
    name: str | None
    memory_bytes: int | None


@dataclass(frozen=True)
class Health:
    """What a GPU's sensors and counters say now. None: not known.

    Attributes:
        utilisation: percent of the last moments in which something computed.
        clock_mhz, max_clock_mhz: of the cores.
        slowed: why it is slower than it could be, worst first; what an idle GPU does is no reason.
        corrected, uncorrected: memory errors since the driver was loaded.
        remap: "pending" where memory rows or pages are to be replaced at the next reset, "failed"
            where none are left to replace them with.
        pcie_width, max_pcie_width: lanes in use, and those that board and slot have.
    """

    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    utilisation: int | None = None
    used_bytes: int | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    slowed: tuple[str, ...] = ()
    corrected: int | None = None
    uncorrected: int | None = None
    remap: str | None = None
    pcie_width: int | None = None
    max_pcie_width: int | None = None

    @property
    def strain(self) -> str:
        """Return heat and clock of a GPU that is slowed down: ` at 88 degrees, to 765 of ...`."""
        degrees = "" if self.temperature_c is None else f" at {self.temperature_c} degrees"
        if self.clock_mhz and self.max_clock_mhz:
            return f"{degrees}, to {self.clock_mhz} of {self.max_clock_mhz} MHz"
        return degrees


@dataclass(frozen=True)
class Board:
    """One GPU. None: not known.

    Attributes:
        problem: why nothing can run on it.
        processes: that compute on it.
        links: those that are up.
        link_kind: of the fast ones.
        link_rate: GB/s in one direction over one of them; None: as its capability tells.
        cpus: near it.
        numa: node of those.
        slices: None: MIG is off.
        fabric: domain and clique of fast links that may span hosts.
        is_rocm: it is AMD's, and variables of ROCm choose it.
    """

    index: int
    problem: str | None = None
    uuid: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    processes: tuple[int, ...] | None = None
    capability: tuple[int, int] | None = None
    bus_id: str | None = None
    links: tuple[Link, ...] | None = None
    link_kind: str = NVLINK
    link_rate: float | None = None
    cpus: tuple[int, ...] | None = None
    numa: int | None = None
    slices: tuple[Slice, ...] | None = None
    fabric: str | None = None
    is_rocm: bool = False
    health: Health = field(default_factory=Health)


@dataclass(frozen=True)
class Reading:
    """The GPUs of a machine in PCI order.

    Attributes:
        ancestors: level of the nearest common ancestor of two GPUs, as NVML counts: 0, 10, ... 50.
        cuda: the newest that the driver serves: 12040 is 12.4; None: not known.
        trouble: why no GPU is known, where there seems to be a driver or a board.
    """

    devices: tuple[Board, ...] = ()
    ancestors: tuple[tuple[int | None, ...], ...] = ()
    driver: str | None = None
    cuda: int | None = None
    trouble: str | None = None


@dataclass(frozen=True)
class Fault:
    """An error that a GPU reported while it was watched.

    Attributes:
        uuid: of the GPU.
        xid: NVIDIA's number of the error; None: it was seen in another way.
        what: the error in words, without the number.
        advice: what to do about it.
        is_fatal: what computes there cannot go on.
    """

    uuid: str
    xid: int | None
    what: str
    advice: str
    is_fatal: bool

    def __str__(self) -> str:
        return self.what if self.xid is None else f"Xid {self.xid}, {self.what}"


class Monitor(Protocol):
    """Watches some GPUs of this machine while a job runs on them."""

    def health(self) -> dict[str, Health]:
        """Return what each GPU says now, by UUID; a GPU that does not answer is missing."""

    def faults(self, patience_s: float) -> list[Fault]:
        """Return the errors that were reported since the last call; wait a while for one."""

    def changes(self) -> list[Fault]:
        """Return the errors since the last call that counters and silence tell of."""


def bus_id(text: str | bytes) -> str | None:
    """Return a PCI address as `00000000:06:00.0`: libraries differ in the length of its domain."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    found = re.fullmatch(r"([0-9a-f]+):([0-9a-f]+:[0-9a-f]+\.[0-9a-f])", text.strip().lower())
    if not found:
        return None
    return f"{int(found[1], 16):08x}:{found[2]}"
