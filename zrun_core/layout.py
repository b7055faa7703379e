"""Where every parameter lies: flat units, their shards and the buffers that follow from them. Pure arithmetic.

    parameters of one unit, ordered by optimizer group        padding
    |--- w1 ---|--- w2 ---|-- b1 --|-------- w3 --------|-----|
    |<------ shard of rank 0 ------>|<------ shard of rank 1 ------>|      shard borders ignore parameter borders

The runtime allocates what `buffers` lists, the planner sums it, and a checkpoint names its fragments by it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag, auto

import torch

PAGE_BYTES = 4096  # shards start on pages, so that a gathered unit can be assembled by moving pages


class Sharded(Flag):
    """Which model states are divided over the shard group (Rajbhandari et al. 2020, section 5)."""

    NOTHING = 0
    OPTIMIZER = auto()
    GRADIENT = auto()
    PARAMETER = auto()


@dataclass(frozen=True)
class ZeroPolicy:
    """What a ZeRO stage shards. The two questions that tell the stages apart are asked of this object only."""

    sharded: Sharded

    @classmethod
    def of_stage(cls, stage: int) -> ZeroPolicy:
        """Stage 0 shards nothing, 1 the optimizer, 2 gradients too, 3 parameters too."""
        order = (Sharded.OPTIMIZER, Sharded.GRADIENT, Sharded.PARAMETER)
        sharded = Sharded.NOTHING
        for what in order[:stage]:
            sharded |= what
        return cls(sharded)

    @property
    def stage(self) -> int:
        return len(self.sharded)

    def reduce_now(self, boundary: bool) -> bool:
        """Whether a unit's gradient is reduced after this micro-batch, or kept whole until the last one."""
        return boundary or Sharded.GRADIENT in self.sharded

    @property
    def free_after_use(self) -> bool:
        """Whether a unit's whole parameters are given up once its forward or backward is over."""
        return Sharded.PARAMETER in self.sharded


class Kind(Enum):
    """What a buffer holds."""

    PARAM = "params"
    GRAD = "grads"
    OPTIM = "optim"  # fp32 master copy and the optimizer's moments
    RING = "rings"  # constant-size scratch of gathers and reductions


@dataclass(frozen=True)
class Buffer:
    """One allocation of one rank."""

    name: str
    kind: Kind
    num_bytes: int


@dataclass(frozen=True)
class ParamSlot:
    """One parameter's place in its unit. `stride` is kept, so that a channels_last weight stays one."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    group: int  # optimizer group
    offset: int  # in elements, from the unit's start
    numel: int

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in a range of its unit. Offsets in elements, from the range's start."""

    slot: ParamSlot
    index: int  # of the parameter in its unit
    start: int
    stop: int


@dataclass(frozen=True)
class UnitLayout:
    """A flat unit: parameters of one dtype and `requires_grad`, back to back, padded to equal page-aligned shards."""

    name: str
    slots: tuple[ParamSlot, ...]
    dtype: torch.dtype  # compute dtype: what the module sees
    trainable: bool
    num_shards: int
    persistent: bool = False  # stage 3: stays whole
    lasting: bool = False  # in use while other units come and go: tied to modules of theirs, or of a container itself
    modules: str = ""  # those that the unit was cut from; units cut from the same ones are in use together
    numel: int = field(init=False)
    shard_numel: int = field(init=False)

    def __post_init__(self) -> None:
        numel = self.slots[-1].stop if self.slots else 0
        align = PAGE_BYTES // self.dtype.itemsize
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "shard_numel", math.ceil(numel / self.num_shards / align) * align)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.num_shards

    def shard_range(self, index: int) -> tuple[int, int]:
        """First and last + 1 element of shard `index`."""
        return index * self.shard_numel, (index + 1) * self.shard_numel

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The parameters, or parts of parameters, in elements [start, stop) of the unit, in order."""
        for number, slot in enumerate(self.slots):
            low, high = max(start, slot.offset), min(stop, slot.stop)
            if low < high:
                yield Piece(slot, number, low - start, high - start)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The stride that `tensor` keeps in a flat buffer: its own if it is dense, else the contiguous one."""
    size_of_stride = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1)
    expected = 1
    for stride, size in size_of_stride:
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


def lay_out(
    name: str,
    params: Sequence[tuple[str, torch.Tensor, int]],
    *,
    dtype: torch.dtype,
    trainable: bool,
    num_shards: int,
    persistent: bool = False,
    lasting: bool = False,
    modules: str = "",
) -> UnitLayout:
    """Place `params`, triples of (name, tensor, optimizer group), in one unit. Groups become contiguous ranges."""
    offset, slots = 0, []
    for param_name, tensor, group in sorted(params, key=lambda item: item[2]):
        slots.append(
            ParamSlot(param_name, tuple(tensor.shape), dense_stride(tensor), group, offset, numel := tensor.numel())
        )
        offset += numel
    return UnitLayout(name, tuple(slots), dtype, trainable, num_shards, persistent, lasting, modules or name)


@dataclass(frozen=True)
class StatePolicy:
    """Everything that decides how many bytes the states of a unit take on one rank."""

    zero: ZeroPolicy
    reduce_dtype: torch.dtype
    moments: int  # values that the optimizer keeps per parameter: 2 for Adam
    moment_dtype: torch.dtype = torch.float32
    updates_together: bool = False  # all units propose an update before the first is applied: layer-wise optimizers
    server: bool = False  # stage 0: the first rank alone updates, and sends the parameters to the others

    def has_master(self, unit: UnitLayout) -> bool:
        """Whether the optimizer works on a copy: fp32 parameters are their own master."""
        return unit.trainable and unit.dtype != torch.float32

    def owned_range(self, unit: UnitLayout, index: int) -> tuple[int, int]:
        """The elements that rank `index` of the shard group updates."""
        if Sharded.OPTIMIZER in self.zero.sharded:
            return unit.shard_range(index)
        return 0, 0 if self.server and index else unit.padded_numel

    def counted_shards(self, unit: UnitLayout, index: int) -> range:
        """The shards whose elements rank `index` counts in norms, so that each element is counted once.

        They are the same parts at every stage, so that sums have the same bits.
        """
        if self.server:
            return range(0 if index else unit.num_shards)
        return range(index, index + 1)

    def frees(self, unit: UnitLayout) -> bool:
        """Whether only a shard of the unit's parameters stays in memory between uses."""
        return self.zero.free_after_use and not unit.persistent

    def buffers(self, unit: UnitLayout, index: int) -> list[Buffer]:
        """The permanent buffers of `unit` on rank `index` of its shard group: parameters, gradients, optimizer."""
        param = unit.shard_numel if self.frees(unit) else unit.padded_numel
        found = [Buffer(f"{unit.name}/param", Kind.PARAM, param * unit.dtype.itemsize)]
        if not unit.trainable:
            return found
        grad = unit.shard_numel if Sharded.GRADIENT in self.zero.sharded else unit.padded_numel
        found.append(Buffer(f"{unit.name}/grad", Kind.GRAD, grad * self.reduce_dtype.itemsize))
        start, stop = self.owned_range(unit, index)
        if self.has_master(unit):
            found.append(Buffer(f"{unit.name}/master", Kind.OPTIM, 4 * (stop - start)))
        held = sum(piece.stop - piece.start for piece in unit.pieces(start, stop))  # padding has no moments
        moment_bytes = held * self.moment_dtype.itemsize
        found += [Buffer(f"{unit.name}/moment{number}", Kind.OPTIM, moment_bytes) for number in range(self.moments)]
        return found

    def gather_ring_bytes(self, units: Sequence[UnitLayout], prefetch: int) -> int:
        """Room for the other ranks' shards of units that are whole at a time.

        These are the ones in use, `prefetch` more, and all that are lasting.
        """
        foreign = {u: (u.padded_numel - u.shard_numel) * u.dtype.itemsize for u in units if self.frees(u)}
        passing = {unit: num_bytes for unit, num_bytes in foreign.items() if not unit.lasting}
        lasting = sum(foreign.values()) - sum(passing.values())
        ahead = prefetch * max(passing.values(), default=0)
        return min(_most_together(passing) + ahead, sum(passing.values())) + lasting

    def reduce_ring_bytes(self, units: Sequence[UnitLayout], arrival_shards: int, index: int = 0) -> int:
        """Room for reductions, of what is being filled and of one unit on its way: what leaves and what arrives.

        What leaves is the unit's whole gradient, which lives here only if gradients are sharded; what arrives is
        `arrival_shards` shards (one per peer where ranks exchange directly, one where the backend sums, whole units
        from all peers on a server). Lasting and persistent units fill up while others come and go. The update casts one
        unit's gradient to fp32 in the same room, or all units' if they are updated together, once all reductions are
        over.
        """
        leaving = Sharded.GRADIENT in self.zero.sharded
        passing: dict[UnitLayout, int] = {}
        lasting = cast = 0
        for unit in units:
            if unit.trainable and self.reduce_dtype != torch.float32:
                start, stop = self.owned_range(unit, index)
                cast = 4 * (stop - start) + cast if self.updates_together else max(cast, 4 * (stop - start))
            if unit.trainable and unit.num_shards > 1:
                passing[unit] = unit.padded_numel * leaving + unit.shard_numel * arrival_shards
                lasting += unit.padded_numel * leaving * (unit.lasting or unit.persistent)
        on_its_way = max(passing.values(), default=0)
        return max((_most_together(passing) + on_its_way + lasting) * self.reduce_dtype.itemsize, cast)


def _most_together(sizes: Mapping[UnitLayout, int]) -> int:
    """The largest sum of sizes of units that are in use together."""
    sums: Counter[str] = Counter()
    for unit, size in sizes.items():
        sums[unit.modules] += size
    return max(sums.values(), default=0)
