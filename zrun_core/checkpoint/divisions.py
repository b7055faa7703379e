"""Which elements of which tensors each rank has written, as arithmetic. Pure.

A division is units that the same ranks hold, in equal shards, each shard divided once more among
the ranks that hold copies of it. So a manifest describes a unit once, however many ranks there are:

    a unit of 12 elements, ranks [0, 2, 1, 3], 2 copies
    shard       0 0 0 0 0 0 1 1 1 1 1 1
    written     0 0 0 2 2 2 1 1 1 3 3 3      by rank
    runs        a a a a a b b b b b - -      of tensor `a`, of `b`, padding

Rank 2 has written elements 3 and 4 of `a`, and the first of `b`: of every state that is kept of
them. What each rank of a save knows is its `Share`; rank 0 makes divisions of all of them.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zrun_core.checkpoint.digest import combined, digest
from zrun_core.checkpoint.manifest_parts import Division, UnitInfo, UnitRun

_by_place = attrgetter("place")


class TensorSpan(NamedTuple):
    """A flat range of a tensor, in its memory order."""

    tensor: str
    start: int
    stop: int


class RankSpan(NamedTuple):
    """A flat range of a tensor that one rank has written."""

    rank: int
    start: int
    stop: int


def part_start(numel: int, shards: int, copies: int, index: int) -> int:
    """Return the first element of part `index` of a unit, of shards * copies parts.

    The last part of a shard may be shorter than the others, or empty.
    """
    shard, copy = divmod(index, copies)
    shard_numel = numel // shards
    return shard * shard_numel + min(shard_numel, copy * -(-shard_numel // copies))


def spans_of_part(unit: UnitInfo, shards: int, copies: int, index: int) -> Iterator[TensorSpan]:
    """Yield what part `index` of a unit is of tensors, by place."""
    low = part_start(unit.numel, shards, copies, index)
    high = part_start(unit.numel, shards, copies, index + 1)
    at = max(0, bisect_right(unit.runs, low, key=_by_place) - 1)
    for run in unit.runs[at:]:
        if run.place >= high:
            return
        start = max(low, run.place)
        stop = min(high, run.place + run.numel)
        if start < stop:
            shift = run.first - run.place
            yield TensorSpan(run.tensor, start + shift, stop + shift)


@dataclass(frozen=True)
class Share:
    """A rank's part of units that it divides with others; the same on these, but for `index`.

    Attributes:
        copies, shards: see `Division`.
        index: of the part that is this rank's.
    """

    copies: int
    shards: int
    index: int
    units: tuple[UnitInfo, ...]

    @cached_property
    def identity(self) -> str:
        """Return a digest of all but the index and the names of units: what ranks agree on."""
        units = sorted(
            digest(json.dumps([unit.numel, [asdict(run) for run in unit.runs]]).encode())
            for unit in self.units
        )
        return combined([str(self.copies), str(self.shards), *units])

    def spans(self) -> Iterator[TensorSpan]:
        """Yield what this rank has to write."""
        for unit in self.units:
            yield from spans_of_part(unit, self.shards, self.copies, self.index)

    def renamed(self, rename: Callable[[str], str]) -> Share:
        """Return the same of tensors by other names."""
        units = [
            replace(unit, runs=[replace(run, tensor=rename(run.tensor)) for run in unit.runs])
            for unit in self.units
        ]
        return replace(self, units=tuple(units))


def single_unit(name: str, tensors: Iterable[tuple[str, int]]) -> UnitInfo | None:
    """Return a unit that is tensors back to back, given by name and elements; None: it is empty."""
    runs = []
    end = 0
    for tensor, numel in tensors:
        if numel:
            runs.append(UnitRun(tensor, 0, end, numel))
            end += numel
    return UnitInfo(name, end, runs) if runs else None


class _PlacedRun(NamedTuple):
    run: UnitRun
    unit: UnitInfo
    division: Division


class Divisions:
    """The divisions of a manifest, by rank and by tensor."""

    def __init__(self, divisions: Sequence[Division]) -> None:
        """
        Args:
            divisions: that do not contradict each other, see `manifest_checks`.
        """
        self._parts: dict[int, list[tuple[Division, int]]] = defaultdict(list)  # by rank
        self._runs: dict[str, list[_PlacedRun]] = defaultdict(list)  # by tensor
        for division in divisions:
            for index, rank in enumerate(division.ranks):
                self._parts[rank].append((division, index))
            for unit in division.units:
                for run in unit.runs:
                    self._runs[run.tensor].append(_PlacedRun(run, unit, division))
        for runs in self._runs.values():
            runs.sort(key=lambda each: each.run.first)

    def of_rank(self, rank: int) -> Iterator[TensorSpan]:
        """Yield what a rank has written."""
        for division, index in self._parts.get(rank, ()):
            shards = len(division.ranks) // division.copies
            for unit in division.units:
                yield from spans_of_part(unit, shards, division.copies, index)

    def of_tensor(self, tensor: str, start: int, stop: int) -> Iterator[RankSpan]:
        """Yield who has written what of elements [start, stop) of a tensor, in their order."""
        runs = self._runs.get(tensor, [])
        at = max(0, bisect_right(runs, start, key=lambda each: each.run.first) - 1)
        for run, unit, division in runs[at:]:
            if run.first >= stop:
                return
            shift = run.first - run.place
            low = max(start, run.first) - shift
            high = min(stop, run.first + run.numel) - shift
            if low >= high:
                continue
            shards = len(division.ranks) // division.copies
            for index in _parts_in(unit.numel, shards, division.copies, low, high):
                first = max(low, part_start(unit.numel, shards, division.copies, index))
                last = min(high, part_start(unit.numel, shards, division.copies, index + 1))
                if first < last:
                    yield RankSpan(division.ranks[index], first + shift, last + shift)


def _parts_in(numel: int, shards: int, copies: int, low: int, high: int) -> range:
    """Return the parts of a unit from that of element `low` to that of `high` - 1."""
    shard_numel = numel // shards
    part_numel = -(-shard_numel // copies)

    def part_of(element: int) -> int:
        shard, rest = divmod(element, shard_numel)
        return shard * copies + rest // part_numel

    return range(part_of(low), part_of(high - 1) + 1)


def bytes_by_rank(
    divisions: Sequence[Division], widths: Mapping[str, int], world_size: int
) -> NDArray[np.int64]:
    """Return the bytes that each rank has written of the model: [world_size].

    Args:
        divisions: whose ranks are less than `world_size`.
        widths: by tensor, bytes of all states of one element; all together are less than 2^62.
    """
    total = np.zeros(world_size, dtype=np.int64)
    for division in divisions:
        ranks = np.array(division.ranks, dtype=np.int64)
        shards = len(ranks) // division.copies
        shard, copy = np.divmod(np.arange(len(ranks) + 1, dtype=np.int64), division.copies)
        for unit in division.units:
            shard_numel = unit.numel // shards
            part_numel = -(-shard_numel // division.copies)
            borders = shard * shard_numel + np.minimum(shard_numel, copy * part_numel)
            places = np.array([run.place for run in unit.runs], dtype=np.int64)
            numels = np.array([run.numel for run in unit.runs], dtype=np.int64)
            width = np.array([widths[run.tensor] for run in unit.runs], dtype=np.int64)
            before = np.concatenate([[0], np.cumsum(numels * width)])  # each run, in bytes
            at = np.searchsorted(places, borders, side="right") - 1
            inside = np.clip(borders - places[at], 0, numels[at]) * width[at]
            ends = np.where(at < 0, 0, before[at] + inside)
            total[ranks] += np.diff(ends)
    return total
