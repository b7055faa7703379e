"""How well two GPUs of a host reach each other: paths as `nvidia-smi topo -m` names them, bandwidth as NCCL counts it.

Pure: from a reading to a matrix. Sources: NCCL, src/graph/topo.h (bandwidths per NVLink and per path).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from zrun.topology.nvml import TO_GPU, TO_SWITCH, NvmlDevice, Reading

SELF = "X"
UNKNOWN = "?"
MIG = "MIG"

# GB/s in one direction over one NVLink, by compute capability: the last row that is not above it.
_NVLINK = (
    ((6, 0), 18.0),
    ((7, 0), 20.0),
    ((8, 0), 20.0),
    ((8, 6), 12.0),
    ((9, 0), 20.6),
    ((10, 0), 40.1),
)

# GB/s over PCIe: 12, 10 and 6 are NCCL's (a switch, an Intel host bridge, a link between sockets); those between them
# keep the nearer path the better one.
_PATHS = {
    0: ("PIX", 12.0),
    10: ("PIX", 12.0),
    20: ("PXB", 11.0),
    30: ("PHB", 10.0),
    40: ("NODE", 8.0),
    50: ("SYS", 6.0),
}


@dataclass(frozen=True)
class LinkMatrix:
    """Paths and bandwidths between the devices of a host, in their order.

    Attributes:
        paths: `NV2`, `PIX`, `PXB`, `PHB`, `NODE`, `SYS`; `MIG` next to a slice, `X` on the diagonal, `?` not known.
        bandwidth: GB/s in one direction; 0 where there is no path or none is known.
        through_switch: NVLinks end at switches, so that every pair has all of them.
    """

    paths: tuple[tuple[str, ...], ...]
    bandwidth: tuple[tuple[float, ...], ...]
    through_switch: bool = False

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def is_flat(self) -> bool:
        """Whether all pairs are alike, so that no grouping is better than another."""
        return (
            len(
                {
                    value
                    for a, row in enumerate(self.bandwidth)
                    for b, value in enumerate(row)
                    if a != b
                }
            )
            <= 1
        )

    @property
    def kind(self) -> str:
        """What the whole is called."""
        pairs = {
            (a, b): path for a, row in enumerate(self.paths) for b, path in enumerate(row) if a < b
        }
        if not pairs:
            return "one device" if self.paths else "no GPU"
        if MIG in pairs.values():
            return "MIG slices"
        if all(path == UNKNOWN for path in pairs.values()):
            return "links not known"
        linked = {pair for pair, path in pairs.items() if path.startswith("NV")}
        if not linked:
            return "PCIe"
        degrees = [sum(device in pair for pair in linked) for device in range(len(self))]
        if len(linked) == len(pairs):
            return "NVSwitch" if self.through_switch else "NVLink between all"
        if max(degrees) == 1:
            return "NVLink pairs"
        return (
            "hybrid cube mesh" if len(self) == 8 and set(degrees) == {4} else "NVLink between some"
        )

    def take(self, devices: Sequence[int]) -> Self:
        """The part of these devices, in this order."""
        return type(self)(
            tuple(tuple(self.paths[a][b] for b in devices) for a in devices),
            tuple(tuple(self.bandwidth[a][b] for b in devices) for a in devices),
            self.through_switch,
        )


def link_matrix(reading: Reading) -> LinkMatrix:
    """The links between what processes can run on: each GPU, or each slice of one that is divided, in PCI order."""
    devices = usable(reading)
    ends = [(device, part) for device in devices for part in (device.slices or (None,))]
    found = [
        [
            (SELF, 0.0)
            if a == b
            else (MIG, 0.0)
            if one[1] or other[1]
            else _path(reading, one[0], other[0])
            for b, other in enumerate(ends)
        ]
        for a, one in enumerate(ends)
    ]
    return LinkMatrix(
        tuple(tuple(path for path, _ in row) for row in found),
        tuple(tuple(bandwidth for _, bandwidth in row) for row in found),
        len(devices) > 1 and all(_to_switch(device) for device in devices),
    )


def usable(reading: Reading) -> list[NvmlDevice]:
    """The GPUs that answer; a GPU in MIG mode without slices can run nothing."""
    return [device for device in reading.devices if device.problem is None and device.slices != ()]


def _path(reading: Reading, a: NvmlDevice, b: NvmlDevice) -> tuple[str, float]:
    count = _bonded(a, b)
    if count:
        return f"NV{count}", round(count * min(_per_link(a), _per_link(b)), 1)
    told = [
        reading.ancestors[here.index][there.index]
        for here, there in itertools.permutations((a, b), 2)
    ]
    level = max(
        (level for level in told if level is not None), default=None
    )  # one of two calls may have failed
    return (UNKNOWN, 0.0) if level is None else _PATHS.get(level, (UNKNOWN, 0.0))


def _bonded(a: NvmlDevice, b: NvmlDevice) -> int:
    """NVLinks that carry what one sends the other: between them, or to switches from either."""
    seen = [
        sum(link.remote in (TO_GPU, None) and link.bus_id == there.bus_id for link in here.links)
        for here, there in itertools.permutations((a, b), 2)
        if here.links is not None and there.bus_id is not None
    ]
    return max(min(seen, default=0), min(_to_switch(a), _to_switch(b)))


def _to_switch(device: NvmlDevice) -> int:
    return sum(link.remote == TO_SWITCH for link in device.links or ())


def _per_link(device: NvmlDevice) -> float:
    capability = device.capability or (7, 0)
    return next((rate for since, rate in reversed(_NVLINK) if capability >= since), _NVLINK[0][1])
