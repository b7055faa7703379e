"""A traced micro-batch as one table: what comes, what goes and what is computed, in order.

    tensor  alloc  phase     module       block  kind        operator  size           flops
         0   True  forward   blocks.0.up      0  activation        -1  0 + 128 m      0
        -1  False  forward   blocks.0.up      0  temp               0  2048 + 192 m   0 + 1024 m
         0  False  backward  blocks.0.up      0  activation        -1  0 + 128 m      0

A row is either an event, which is memory that comes or goes, or an operator that runs (`tensor` is
-1). Sizes are affine in the number of samples m, stored as [at no sample, per sample]. The size of
an event is its bytes, that of an operator the bytes that it reads and writes. Phases, kinds,
modules and operators are numbers: places in `PHASES`, `EVENT_KINDS`, `Trace.modules` and
`Trace.operators`. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

EventKind = Literal["activation", "temp", "grad"]
Family = Literal["gemm", "attention", "conv", "norm", "elementwise", "copy", "other", "collective"]
Rows: TypeAlias = NDArray[np.void]  # of `ROW`


class TracePhase(StrEnum):
    """The parts of a step by which memory is told apart."""

    FORWARD = "forward"
    LOSS = "loss"  # computed in the forward pass after the last block, outside of modules
    BACKWARD = "backward"
    REDUCE = "reduce"
    UPDATE = "update"
    GATHER = "gather"


PHASES = tuple(TracePhase)
PHASE_NUMBER = {phase: number for number, phase in enumerate(PHASES)}

# activation: outlives its phase. grad: a parameter's gradient, before it moves to its flat unit.
EVENT_KINDS: tuple[EventKind, ...] = ("activation", "temp", "grad")
KIND_NUMBER = {kind: number for number, kind in enumerate(EVENT_KINDS)}

ROW = np.dtype(
    [
        ("tensor", np.int64),  # number of the memory; it comes once, and goes at most once
        ("alloc", np.bool_),
        ("phase", np.int32),
        ("module", np.int32),  # "" is the model itself, and what runs outside of it
        ("block", np.int32),  # number of the repeated block around the module; -1 outside
        ("kind", np.int32),
        ("accumulates", np.bool_),  # only where a gradient is added to one that is there already
        ("operator", np.int32),  # -1 for an event
        ("size", np.float64, 2),
        ("flops", np.float64, 2),
    ]
)
AFFINE_FIELDS = ("size", "flops")
# What neither an event nor an operator says of itself.
EMPTY_ROW = np.array(
    (-1, False, 0, 0, -1, KIND_NUMBER["temp"], False, -1, (0.0, 0.0), (0.0, 0.0)), dtype=ROW
)


@dataclass(frozen=True, slots=True)
class Affine:
    """Bytes or FLOPs as a function of the micro-batch."""

    base: float
    per_sample: float

    def at(self, micro: float) -> float:
        """Return the value for `micro` samples; never negative."""
        return max(0.0, self.base + self.per_sample * micro)


def values_at(sizes: NDArray[np.float64], micro: float) -> NDArray[np.float64]:
    """Return the values of affine `sizes`, [n, 2], for `micro` samples: [n], never negative."""
    return np.maximum(0.0, sizes[:, 0] + sizes[:, 1] * micro)


class Operator(NamedTuple):
    """An operator as its time depends on it.

    Attributes:
        shape: (m, n, k) of a matrix product, or of each one of a batch, for the smallest
            micro-batch that was traced; the kernel's for a convolution; else the output's.
        is_inner: one of the many that a recurrent layer runs one after the other for each position,
            in one call from Python.
    """

    name: str
    family: Family
    dtype: str
    shape: tuple[int, ...]
    is_inner: bool = False


# Writing rows

_Value = TypeVar("_Value", bound=Hashable)


class Numbering(Generic[_Value]):
    """Distinct values, numbered in the order in which they were met first."""

    def __init__(self) -> None:
        self.values: list[_Value] = []
        self._numbers: dict[_Value, int] = {}

    def number_of(self, value: _Value) -> int:
        """Return the number of `value`, a new one if it was not met before."""
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Vocabulary:
    """The modules and operators that rows name by number; one for all passes of a model."""

    def __init__(self) -> None:
        self.modules = Numbering[str]()
        self.operators = Numbering[Operator]()


class RowWriter:
    """Collects rows in order."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._rows: list[tuple[Any, ...]] = []

    def event(
        self,
        tensor: int,
        size: float,
        per_sample: float = 0.0,
        *,
        alloc: bool,
        phase: TracePhase,
        module: str,
        block: int,
        kind: EventKind = "temp",
        accumulates: bool = False,
    ) -> None:
        """Append memory that comes or goes.

        Args:
            size: its bytes, or those at no sample.
            per_sample: its bytes per sample.
            alloc: whether it comes.
            block: number of the repeated block around it; -1 outside.
            accumulates: whether this happens only where gradients are added to earlier ones.
        """
        self._rows.append(
            (
                tensor,
                alloc,
                PHASE_NUMBER[phase],
                self._vocabulary.modules.number_of(module),
                block,
                KIND_NUMBER[kind],
                accumulates,
                -1,
                (size, per_sample),
                (0.0, 0.0),
            )
        )

    def op(
        self,
        operator: Operator,
        *,
        flops: tuple[float, float],
        bytes_moved: tuple[float, float],
        phase: TracePhase,
        module: str,
        block: int,
    ) -> None:
        """Append an operator that runs.

        Args:
            flops: its operations, (at no sample, per sample).
            bytes_moved: its operands' bytes, each read or written once, in the same form.
            block: number of the repeated block around it; -1 outside.
        """
        self._rows.append(
            (
                -1,
                False,
                PHASE_NUMBER[phase],
                self._vocabulary.modules.number_of(module),
                block,
                KIND_NUMBER["temp"],
                False,
                self._vocabulary.operators.number_of(operator),
                bytes_moved,
                flops,
            )
        )

    def rows(self) -> Rows:
        """Return what was written so far."""
        return np.array(self._rows, dtype=ROW)


def same_but(one: Rows, other: Rows, *ignored: str) -> bool:
    """Return whether two tables are equal in all columns but `ignored`."""
    if len(one) != len(other):
        return False
    names = [name for name in ROW.names or () if name not in ignored]
    return all(np.array_equal(one[name], other[name]) for name in names)


def distinct(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the distinct `values` in order of appearance, and the number of each one."""
    distinct, first, numbers = np.unique(values, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return distinct[order], rank[numbers.reshape(-1)]
