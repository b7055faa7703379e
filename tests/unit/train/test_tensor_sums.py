"""The sums that tell two tensors apart, of all of a tensor and of its parts."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zrun_core.memory.layout import TensorRange
from zrun_core.memory.tensors import TensorPart
from zrun_core.train import gradient_check
from zrun_core.train.gradient_check import PartialGradients, noting_gradients
from zrun_core.train.tensor_sums import distance, sums_of, sums_of_part

ROWS, COLUMNS = 96, 128
# Columns at which a matrix is cut: between rows of 64 elements, and within them.
CUTS = [(64,), (50,), (0,), (31, 64, 65)]


def by_hand(values: torch.Tensor, places: range) -> list[float]:
    """Return the sums as the module defines them, one element after the other."""
    sums: list[list[float]] = [[] for _ in range(64)]
    for value, place in zip(values.tolist(), places, strict=True):
        sums[place % 64].append(math.cos(0.7 * place) * value)
    return [math.fsum(each) for each in sums]


@pytest.mark.parametrize("first", [0, 64, 1, 63, 1_000_003])
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000])
def test_sums_are_of_each_element_by_its_place(first: int, numel: int) -> None:
    values = torch.randn(numel, dtype=torch.float64)
    expected = by_hand(values, range(first, first + numel))
    places = torch.arange(first, first + numel)
    for found in (sums_of(values, first), sums_of_part(values, places)):
        assert found.tolist() == pytest.approx(expected, abs=1e-7)


def test_elements_in_another_order_are_seen() -> None:
    values = torch.randn(4096, dtype=torch.float64)
    for other in (values.flip(0), values.roll(64), values.view(64, 64).T.flatten()):
        apart = distance(sums_of(values).tolist(), sums_of(other).tolist())
        assert apart > 0.5 * float((values - other).norm())


def ranges_of(part: Any, columns: range) -> list[TensorRange]:
    """Return what a rank has of a matrix, whose columns lie behind each other in a flat unit."""
    slot: Any = SimpleNamespace(part=part)
    size = len(columns)
    firsts = [row * COLUMNS + columns.start for row in range(ROWS)]
    return [TensorRange(slot, at * size, (at + 1) * size, first) for at, first in enumerate(firsts)]


def row_of(grad: torch.Tensor) -> torch.Tensor:
    """Return what `noting_gradients` notes of a gradient."""
    linear = nn.Linear(*reversed(grad.shape), bias=False)
    with noting_gradients(linear) as rows:
        (linear.weight * grad).sum().backward()
    return rows["weight"]


def partial_row(pieces: list[tuple[list[TensorRange], torch.Tensor]]) -> torch.Tensor:
    """Return what ranks see of one gradient together; pieces are their ranges and flat units."""
    row = torch.zeros(65, dtype=torch.float64)
    count = 0
    for ranges, grad in pieces:
        partial = PartialGradients([], ["weight"], "cpu")
        partial._add_ranges(0, ranges, grad)
        row += partial.rows[0]
        count += int(partial.counts[0])
    assert count == ROWS * COLUMNS
    return row


@pytest.mark.parametrize("at_once", [1 << 17, 1 << 9])
@pytest.mark.parametrize("cuts", CUTS)
def test_columns_of_a_gradient_add_up(
    monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...], at_once: int
) -> None:
    monkeypatch.setattr(gradient_check, "_AT_ONCE", at_once)
    grad = torch.randn(ROWS, COLUMNS)
    shape, stride = (ROWS, COLUMNS), (COLUMNS, 1)
    part = TensorPart("weight", shape, stride, shape, stride, ())
    edges = [0, *cuts, COLUMNS]
    ranges = [range(low, high) for low, high in pairwise(edges) if low < high]
    pieces = [(ranges_of(part, each), grad[:, each.start : each.stop].flatten()) for each in ranges]
    expected = row_of(grad)
    assert torch.allclose(partial_row(pieces), expected, rtol=1e-6, atol=1e-6)
    assert expected[1:].tolist() == pytest.approx(
        by_hand(grad.double().flatten(), range(grad.numel())), abs=1e-6
    )
    assert float(expected[0]) == pytest.approx(float(grad.double().square().sum()))


@pytest.mark.parametrize("middle", [6400, 6401])
def test_shards_of_a_gradient_add_up(middle: int) -> None:
    grad = torch.randn(ROWS, COLUMNS)
    shape, stride = (ROWS, COLUMNS), (COLUMNS, 1)
    slot: Any = SimpleNamespace(part=TensorPart("weight", shape, stride, shape, stride, ()))
    flat = grad.flatten()
    pieces = [
        ([TensorRange(slot, 0, middle, 0)], flat[:middle]),
        ([TensorRange(slot, 0, len(flat) - middle, middle)], flat[middle:]),
    ]
    assert torch.allclose(partial_row(pieces), row_of(grad), rtol=1e-6, atol=1e-6)


def test_a_gradient_in_another_memory_order_is_the_same() -> None:
    grad = torch.randn(ROWS, COLUMNS)
    shape, stride = (ROWS, COLUMNS), (1, ROWS)
    slot: Any = SimpleNamespace(part=TensorPart("weight", shape, stride, shape, stride, ()))
    pieces = [([TensorRange(slot, 0, grad.numel(), 0)], grad.T.flatten())]
    assert torch.allclose(partial_row(pieces), row_of(grad), rtol=1e-6, atol=1e-6)
