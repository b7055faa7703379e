"""Links between the GPUs of a host: paths as `nvidia-smi topo -m` names them, rates as NCCL does.

Pure: from a reading to a matrix. Source: NCCL, src/graph/topo.h (bandwidths per NVLink and path);
RCCL, the file of the same name (per xGMI link).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from zrun.topology.boards import NVLINK, TO_GPU, TO_SWITCH, XGMI, Board, Reading, Slice

SELF = "X"
UNKNOWN = "?"
MIG = "MIG"
_FAST = {"NV": NVLINK, "XG": XGMI}  # kinds of fast links, by the start of their paths

# GB/s in one direction over one NVLink, by compute capability: the last row that is not above it.
_NVLINK = (
    ((6, 0), 18.0),
    ((7, 0), 20.0),
    ((8, 0), 20.0),
    ((8, 6), 12.0),
    ((9, 0), 20.6),
    ((10, 0), 40.1),
)

# GB/s over PCIe: 12, 10 and 6 are NCCL's (a switch, an Intel host bridge, a link between sockets);
# those between them keep the nearer path the better one.
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
        paths: `NV2`, `XG1`, `PIX`, `PXB`, `PHB`, `NODE`, `SYS`; `MIG` next to a slice, `X` on the
            diagonal, `?` not known.
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
        """True if all pairs are alike, so that no grouping is better than another."""
        pairs = itertools.permutations(range(len(self)), 2)
        return len({self.bandwidth[a][b] for a, b in pairs}) <= 1

    @property
    def kind(self) -> str:
        """The name of such a matrix: "NVSwitch", "hybrid cube mesh", "PCIe" ..."""
        if not self.paths:
            return "no GPU"
        if len(self) == 1:
            return "one device"
        combinations = itertools.combinations(range(len(self)), 2)
        pairs = {(a, b): self.paths[a][b] for a, b in combinations}
        if MIG in pairs.values():
            return "MIG slices"
        if all(path == UNKNOWN for path in pairs.values()):
            return "links not known"
        linked = {pair: path for pair, path in pairs.items() if is_fast(path)}
        if not linked:
            return "PCIe"
        kind = _FAST[next(iter(linked.values()))[:2]]
        if len(linked) == len(pairs):
            return "NVSwitch" if self.through_switch else f"{kind} between all"
        degrees = [sum(device in pair for pair in linked) for device in range(len(self))]
        if max(degrees) == 1:
            return f"{kind} pairs"
        if len(self) == 8 and set(degrees) == {4}:
            return "hybrid cube mesh"
        return f"{kind} between some"

    def take(self, devices: Sequence[int]) -> Self:
        """Return the part of these devices, in this order."""
        return type(self)(
            tuple(tuple(self.paths[a][b] for b in devices) for a in devices),
            tuple(tuple(self.bandwidth[a][b] for b in devices) for a in devices),
            self.through_switch,
        )


def is_fast(path: str) -> bool:
    """Return whether a path is made of links between GPUs: NVLinks, xGMI."""
    return path[:2] in _FAST


def link_matrix(reading: Reading) -> LinkMatrix:
    """Return the links between GPUs, in PCI order; of one that is divided, between its slices."""
    devices = usable(reading)
    ends: list[tuple[Board, Slice | None]] = []
    for device in devices:
        ends += [(device, each) for each in device.slices or (None,)]
    paths = [[SELF] * len(ends) for _ in ends]
    bandwidths = [[0.0] * len(ends) for _ in ends]
    for a, b in itertools.permutations(range(len(ends)), 2):
        one, one_slice = ends[a]
        other, other_slice = ends[b]
        if one_slice or other_slice:
            paths[a][b] = MIG
        else:
            paths[a][b], bandwidths[a][b] = _path(reading, one, other)
    return LinkMatrix(
        tuple(map(tuple, paths)),
        tuple(map(tuple, bandwidths)),
        len(devices) > 1 and all(_to_switch(device) for device in devices),
    )


def usable(reading: Reading) -> list[Board]:
    """Return the GPUs that answer; a GPU in MIG mode without slices can run nothing."""
    return [device for device in reading.devices if device.problem is None and device.slices != ()]


def _path(reading: Reading, a: Board, b: Board) -> tuple[str, float]:
    count = _bonded(a, b)
    if count:
        name = next(start for start, kind in _FAST.items() if kind == a.link_kind)
        return f"{name}{count}", round(count * min(_per_link(a), _per_link(b)), 1)
    # Both calls tell the same, unless one of them has failed.
    told = reading.ancestors[a.index][b.index], reading.ancestors[b.index][a.index]
    levels = [level for level in told if level is not None]
    if not levels:
        return UNKNOWN, 0.0
    return _PATHS.get(max(levels), (UNKNOWN, 0.0))


def _bonded(a: Board, b: Board) -> int:
    """Return the number of fast links between two GPUs, or from each of them to switches."""
    seen = []
    for here, there in ((a, b), (b, a)):
        if here.links is None or there.bus_id is None:
            continue
        to_there = [link for link in here.links if link.bus_id == there.bus_id]
        seen.append(sum(link.remote in (TO_GPU, None) for link in to_there))
    direct = min(seen, default=0)
    return max(direct, min(_to_switch(a), _to_switch(b)))


def _to_switch(device: Board) -> int:
    return sum(link.remote == TO_SWITCH for link in device.links or ())


def _per_link(device: Board) -> float:
    """Return the GB/s of one fast link of a GPU."""
    if device.link_rate is not None:
        return device.link_rate
    capability = device.capability or (7, 0)
    for since, rate in reversed(_NVLINK):
        if capability >= since:
            return rate
    return _NVLINK[0][1]
