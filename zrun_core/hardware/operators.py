"""What operators take on cores that were measured: seconds by name, format and size. Needs no torch.

A CPU has no one rate: a product in bf16 of thin matrices, a dropout's random numbers and a sum over rows differ by a
factor of fifty per byte, and small ones by what it takes to call them. So a table says for each operator what it took
at a few sizes (`plan/measure/microbench.py` measures them), and what lies between is interpolated:
seconds along bytes, FLOP/s of products along the logarithms of their three sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = tuple[tuple[float, ...], ...]
USUAL = "add"  # stands for an operator that nobody has measured
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Operators:
    """Measured rows by "name dtype".

    Attributes:
        streams: (bytes read and written, seconds) of what passes over memory.
        flops: (size, FLOP/s) of attention by its length, of convolutions by the elements of their kernel.
        products: (m, n, k, FLOP/s) of matrix products [m, k] x [k, n], on a full grid of sizes.
    """

    streams: Mapping[str, Rows] = field(default_factory=dict)
    flops: Mapping[str, Rows] = field(default_factory=dict)
    products: Mapping[str, Rows] = field(default_factory=dict)

    def stream_seconds(self, name: str, dtype: str, num_bytes: Floats) -> Floats:
        """Seconds of an operator that passes over memory; of a usual one where this one was not measured."""
        rows = self._rows(self._streams, name.rstrip("_"), dtype)
        x, seconds = rows if rows is not None else self._streams[f"{USUAL} float32"]
        return np.where(
            num_bytes <= x[-1], np.interp(num_bytes, x, seconds), num_bytes * (seconds[-1] / x[-1])
        )

    def flop_rate(self, name: str, dtype: str, size: Floats) -> Floats | None:
        """FLOP/s of an operator that computes; None if it was not measured."""
        rows = self._rows(self._flops, name, dtype)
        return (
            None
            if rows is None
            else np.interp(np.log(np.maximum(size, 1.0)), np.log(rows[0]), rows[1])
        )

    def product_rate(self, name: str, dtype: str, m: Floats, n: Floats, k: Floats) -> Floats | None:
        """FLOP/s of matrix products; None if such were not measured."""
        grid = self._grids.get(f"{name} {dtype}")
        return None if grid is None else grid.at(m, n, k)

    @staticmethod
    def _rows(
        table: Mapping[str, tuple[Floats, Floats]], name: str, dtype: str
    ) -> tuple[Floats, Floats] | None:
        for each in (dtype, *DTYPES.values(), "int64", "bool"):
            if (rows := table.get(f"{name} {each}")) is not None:
                return rows
        return None

    @cached_property
    def _streams(self) -> dict[str, tuple[Floats, Floats]]:
        return {key: _columns(rows) for key, rows in self.streams.items()}

    @cached_property
    def _flops(self) -> dict[str, tuple[Floats, Floats]]:
        return {key: _columns(rows) for key, rows in self.flops.items()}

    @cached_property
    def _grids(self) -> dict[str, _Grid]:
        return {key: _Grid(rows) for key, rows in self.products.items()}


def _columns(rows: Sequence[Sequence[float]]) -> tuple[Floats, Floats]:
    """Sizes in ascending order, and what belongs to each."""
    x, y = np.array(sorted(map(tuple, rows)), dtype=np.float64).T
    return x, y


class _Grid:
    """FLOP/s at points of a grid, between which logarithms are linear; beyond it they stay as they are at its edge."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        points = np.array(rows, dtype=np.float64)
        self._axes = [np.unique(points[:, axis]) for axis in range(3)]
        self._rates = np.zeros([len(axis) for axis in self._axes])
        places = tuple(
            np.searchsorted(axis, points[:, number]) for number, axis in enumerate(self._axes)
        )
        self._rates[places] = np.log(points[:, 3])

    def at(self, *sizes: Floats) -> Floats:
        cells = []
        for axis, size in zip(self._axes, sizes, strict=True):
            logs, at = np.log(axis), np.log(np.clip(size, axis[0], axis[-1]))
            low = np.clip(np.searchsorted(logs, at, side="right") - 1, 0, max(0, len(axis) - 2))
            high = np.minimum(low + 1, len(axis) - 1)
            width = np.where(high > low, logs[high] - logs[low], 1.0)
            cells.append((low, high, (at - logs[low]) / width))
        total = np.zeros(np.broadcast_shapes(*(np.shape(size) for size in sizes)))
        for corner in product((0, 1), repeat=3):
            weight = np.ones_like(total)
            for side, (_, _, share) in zip(corner, cells, strict=True):
                weight = weight * (share if side else 1 - share)
            place = tuple(cell[side] for side, cell in zip(corner, cells, strict=True))
            total += weight * self._rates[place]
        return np.asarray(np.exp(total), dtype=np.float64)
