"""Which elements of a tensor a parameter has: against numpy, which cuts real arrays."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zrun_core.memory.layout import lay_out
from zrun_core.memory.tensors import (
    ElementRun,
    Extent,
    TensorPart,
    contiguous_stride,
    full_part,
    memory_order,
    overlaps,
    sliced_part,
)

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def dense(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and stride of a tensor without gaps."""
    shape = draw(SHAPES)
    return shape, stride_of(shape, draw(st.permutations(range(len(shape)))))


def stride_of(shape: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    """By numpy, from an array that is made with its dimensions in this order."""
    made = np.empty([shape[dim] for dim in order], dtype=np.int8)
    return made.transpose([order.index(dim) for dim in range(len(shape))]).strides


def in_memory(array: np.ndarray, stride: tuple[int, ...]) -> np.ndarray:
    """The elements in the order in which they lie under `stride`."""
    flat = np.empty(array.size, dtype=array.dtype)
    view = np.lib.stride_tricks.as_strided(flat, array.shape, [s * array.itemsize for s in stride])
    view[...] = array
    return flat


@st.composite
def divided(draw: st.DrawFn) -> tuple[list[TensorPart], list[np.ndarray]]:
    """All parts of one tensor over some ranks, and what numpy cuts for each of its elements.

    Each rank has a slice of each of `folds` stretches of a dimension, and may have room to spare.
    """
    shape, stride = draw(dense())
    dim = draw(st.integers(0, len(shape) - 1))
    ranks, folds = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = (*shape[:dim], shape[dim] * folds, *shape[dim + 1 :])
    stride = stride_of(shape, list(memory_order(shape, stride)))
    numbered = np.arange(1, math.prod(shape) + 1).reshape(shape)
    fold = shape[dim] // folds
    borders = sorted(draw(st.lists(st.integers(0, fold), min_size=ranks - 1, max_size=ranks - 1)))
    parts, oracle = [], []
    for low, high in zip([0, *borders], [*borders, fold], strict=True):
        ranges = [(k * fold + low, k * fold + high) for k in range(folds)]
        size = folds * (high - low) + draw(st.integers(0, 2))
        parts.append(sliced_part("w", shape, dim, ranges, size=size, stride=stride))
        taken = [np.take(numbered, range(*each), axis=dim) for each in ranges]
        missing = list(shape)
        missing[dim] = size - folds * (high - low)
        oracle.append(np.concatenate([*taken, np.zeros(missing, dtype=int)], axis=dim))
    return parts, oracle


@given(divided())
def test_the_runs_of_all_parts_tile_the_tensor_once_and_are_what_numpy_cuts(case):
    parts, oracle = case
    shape, stride = parts[0].shape, parts[0].stride
    assert all((part.shape, part.stride) == (shape, stride) for part in parts)
    tensor = in_memory(np.arange(1, math.prod(shape) + 1).reshape(shape), stride)
    times = np.zeros(tensor.size, dtype=int)
    for part, own in zip(parts, oracle, strict=True):
        assert part.local_shape == own.shape
        local = np.zeros(own.size, dtype=int)
        for place, start, length in part.runs:
            local[place : place + length] = tensor[start : start + length]
            times[start : start + length] += 1
        np.testing.assert_array_equal(local, in_memory(own, part.local_stride))
    assert (times == 1).all()


@given(divided(), st.data())
def test_runs_of_a_range_are_those_of_its_elements(case, data):
    part = data.draw(st.sampled_from(case[0]))
    numel = math.prod(part.local_shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, numel), st.integers(0, numel))))
    place_of = {run.local + k: run.start + k for run in part.runs for k in range(run.length)}
    runs = list(part.runs_in(start, stop))
    found = {run.local + k: run.start + k for run in runs for k in range(run.length)}
    assert found == {local: place for local, place in place_of.items() if start <= local < stop}
    assert all(run.length for run in runs)


def test_slices_of_the_first_dimension_lie_as_they_did_and_of_the_second_turned():
    rows = sliced_part("w", (4, 6), 0, [(2, 4)])
    assert (rows.stride, rows.local_stride, rows.runs) == ((6, 1), (6, 1), (ElementRun(0, 12, 12),))
    columns = sliced_part("w", (4, 6), 1, [(3, 6)])
    assert (columns.stride, columns.local_stride) == ((1, 4), (1, 4))
    assert columns.runs == (ElementRun(0, 12, 12),)
    thirds = sliced_part("qkv", (6, 2), 0, [(1, 2), (3, 4), (5, 6)])
    assert thirds.runs == (ElementRun(0, 2, 2), ElementRun(2, 6, 2), ElementRun(4, 10, 2))
    vocabulary = sliced_part("embed", (5, 2), 0, [(3, 5)], size=3)
    assert (vocabulary.local_shape, vocabulary.runs) == ((3, 2), (ElementRun(0, 6, 4),))
    nhwc = sliced_part("conv", (8, 4, 3, 3), 0, [(0, 4)], stride=(36, 1, 12, 4))
    assert (nhwc.stride, nhwc.local_stride) == ((36, 1, 12, 4), (36, 1, 12, 4))


@pytest.mark.parametrize(("ranges", "size"), [([(0, 5)], None), ([(3, 2)], None), ([(0, 3)], 2)])
def test_slices_that_cannot_be_are_refused(ranges, size):
    with pytest.raises(ValueError, match="does not have slices"):
        sliced_part("w", (4, 6), 0, ranges, size=size)


@given(dense(), st.data())
def test_what_two_ranges_share_is_what_numpy_finds_in_both(case, data):
    shape, stride = case
    other = stride_of(shape, data.draw(st.permutations(range(len(shape)))))
    numel = math.prod(shape)
    numbers = np.arange(numel).reshape(shape)
    borders = st.tuples(st.integers(0, numel), st.integers(0, numel)).map(sorted)
    ranges = [data.draw(borders), data.draw(borders)]
    extents = [Extent(shape, s, *r) for s, r in zip((stride, other), ranges, strict=True)]
    memory = [in_memory(numbers, extent.stride)[extent.start : extent.stop] for extent in extents]
    found: list[int] = []
    for box in overlaps(*extents):
        views = [
            torch.from_numpy(flat).as_strided(box.sizes, box.strides[side], box.offsets[side])
            for side, flat in enumerate(memory)
        ]
        assert torch.equal(*views)
        found += views[0].flatten().tolist()
    assert sorted(found) == sorted(set(memory[0]) & set(memory[1]))
    assert len(list(overlaps(*extents))) <= (2 * len(shape) - 1) ** 2


def test_what_two_ranges_share_is_few_views_however_large_they_are():
    turned = Extent((4096, 4096), (1, 4096), 5000, 9_000_000)
    assert len(list(overlaps(Extent((4096, 4096), (4096, 1), 77, 12_000_000), turned))) <= 9
    alike = Extent((4096, 1, 4096), (4096, 7, 1), 70, 80)
    other = Extent((4096, 1, 4096), (4096, 4096, 1), 77, 90)
    assert list(overlaps(other, alike)) == [((3,), (0, 7), ((1,), (1,)))]


def unit_of(parts: dict[str, TensorPart], num_shards: int = 1):
    params = [(name, torch.empty(part.local_shape), 0) for name, part in parts.items()]
    shards = {"num_shards": num_shards}
    return lay_out("u", params, dtype=torch.float32, trainable=True, table=parts, **shards)


@given(st.lists(divided(), min_size=1, max_size=3), st.integers(1, 5))
def test_ranges_of_a_unit_are_ranges_of_its_tensors(cases, num_shards):
    """Each tensor has all its parts in one unit here, as a weight in tiles has."""
    parts = {
        f"t{number}.{k}": replace(part, tensor=f"t{number}")
        for number, (found, _) in enumerate(cases)
        for k, part in enumerate(found)
    }
    layout = unit_of(parts, num_shards)
    times = {part.tensor: np.zeros(math.prod(part.shape), dtype=int) for part in parts.values()}
    for shard in range(num_shards):
        low, high = layout.shard_range(shard)
        last = 0
        for each in layout.tensor_ranges(low, high):
            assert last <= each.start < each.stop <= high - low
            last = each.stop
            times[each.part.tensor][each.first : each.first + each.stop - each.start] += 1
    assert all((count == 1).all() for count in times.values())


def test_padding_of_a_unit_is_what_no_tensor_has():
    vocabulary = sliced_part("embed", (5, 2), 0, [(3, 5)], size=3)
    layout = unit_of({"embed": vocabulary, "w": full_part("w", (3,), (1,))})
    found = [(each.start, each.stop, each.first) for each in layout.tensor_ranges(0, 9)]
    assert found == [(0, 4, 6), (6, 9, 0)]
    assert list(layout.padding(0, layout.padded_numel)) == [(4, 6), (9, layout.padded_numel)]
    assert list(layout.padding(5, 9)) == [(0, 1)]


def test_a_unit_refuses_a_part_of_another_size_and_parameters_keep_the_order_of_their_part():
    table = {"w": sliced_part("w", (4, 6), 1, [(0, 3)])}
    params = [("w", torch.empty(4, 6), 0)]
    options = {"dtype": torch.float32, "trainable": True, "num_shards": 1}
    with pytest.raises(ValueError, match=r"w is \[4, 6\], and its part of w \[4, 3\]"):
        lay_out("u", params, **options, table=table)
    assert unit_of(table).slots[0].stride == (1, 4)
    plain = unit_of({"w": full_part("w", (4, 6), contiguous_stride((4, 6)))})
    assert plain.slots == lay_out("u", params, **options).slots
