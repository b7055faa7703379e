"""Parameters as parts of the tensors of a model: flat ranges of them. Pure arithmetic.

A tensor has one memory order, and all count its elements in that order: ranks, files, other
layouts. The order is chosen so that a part is few ranges. Of a weight [4, 6], a rank may have:

    rows 0 and 1        0  1  2  3  4  5 |  6  7  8  9 10 11     row after row: one run
    columns 0 to 2      0  6 12 18 |  1  7 13 19 |  2  8 14 20   column after column: one run
    rows 0 and 2        0  1  2  3  4  5 | 12 13 14 15 16 17     two runs, as of fused projections

The parameter of a rank lies in the order of its tensor, without what the rank does not have. So
a weight that is divided by columns is stored column after column; what is computed with it has
the same bits, and its gradient comes in the same order.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

TENSOR = "tensor"  # axis of the mesh: ranks that have parts of the same layers
TIED = "tied"  # axis of the mesh: stages of a pipeline that have the same parameters

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]  # first and last + 1 index along each dimension


class ElementRun(NamedTuple):
    """Elements that lie together in a parameter, and in its tensor too.

    Attributes:
        local: the first one's place in the parameter, in memory order.
        start: the same one's place in the tensor, in memory order.
    """

    local: int
    start: int
    length: int


@dataclass(frozen=True)
class TensorPart:
    """The part of a tensor that a parameter is.

    Attributes:
        tensor: its name; several parameters of one rank may be parts of one tensor.
        shape, stride: of the tensor.
        local_shape, local_stride: of the parameter.
        runs: elements of the tensor, by place in the parameter; the rest of it is padding.
        replicated_over: axes of the mesh, beside data, along which all ranks hold this same part.
        partial_over: of these, axes along which each rank's gradient is a part of the whole one.
    """

    tensor: str
    shape: Shape
    stride: Shape
    local_shape: Shape
    local_stride: Shape
    runs: tuple[ElementRun, ...]
    replicated_over: tuple[str, ...] = ()
    partial_over: tuple[str, ...] = ()

    def runs_in(self, start: int, stop: int) -> Iterator[ElementRun]:
        """Yield the runs, or parts of them, in elements [start, stop) of the parameter."""
        first = max(0, bisect_right(self.runs, start, key=lambda run: run.local) - 1)
        for run in self.runs[first:]:
            if run.local >= stop:
                return
            low = max(start, run.local)
            high = min(stop, run.local + run.length)
            if low < high:
                yield ElementRun(low, run.start + low - run.local, high - low)


def full_part(
    tensor: str, shape: Shape, stride: Shape, replicated_over: tuple[str, ...] = ()
) -> TensorPart:
    """Return the part that is all of a tensor.

    Args:
        stride: of it, without gaps.
        replicated_over: as of `TensorPart`.
    """
    numel = math.prod(shape)
    runs = (ElementRun(0, 0, numel),) if numel else ()
    return TensorPart(tensor, shape, stride, shape, stride, runs, replicated_over)


def sliced_part(
    tensor: str,
    shape: Shape,
    dim: int,
    ranges: Sequence[tuple[int, int]],
    *,
    size: int | None = None,
    stride: Shape | None = None,
    replicated_over: tuple[str, ...] = (),
) -> TensorPart:
    """Return the part that is one or more slices of a tensor along one dimension, back to back.

    That dimension is the slowest of the tensor's memory order, so that each slice is one run. All
    parts of a tensor are made along the same one. Of "w" [4, 6] along dimension 1 with ranges
    [(3, 6)]: stride (1, 4), local_shape (4, 3), and one run of 12 elements from 3 * 4.

    Args:
        ranges: first and last + 1 index of each slice along `dim`.
        size: of the parameter along `dim`, where it is larger than the slices: the rest is padding.
        stride: of the tensor before; its other dimensions keep their order. None: contiguous.
        replicated_over: as of `TensorPart`.

    Raises:
        ValueError: a slice lies outside of the tensor, or the parameter is too small for all.
    """
    taken = sum(stop - start for start, stop in ranges)
    if size is None:
        size = taken
    is_inside = all(0 <= start <= stop <= shape[dim] for start, stop in ranges)
    if taken > size or not is_inside:
        wanted = f"slices {list(ranges)} of dimension {dim} for {size}"
        raise ValueError(f"{tensor} {list(shape)} does not have {wanted}")
    old_order = memory_order(shape, stride or contiguous_stride(shape))
    order = (dim, *(other for other in old_order if other != dim))
    row_numel = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])  # of one index along `dim`
    runs: list[ElementRun] = []
    local = 0
    for start, stop in ranges:
        if start < stop and row_numel:
            length = (stop - start) * row_numel
            runs.append(ElementRun(local * row_numel, start * row_numel, length))
        local += stop - start
    local_shape = (*shape[:dim], size, *shape[dim + 1 :])
    return TensorPart(
        tensor,
        shape,
        _dense(shape, order),
        local_shape,
        _dense(local_shape, order),
        tuple(runs),
        replicated_over,
    )


# Memory orders


def contiguous_stride(shape: Shape) -> Shape:
    """Return the stride of a tensor whose last dimension is the fastest."""
    return _dense(shape, tuple(range(len(shape))))


def _dense(shape: Shape, order: Sequence[int]) -> Shape:
    """Return the stride, without gaps, of dimensions in this order, the slowest first."""
    stride = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(1, shape[dim])
    return tuple(stride)


def memory_order(shape: Shape, stride: Shape) -> tuple[int, ...]:
    """Return the dimensions of a tensor without gaps, from the slowest to the fastest."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], -shape[dim])))


class Extent(NamedTuple):
    """A flat range of a tensor, in one of its memory orders."""

    shape: Shape
    stride: Shape
    start: int
    stop: int

    @property
    def order(self) -> tuple[int, ...]:
        """Return the dimensions from the slowest to the fastest, without those of one element."""
        found = memory_order(self.shape, self.stride)
        return tuple(dim for dim in found if self.shape[dim] > 1)

    def boxes(self) -> Iterator[dict[int, tuple[int, int]]]:
        """Yield the range as boxes, few of them: by dimension, first and last + 1 index."""
        order = self.order
        for box in _boxes(self.start, self.stop, [self.shape[dim] for dim in order]):
            yield dict(zip(order, box, strict=True))


class Overlap(NamedTuple):
    """A box of elements that two ranges have in common, as a strided view of the memory of each.

    Attributes:
        sizes: of the view.
        offsets, strides: in each of the two, the former from the range's start.
    """

    sizes: Shape
    offsets: tuple[int, int]
    strides: tuple[Shape, Shape]


def overlaps(one: Extent, other: Extent) -> Iterator[Overlap]:
    """Yield the elements that two ranges of a tensor have in common.

    They are one range where both have one memory order, and few boxes where not. Elements [6, 18)
    of "w" [4, 6] row by row are rows 1 and 2; elements [12, 24) column by column are columns 3 to
    5. In common they have a box of 2 x 3, with strides (6, 1) in the one and (1, 4) in the other.

    Args:
        one: a range in the tensor's memory order of one layout.
        other: a range in that of another one.
    """
    if one.stride == other.stride or one.order == other.order:
        start = max(one.start, other.start)
        stop = min(one.stop, other.stop)
        if start < stop:
            yield Overlap((stop - start,), (start - one.start, start - other.start), ((1,), (1,)))
        return
    dims = one.order
    one_strides = tuple(one.stride[dim] for dim in dims)
    other_strides = tuple(other.stride[dim] for dim in dims)
    other_boxes = list(other.boxes())
    for box in one.boxes():
        for other_box in other_boxes:
            lows = [max(box[dim][0], other_box[dim][0]) for dim in dims]
            highs = [min(box[dim][1], other_box[dim][1]) for dim in dims]
            sizes = [high - low for low, high in zip(lows, highs, strict=True)]
            if min(sizes) > 0:
                first = sum(map(mul, lows, one_strides)) - one.start
                second = sum(map(mul, lows, other_strides)) - other.start
                yield Overlap(tuple(sizes), (first, second), (one_strides, other_strides))


def _boxes(start: int, stop: int, sizes: Sequence[int]) -> Iterator[Box]:
    """Yield elements [start, stop) of an array of these sizes as boxes, in memory order.

    Elements [4, 15) of [3, 6] are the end of row 0, all of row 1, and the beginning of row 2:

        .  .  .  .  4  5        rows [0, 1), columns [4, 6)
        6  7  8  9 10 11        rows [1, 2), columns [0, 6)
       12 13 14  .  .  .        rows [2, 3), columns [0, 3)
    """
    if not sizes:
        if start < stop:
            yield ()
        return
    inner = sizes[1:]
    row_numel = math.prod(inner)
    first, after_first = divmod(start, row_numel)
    last, before_last = divmod(stop, row_numel)
    if first == last:
        yield from (((first, first + 1), *box) for box in _boxes(after_first, before_last, inner))
        return
    if after_first:
        yield from (((first, first + 1), *box) for box in _boxes(after_first, row_numel, inner))
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in inner))
    yield from (((last, last + 1), *box) for box in _boxes(0, before_last, inner))
