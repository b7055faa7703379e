"""Where every parameter lies: flat units, their shards and the buffers that follow from them. Pure arithmetic.

    parameters of one unit, ordered by optimizer group        padding
    |--- w1 ---|--- w2 ---|-- b1 --|-------- w3 --------|-----|
    |<------ shard of rank 0 ------>|<------ shard of rank 1 ------>|      shard borders ignore parameter borders

The runtime allocates what `buffers` lists, the planner sums it, and a checkpoint names its fragments by it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from zrun_core.memory.buffers import ON_DEVICE, Buffer, Kind, Placement, Tier
from zrun_core.memory.tensors import TensorPart, contiguous_stride, full_part

PAGE_BYTES = 4096  # shards start on pages, so that a gathered unit can be assembled by moving pages
STAGING_SLOTS = (
    2  # of what goes up to the device, or down from it: one is filled while the other is on its way
)
DISK_SLOTS = 3  # of host memory: one is read into, one is updated, one is written from


@dataclass(frozen=True)
class ZeroPolicy:
    """What a ZeRO stage gives up when (Rajbhandari et al. 2020, section 5).

    Two questions tell the stages apart, and they are asked of this object only: reduce now? free
    after use? The third, whether the states are divided at all, is answered by the shard group,
    which is a single rank at stage 0.
    """

    stage: int

    @property
    def divides(self) -> bool:
        """Whether the shard group may have more than one rank."""
        return self.stage > 0

    def reduce_now(self, boundary: bool) -> bool:
        """Whether a unit's gradient is reduced after this micro-batch, or kept whole until the last one."""
        return boundary or self.stage >= 2

    @property
    def reshard_after_use(self) -> bool:
        """Whether a unit's whole parameters are given up once its forward or backward is over."""
        return self.stage >= 3

    def num_parts(self, mesh_info: MeshInfo) -> int:
        """Return the number of equal parts that units are padded to, and that norms are taken over.

        Where nothing is divided they are those of a division over all ranks: so stages agree in the
        bits of their norms.
        """
        return (
            mesh_info.shard_size if self.divides else mesh_info.shard_size * mesh_info.num_replicas
        )


NOWHERE_ELSE: Mapping[str, Placement] = {}  # all units are on the device


WHOLE: Mapping[str, TensorPart] = {}  # every parameter is a tensor of its own


@dataclass(frozen=True)
class ParamSlot:
    """One parameter's place in its unit. `stride` is kept, so that a channels_last weight stays one."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    group: int  # optimizer group
    offset: int  # in elements, from the unit's start
    numel: int
    part: TensorPart  # what it is of a tensor of the model

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
class TensorRange:
    """Elements of a range of a unit that are a flat range of one tensor.

    Attributes:
        start, stop: from the start of the unit's range.
        first: place of the first element in the tensor, in its memory order.
    """

    slot: ParamSlot
    start: int
    stop: int
    first: int

    @property
    def part(self) -> TensorPart:
        return self.slot.part


@dataclass(frozen=True)
class UnitLayout:
    """A flat unit: parameters back to back, padded to equal page-aligned shards.

    They are of one dtype and `requires_grad`, and the same ranks hold equal copies of them.
    """

    name: str
    slots: tuple[ParamSlot, ...]
    dtype: torch.dtype  # compute dtype: what the module sees
    trainable: bool
    num_shards: int  # ranks of the shard group
    num_parts: int  # that it is padded to, and that norms are taken over; a shard has one or more
    keep_unsharded: bool = False  # also at stage 3: never resharded
    # In use while other units come and go: tied to modules of theirs, or of a container itself.
    keep_until_pass_ends: bool = False
    modules: str = (
        ""  # those that the unit was cut from; units cut from the same ones are in use together
    )
    block: str = ""  # the repeated block that these lie in, or are
    numel: int = field(init=False)
    part_numel: int = field(init=False)

    def __post_init__(self) -> None:
        numel = self.slots[-1].stop if self.slots else 0
        align = PAGE_BYTES // self.dtype.itemsize
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "part_numel", math.ceil(numel / self.num_parts / align) * align)

    @property
    def padded_numel(self) -> int:
        return self.part_numel * self.num_parts

    @property
    def shard_numel(self) -> int:
        return self.padded_numel // self.num_shards

    def shard_range(self, index: int) -> tuple[int, int]:
        """First and last + 1 element of shard `index`."""
        return index * self.shard_numel, (index + 1) * self.shard_numel

    def part_range(self, index: int) -> tuple[int, int]:
        """First and last + 1 element of part `index`."""
        return index * self.part_numel, (index + 1) * self.part_numel

    def parts_of_shard(self, index: int) -> range:
        """The parts that shard `index` consists of."""
        each = self.num_parts // self.num_shards
        return range(index * each, (index + 1) * each)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The parameters, or parts of parameters, in elements [start, stop) of the unit, in order."""
        for number, slot in enumerate(self.slots):
            low, high = max(start, slot.offset), min(stop, slot.stop)
            if low < high:
                yield Piece(slot, number, low - start, high - start)

    def tensor_ranges(self, start: int, stop: int) -> Iterator[TensorRange]:
        """Yield what elements [start, stop) of the unit are of tensors, in order."""
        for piece in self.pieces(start, stop):
            slot = piece.slot
            shift = slot.offset - start
            for run in slot.part.runs_in(piece.start - shift, piece.stop - shift):
                place = run.local + shift
                yield TensorRange(slot, place, place + run.length, run.start)

    def padding(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of elements [start, stop) that are of no tensor, from `start` on."""
        end = 0
        for each in self.tensor_ranges(start, stop):
            if end < each.start:
                yield end, each.start
            end = each.stop
        if end < stop - start:
            yield end, stop - start

    @property
    def replicated_over(self) -> tuple[str, ...]:
        """Axes of the mesh, beside data, along which all ranks hold the same unit."""
        return self.slots[0].part.replicated_over if self.slots else ()


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The stride that `tensor` keeps in a flat buffer: its own if it is dense, else the contiguous one."""
    size_of_stride = sorted(
        (s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1
    )
    expected = 1
    for stride, size in size_of_stride:
        if stride != expected:
            return contiguous_stride(tuple(tensor.shape))
        expected *= size
    return tensor.stride()


def lay_out(
    name: str,
    params: Sequence[tuple[str, torch.Tensor, int]],
    *,
    dtype: torch.dtype,
    trainable: bool,
    num_shards: int,
    num_parts: int | None = None,
    keep_unsharded: bool = False,
    keep_until_pass_ends: bool = False,
    modules: str = "",
    block: str = "",
    table: Mapping[str, TensorPart] = WHOLE,
) -> UnitLayout:
    """Place parameters in one unit. Groups become contiguous ranges.

    Args:
        params: triples of (name, tensor, optimizer group).
        num_parts: that the unit is padded to; None: as many as shards.
        table: by parameter name, what it is of a tensor; those without an entry are whole.

    Raises:
        ValueError: a parameter has not the size that the table says.
    """
    offset, slots = 0, []
    for param_name, tensor, group in sorted(params, key=lambda item: item[2]):
        shape, numel = tuple(tensor.shape), tensor.numel()
        part = table.get(param_name) or full_part(param_name, shape, dense_stride(tensor))
        if part.local_shape != shape:
            has = f"its part of {part.tensor} {list(part.local_shape)}"
            raise ValueError(f"{param_name} is {list(shape)}, and {has}")
        slots.append(ParamSlot(param_name, shape, part.local_stride, group, offset, numel, part))
        offset += numel
    return UnitLayout(
        name,
        tuple(slots),
        dtype,
        trainable,
        num_shards,
        num_parts or num_shards,
        keep_unsharded,
        keep_until_pass_ends,
        modules or name,
        block,
    )


@dataclass(frozen=True)
class MeshInfo:
    """A data-parallel rank's place among the others.

    Attributes:
        shard_size: ranks that divide the states between them.
        shard_index: this rank's place among them.
        num_replicas: groups like that, with equal shards.
        replica_index: which of them is this rank's.
        direct_up_to: up to so many ranks exchange pairwise, so that the parts of all peers arrive apart; more, or ranks
            whose backend sums on the way, get one part.
    """

    shard_size: int = 1
    shard_index: int = 0
    num_replicas: int = 1
    replica_index: int = 0
    direct_up_to: int = 0

    def num_recv_parts(self, size: int) -> int:
        """Parts that arrive where `size` ranks sum something."""
        if size == 1:
            return 0
        return size - 1 if size <= self.direct_up_to else 1


@dataclass(frozen=True)
class Ownership:
    """Which elements of a unit each data-parallel rank updates: those of its shard.

    So do the ranks of the other copies, with the same result.
    """

    def updated_range(self, unit: UnitLayout, mesh_info: MeshInfo) -> tuple[int, int]:
        """Return the elements that this rank updates."""
        return unit.shard_range(mesh_info.shard_index)

    def updated_replicated_over(self, unit: UnitLayout) -> tuple[str, ...]:
        """Return the data-parallel axes of the mesh along which ranks keep the same elements."""
        return ("replicate",)

    def counted_parts(self, unit: UnitLayout, mesh_info: MeshInfo) -> range:
        """Return the parts that this rank counts in norms: each part is counted by one rank.

        They are the same parts at every stage, so that sums have the same bits.
        """
        return unit.parts_of_shard(mesh_info.shard_index)[
            mesh_info.replica_index :: mesh_info.num_replicas
        ]

    def recv_numel(self, unit: UnitLayout, mesh_info: MeshInfo) -> int:
        """Return the elements of scratch that a reduction needs for what arrives.

        What comes from the copies takes the place of what came from the shard group.
        """
        of_shards = unit.shard_numel * mesh_info.num_recv_parts(mesh_info.shard_size)
        slice_numel = math.ceil(unit.shard_numel / mesh_info.num_replicas)
        of_replicas = slice_numel * mesh_info.num_recv_parts(mesh_info.num_replicas)
        return max(of_shards, of_replicas)

    def goes_stale(self, mesh_info: MeshInfo) -> bool:
        """Whether other ranks update what this one uses."""
        return mesh_info.shard_size > 1


@dataclass(frozen=True)
class StatePolicy:
    """Everything that decides how many bytes the states of a unit take on one rank."""

    zero: ZeroPolicy
    reduce_dtype: torch.dtype
    moments: int  # values that the optimizer keeps per parameter: 2 for Adam
    moment_dtype: torch.dtype = torch.float32
    updates_together: bool = (
        False  # all units propose an update before the first is applied: layer-wise optimizers
    )
    ownership: Ownership = Ownership()
    recomputes_blocks: bool = (
        False  # backward runs a repeated block again first: its units are in use together
    )

    def has_master(self, unit: UnitLayout, placement: Placement = ON_DEVICE) -> bool:
        """Whether the optimizer works on a copy: fp32 parameters are their own master, where they are on its tier."""
        return unit.trainable and (
            unit.dtype != torch.float32 or placement.param is not placement.optimizer
        )

    def reshard_after_use(self, unit: UnitLayout) -> bool:
        """Whether only a shard of the unit's parameters stays in memory between uses."""
        return self.zero.reshard_after_use and not unit.keep_unsharded

    def buffers(
        self,
        unit: UnitLayout,
        mesh_info: MeshInfo,
        placement: Placement = ON_DEVICE,
    ) -> list[Buffer]:
        """The permanent buffers of `unit` on one rank: parameters, gradients, optimizer.

        On the host, what the device copies from or to is pinned; the optimizer's states are not, because the update
        runs where they are. On disk each begins on a page.
        """
        found = self._states(unit, mesh_info, placement)
        if placement is ON_DEVICE:
            return found
        return [_at_home(buffer, placement.tier_of(buffer.kind)) for buffer in found]

    def _states(self, unit: UnitLayout, mesh_info: MeshInfo, placement: Placement) -> list[Buffer]:
        param = unit.shard_numel if self.reshard_after_use(unit) else unit.padded_numel
        found = [Buffer(f"{unit.name}/param", Kind.PARAM, param * unit.dtype.itemsize)]
        if not unit.trainable:
            return found
        scatters_each = self.zero.reduce_now(boundary=False)
        grad = unit.shard_numel if scatters_each else unit.padded_numel
        found.append(
            Buffer(f"{unit.name}/grad", Kind.GRAD, whole_pages(grad * self.reduce_dtype.itemsize))
        )
        start, stop = self.ownership.updated_range(unit, mesh_info)
        if self.has_master(unit, placement):
            found.append(Buffer(f"{unit.name}/master", Kind.OPTIM, 4 * (stop - start)))
        held = sum(
            piece.stop - piece.start for piece in unit.pieces(start, stop)
        )  # padding has no moments
        moment_bytes = held * self.moment_dtype.itemsize
        found += [
            Buffer(f"{unit.name}/moment{number}", Kind.OPTIM, moment_bytes)
            for number in range(self.moments)
        ]
        return found

    def gather_ring_bytes(
        self,
        units: Sequence[UnitLayout],
        prefetch: int,
        *,
        moves_pages: bool = True,
        placements: Mapping[str, Placement] = NOWHERE_ELSE,
    ) -> int:
        """Room for units that are whole at a time: the ones in use, `prefetch` more, and all that
        are kept until their pass ends.

        Where pages are moved into a unit it takes those of the other ranks' shards only; elsewhere its own shard is a
        copy, and there must be room for all of it, as there must be where its home is on another tier.
        """
        passing: list[tuple[UnitLayout, int]] = []
        kept = 0
        for unit in units:
            if placements.get(unit.name, ON_DEVICE).param is not Tier.DEVICE:
                room = unit.padded_numel
            elif self.reshard_after_use(unit) and unit.num_shards > 1:
                room = unit.padded_numel - moves_pages * unit.shard_numel
            else:
                continue
            if unit.keep_until_pass_ends:
                kept += room * unit.dtype.itemsize
            else:
                passing.append((unit, room * unit.dtype.itemsize))
        sizes = [size for _, size in passing]
        return (
            min(self._most_together(passing) + prefetch * max(sizes, default=0), sum(sizes)) + kept
        )

    def reduce_ring_bytes(
        self,
        units: Sequence[UnitLayout],
        mesh_info: MeshInfo,
        *,
        placements: Mapping[str, Placement] = NOWHERE_ELSE,
    ) -> int:
        """Room for reductions, of what is being filled and of one unit on its way: what leaves and what arrives.

        What leaves is the unit's whole gradient, which lives here only if gradients are sharded, or have their home on
        another tier. Units that are kept unsharded fill up while others come and go. Once all reductions are over, the
        update casts one unit's gradient to fp32 in the same room, or all units' if they are updated
        together.
        """
        passing: list[tuple[UnitLayout, int]] = []
        kept = cast = alone = 0
        for unit in units:
            if not unit.trainable:
                continue
            placement = placements.get(unit.name, ON_DEVICE)
            away = placement.grad is not Tier.DEVICE
            leaving = away or self.zero.reduce_now(boundary=False)
            if self.reduce_dtype != torch.float32 and placement.optimizer is Tier.DEVICE:
                start, stop = self.ownership.updated_range(unit, mesh_info)
                cast = (
                    4 * (stop - start) + cast
                    if self.updates_together
                    else max(cast, 4 * (stop - start))
                )
            arriving = self.ownership.recv_numel(unit, mesh_info)
            if unit.num_parts > 1 or away:
                passing.append((unit, unit.padded_numel * leaving + arriving))
                if unit.keep_until_pass_ends or unit.keep_unsharded:
                    kept += unit.padded_numel * leaving
            else:
                alone = max(alone, arriving)  # copies of what nobody divides: one unit at a time
        on_its_way = max((size for _, size in passing), default=0)
        reduced = max(self._most_together(passing) + on_its_way + kept, alone)
        return whole_pages(max(reduced * self.reduce_dtype.itemsize, cast))

    def _most_together(self, sizes: Iterable[tuple[UnitLayout, int]]) -> int:
        """The largest sum of sizes of units that are in use together."""
        sums: Counter[str] = Counter()
        for unit, size in sizes:
            sums[unit.block if self.recomputes_blocks and unit.block else unit.modules] += size
        return max(sums.values(), default=0)

    def rank_buffers(
        self,
        units: Sequence[UnitLayout],
        mesh_info: MeshInfo,
        *,
        prefetch: int,
        moves_pages: bool,
        placements: Mapping[str, Placement] = NOWHERE_ELSE,
    ) -> list[Buffer]:
        """Everything that a rank allocates for `units`, once, before the first step. Moments come with the first.

        Args:
            prefetch: units gathered ahead of their use.
            moves_pages: whether a unit is made whole by moving pages into it.
            placements: by unit name, of the units whose states do not all have their home on the device.
        """
        found = [
            self.buffers(unit, mesh_info, placements.get(unit.name, ON_DEVICE)) for unit in units
        ]
        gathered = self.gather_ring_bytes(
            units, prefetch, moves_pages=moves_pages, placements=placements
        )
        reduced = self.reduce_ring_bytes(units, mesh_info, placements=placements)
        return [
            *(buffer for buffers in found for buffer in buffers),
            Buffer("gather ring", Kind.RING, gathered),
            Buffer("reduce ring", Kind.RING, reduced),
            *self._staging(units, mesh_info, placements),
            *_disk_slots(found),
        ]

    def _staging(
        self, units: Sequence[UnitLayout], mesh_info: MeshInfo, placements: Mapping[str, Placement]
    ) -> list[Buffer]:
        """Pinned slots through which gradients come down to an update on the host, and parameters go up from it."""
        down = up = 0
        for unit in units:
            placement = placements.get(unit.name, ON_DEVICE)
            if unit.trainable and placement.optimizer is not Tier.DEVICE:
                start, stop = self.ownership.updated_range(unit, mesh_info)
                if placement.grad is Tier.DEVICE:
                    down = max(down, (stop - start) * self.reduce_dtype.itemsize)
                if placement.param is Tier.DEVICE:
                    up = max(up, (stop - start) * unit.dtype.itemsize)
        sizes = {"gradient staging": down, "parameter staging": up}
        return [
            Buffer(name, Kind.RING, STAGING_SLOTS * size, Tier.HOST, pinned=True)
            for name, size in sizes.items()
            if size
        ]


def _at_home(buffer: Buffer, tier: Tier) -> Buffer:
    """`buffer` where it belongs."""
    if tier is Tier.DEVICE:
        return buffer
    if tier is Tier.HOST:
        return replace(buffer, tier=tier, pinned=buffer.kind is not Kind.OPTIM)
    return replace(buffer, tier=tier, num_bytes=whole_pages(buffer.num_bytes))


def _disk_slots(by_unit: Iterable[Sequence[Buffer]]) -> list[Buffer]:
    """Page-aligned host memory through which states on disk pass, a unit's states of one kind at a time."""
    largest: dict[Kind, int] = {}
    for buffers in by_unit:
        for kind in (Kind.PARAM, Kind.GRAD, Kind.OPTIM):
            size = sum(b.num_bytes for b in buffers if b.kind is kind and b.tier is Tier.DISK)
            largest[kind] = max(largest.get(kind, 0), size)
    return [
        Buffer(f"disk slots of {kind.value}", Kind.RING, DISK_SLOTS * size, Tier.HOST, pinned=True)
        for kind, size in largest.items()
        if size
    ]


def whole_pages(num_bytes: int) -> int:
    """`num_bytes`, rounded up to pages."""
    return math.ceil(num_bytes / PAGE_BYTES) * PAGE_BYTES


def module_buffers(module: torch.nn.Module) -> list[Buffer]:
    """The buffers that `module`, on any device, keeps of its own: each once, whatever names it has."""
    return [Buffer(name, Kind.BUFFER, buffer.nbytes) for name, buffer in module.named_buffers()]
