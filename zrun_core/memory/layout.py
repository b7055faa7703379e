"""The place of every parameter: flat units and their shards. Pure arithmetic.

    parameters of one unit, ordered by optimizer group              padding
    |---- w1 ----|---- w2 ----|-- b1 --|---------- w3 ----------|-----------|
    |<------------ shard of rank 0 ---->|<------------ shard of rank 1 ---->|

Borders of shards ignore those of parameters. It is one contract of three: the runtime allocates it
(`state_policy.py`), the planner sums it, and a checkpoint names its fragments by it.

Worked example: w1 [64, 32] and w2 [32, 64] in optimizer group 0, b1 [64] in group 1, fp32, 2 ranks.

    w1 2048 + w2 2048 + b1 64           numel 4160
    pages of 4096 B hold 1024           part_numel ceil(4160 / 2 / 1024) * 1024 = 3072
                                        padded_numel 6144, of which 1984 are padding
    shard 0, elements 0 to 3071         w1 all, w2 0 to 1023
    shard 1, elements 3072 to 6143      w2 1024 to 2047, b1 all, padding
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zrun_core.memory.tensors import TIED, TensorPart, contiguous_stride, full_part

PAGE_BYTES = 4096  # shards start on pages, so that a gathered unit can be assembled by moving pages

NO_PARTS: Mapping[str, TensorPart] = {}  # every parameter is a tensor of its own


@dataclass(frozen=True)
class ParamSlot:
    """One parameter's place in its unit.

    Attributes:
        stride: is kept, so that a channels_last weight stays one.
        group: of the optimizer.
        offset: in elements, from the unit's start.
        part: what the parameter is of a tensor of the model.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    group: int
    offset: int
    numel: int
    part: TensorPart

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The elements of one parameter that lie in a range of its unit.

    Attributes:
        index: of the parameter in its unit.
        start, stop: in elements, from the range's start.
    """

    slot: ParamSlot
    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class TensorRange:
    """Elements of a range of a unit that are a flat range of one tensor.

    Attributes:
        start, stop: in elements, from the start of the unit's range.
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

    Attributes:
        dtype: of computation: what the module sees.
        num_shards: ranks of the shard group.
        num_parts: equal parts that the unit is padded to, and that norms are taken over; a shard
            has one or more.
        keep_unsharded: never resharded, also at stage 3.
        keep_until_pass_ends: in use while other units come and go: tied to modules of theirs, or of
            a container itself.
        modules: those that the unit was cut from; units cut from the same ones are in use together.
        block: the repeated block that these lie in, or are.
        tile: of a tiled linear: never in use together with the other tiles, also in a block that is
            recomputed.
        around: of a tile: `modules` of the unit that is in use while the tile is; empty: of none.
        chunk: of a pipeline, in which it is used; passes through a chunk use its units only.
        groups: name of the groups that divide it and hold copies of its shards, where those are not
            the ones of the rank's other units: see `Mesh.own`.
        numel: of the parameters together.
        part_numel: of one part, padding included.
    """

    name: str
    slots: tuple[ParamSlot, ...]
    dtype: torch.dtype
    trainable: bool
    num_shards: int
    num_parts: int
    keep_unsharded: bool = False
    keep_until_pass_ends: bool = False
    modules: str = ""
    block: str = ""
    tile: bool = False
    around: str = ""
    chunk: int = 0
    groups: str = ""
    numel: int = field(init=False)
    part_numel: int = field(init=False)

    def __post_init__(self) -> None:
        numel = self.slots[-1].stop if self.slots else 0
        page_numel = PAGE_BYTES // self.dtype.itemsize
        num_pages = math.ceil(numel / self.num_parts / page_numel)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "part_numel", num_pages * page_numel)

    @property
    def padded_numel(self) -> int:
        return self.part_numel * self.num_parts

    @property
    def shard_numel(self) -> int:
        return self.padded_numel // self.num_shards

    def shard_range(self, index: int) -> tuple[int, int]:
        """Return first and last + 1 element of shard `index`."""
        return index * self.shard_numel, (index + 1) * self.shard_numel

    def part_range(self, index: int) -> tuple[int, int]:
        """Return first and last + 1 element of part `index`."""
        return index * self.part_numel, (index + 1) * self.part_numel

    def parts_of_shard(self, index: int) -> range:
        """Return the parts that shard `index` consists of."""
        parts_per_shard = self.num_parts // self.num_shards
        return range(index * parts_per_shard, (index + 1) * parts_per_shard)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the parameters, or parts of them, in elements [start, stop) of the unit, in order.

        In the example above, pieces(3072, 6144) are w2 at [0, 1024) and b1 at [1024, 1088).
        """
        for index, slot in enumerate(self.slots):
            low = max(start, slot.offset)
            high = min(stop, slot.stop)
            if low < high:
                yield Piece(slot, index, low - start, high - start)

    def tensor_ranges(self, start: int, stop: int) -> Iterator[TensorRange]:
        """Yield what elements [start, stop) of the unit are of tensors, in order."""
        for piece in self.pieces(start, stop):
            slot = piece.slot
            shift = slot.offset - start  # from the parameter's start to the range's
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
        """Return the axes of the mesh, beside data, along which all ranks hold the same unit."""
        return self.slots[0].part.replicated_over if self.slots else ()

    @property
    def partial_over(self) -> tuple[str, ...]:
        """Return those of these axes along which each rank has a part of the gradient."""
        return self.slots[0].part.partial_over if self.slots else ()

    @property
    def summed_over(self) -> tuple[str, ...]:
        """Return the axes of the mesh, beside data, over which a step sums its gradient."""
        tied = (TIED,) if TIED in self.replicated_over else ()
        return (*self.partial_over, *tied)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the stride that `tensor` keeps in a flat buffer.

    It is its own if it has no gaps (a transposed or channels_last weight), else the contiguous one.
    """
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    from_fastest = sorted((stride, size) for stride, size in dims if size != 1)
    expected = 1
    for stride, size in from_fastest:
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
    tile: bool = False,
    around: str = "",
    chunk: int = 0,
    groups: str = "",
    table: Mapping[str, TensorPart] = NO_PARTS,
) -> UnitLayout:
    """Place parameters in one unit. Each optimizer group becomes a contiguous range.

    Args:
        params: triples of (name, tensor, optimizer group); only shape and stride are read, so the
            tensors may be on the meta device.
        num_shards: ranks that divide the unit between them.
        num_parts: that the unit is padded to, a multiple of `num_shards`; None: as many as shards.
        keep_unsharded: see `UnitLayout`, as for the next three.
        keep_until_pass_ends: tied to modules of other units.
        modules: that the unit was cut from; empty: `name`.
        tile, around, chunk, groups: see `UnitLayout`.
        table: by parameter name, what it is of a tensor; those without an entry are all of one.

    Raises:
        ValueError: a parameter has not the shape that the table says.
    """
    slots: list[ParamSlot] = []
    offset = 0
    for param_name, tensor, group in sorted(params, key=lambda item: item[2]):
        shape = tuple(tensor.shape)
        part = table.get(param_name)
        if part is None:
            part = full_part(param_name, shape, dense_stride(tensor))
        if part.local_shape != shape:
            has = f"its part of {part.tensor} {list(part.local_shape)}"
            raise ValueError(f"{param_name} is {list(shape)}, and {has}")
        numel = tensor.numel()
        slots.append(ParamSlot(param_name, shape, part.local_stride, group, offset, numel, part))
        offset += numel
    return UnitLayout(
        name=name,
        slots=tuple(slots),
        dtype=dtype,
        trainable=trainable,
        num_shards=num_shards,
        num_parts=num_parts or num_shards,
        keep_unsharded=keep_unsharded,
        keep_until_pass_ends=keep_until_pass_ends,
        modules=modules or name,
        block=block,
        tile=tile,
        around=around,
        chunk=chunk,
        groups=groups,
    )


def whole_pages(num_bytes: int) -> int:
    """Return `num_bytes`, rounded up to pages."""
    return math.ceil(num_bytes / PAGE_BYTES) * PAGE_BYTES
