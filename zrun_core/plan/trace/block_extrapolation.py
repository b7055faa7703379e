"""Trace a deep model with few of its repeated blocks, and write the others out.

    blocks of a list of 32        0 1 2   31          those that run: three units and the end
    forward    ...|0|1|2|31|...   ->   ...|0|1|2|2'|2''|...|31|...
    backward   ...|31|2|1|0|...   ->   ...|31|...|2''|2'|2|1|0|...

A unit is one block, or as many as it takes until they repeat (every second one checkpointed). Unit
1 and unit 2 must do the same things in the same order; what is freed in unit 2 but came from unit 1
tells what each copy frees of the one before it. With two tensors in a block, x that it keeps for
its backward, and y that it hands on and the next block frees, two copies are (+ comes, - goes)

    ran       forward   +x1 +y1 -y0 | +x2 +y2 -y1 |                           | +x9 +y9 -y2
    written   forward   +x1 +y1 -y0 | +x2 +y2 -y1 | +x3 +y3 -y2 | +x4 +y4 -y3 | +x9 +y9 -y4
              backward  -x9 | -x4 | -x3 | -x2 | -x1

where x3, y3, x4 and y4 are new numbers: tensor i of unit 2 is first + (n - 1) * 2 + i in copy n.
The last block freed y2, which unit 2 handed on: now it frees that of the last copy. The tracer
compares the result of one copy with a pass that ran one unit more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from zrun_core.plan.trace.rows import (
    PHASE_NUMBER,
    Rows,
    TracePhase,
    Vocabulary,
    distinct,
    same_but,
)

_MAX_PERIOD = 8
UNITS = 3  # that run before the last blocks


class BlocksDifferError(Exception):
    """Blocks that looked alike do not do the same."""


@dataclass(frozen=True)
class BlockSeries:
    """The repeated blocks of one list, of which only some need to run.

    Attributes:
        container: the list of modules.
        names: of its blocks.
        first: number of its first block among all blocks of the model.
        period: blocks of a unit.
    """

    container: nn.Module
    names: tuple[str, ...]
    first: int
    period: int

    @property
    def tail(self) -> int:
        """Number of blocks at the end that always run."""
        remainder = len(self.names) % self.period
        return self.period + remainder

    @property
    def num_units(self) -> int:
        """Number of units before the tail."""
        return (len(self.names) - self.tail) // self.period

    def kept(self, units: int) -> list[int]:
        """Return the places in the list of the blocks that run when `units` units do."""
        return [*range(units * self.period), *range(len(self.names) - self.tail, len(self.names))]


def find_series(
    blocks: Sequence[tuple[str, nn.Module]], model: nn.Module, multiple: int
) -> list[BlockSeries]:
    """Return the lists of alike blocks that are longer than what has to run.

    Args:
        blocks: all repeated blocks of `model`, in order.
        multiple: every how many blocks something differs although they look alike, as with
            checkpointing of every second one.
    """
    numbers = {id(block): number for number, (_, block) in enumerate(blocks)}
    names = {id(block): name for name, block in blocks}
    found = []
    for container in model.modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        members = list(container._modules.values())
        own = [numbers.get(id(member), -1) for member in members]
        if not own or own[0] < 0 or own != list(range(own[0], own[0] + len(own))):
            continue  # it has others than blocks, or blocks in another order
        period = _period([member for member in members if member is not None], multiple)
        if period is None:
            continue
        series = BlockSeries(
            container, tuple(names[id(member)] for member in members), own[0], period
        )
        if series.num_units > UNITS + 1:
            found.append(series)
    return found


def _period(members: Sequence[nn.Module], multiple: int) -> int | None:
    """Return after how many blocks they repeat, a multiple of `multiple`; None: they do not."""
    traits = _traits(members)
    for period in range(multiple, _MAX_PERIOD + 1, multiple):
        if all(traits[place] == traits[place + period] for place in range(len(traits) - period)):
            return period
    return None


def _traits(members: Sequence[nn.Module]) -> list[Any]:
    """Return of each block what may decide what it does: classes, shapes, numbers.

    A number that merely counts the blocks, such as `layer_idx`, is left out.
    """
    traits = [_traits_of(member) for member in members]

    def counts(key: str, first: Any) -> bool:
        if type(first) is not int:
            return False
        return [each.get(key) for each in traits] == [first + n for n in range(len(traits))]

    counters = {key for key, first in traits[0].items() if counts(key, first)}
    return [{key: value for key, value in each.items() if key not in counters} for each in traits]


def _traits_of(member: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in member.named_modules():
        found[f"{name} class"] = type(module)
        found[f"{name} training"] = module.training
        for key, param in module._parameters.items():
            found[f"{name}.{key}"] = None
            if param is not None:
                found[f"{name}.{key}"] = (tuple(param.shape), param.requires_grad)
        for key, buffer in module._buffers.items():
            found[f"{name}.{key}"] = None
            if buffer is not None:
                found[f"{name}.{key}"] = (tuple(buffer.shape), buffer.dtype)
        for key, value in vars(module).items():
            if key.startswith("_") or not isinstance(value, bool | int | float | str):
                continue
            if isinstance(value, float):  # only whether there is any, as of dropout
                value = bool(value)
            found[f"{name}.{key}"] = value
    return found


@contextmanager
def shortened(series: Sequence[BlockSeries], units: int) -> Iterator[None]:
    """Let each list hold `units` units and its tail, renumbered, inside."""
    with ExitStack() as stack:
        for each in series:
            members = dict(each.container._modules)
            values = list(members.values())
            stack.callback(_put_back, each.container, members)
            each.container._modules.clear()
            each.container._modules.update(
                {str(at): values[place] for at, place in enumerate(each.kept(units))}
            )
        yield


def _put_back(container: nn.Module, members: dict[str, Any]) -> None:
    container._modules.clear()
    container._modules.update(members)


def expand(rows: Rows, series: BlockSeries, copies: int, vocabulary: Vocabulary) -> Rows:
    """Return a pass with `copies` more units of `series` than ran in it.

    Args:
        rows: of a pass in which `UNITS` units of `series` and its tail ran.
        vocabulary: of `rows`; the modules of the copies are added to it.

    Raises:
        BlocksDifferError: the pass is not what a repetition looks like.
    """
    return _Expansion(rows, series, copies, vocabulary).rows()


class _Expansion:
    """A pass, and copies of its unit 2. Places are rows of the pass; copy 0 is unit 2 itself.

    place      f1      f2      f3               b2      b1      b0
    forward  0 | unit 1 | unit 2 | tail   backward  | unit 2 | unit 1 | 0
    """

    def __init__(
        self, rows: Rows, series: BlockSeries, copies: int, vocabulary: Vocabulary
    ) -> None:
        """Add `copies` units of `series` to the rows of a pass. `vocabulary` is theirs."""
        self._rows = rows
        self._series = series
        self._copies = copies
        self._modules = vocabulary.modules
        self._find_units()
        self._check_alike(slice(self._f1, self._f2), slice(self._f2, self._f3))
        self._check_alike(slice(self._b1, self._b0), slice(self._b2, self._b1))

        # Where each tensor comes and goes; -1: nowhere.
        tensor = rows["tensor"]
        num_tensors = int(tensor.max(initial=-1)) + 1
        comes = np.flatnonzero(rows["alloc"])
        goes = np.flatnonzero((tensor >= 0) & ~rows["alloc"])
        self._came = np.full(num_tensors, -1)
        self._came[tensor[comes]] = comes
        self._went = np.full(num_tensors, -1)
        self._went[tensor[goes]] = goes

        # Tensors that come in unit 2 are numbered for the copies: 0, 1, ...; -1: others.
        is_forward = (comes >= self._f2) & (comes < self._f3)
        is_backward = (comes >= self._b2) & (comes < self._b1)
        copied = tensor[comes[is_forward | is_backward]]
        self._first_copied = num_tensors
        self._num_copied = len(copied)
        self._number_in_unit = np.full(num_tensors, -1)
        self._number_in_unit[copied] = np.arange(len(copied))

    def _find_units(self) -> None:
        series = self._series
        num_blocks = len(series.names)
        tail = range(series.first + num_blocks - series.tail, series.first + num_blocks)
        unit_0, unit_1, unit_2 = (
            range(series.first + n * series.period, series.first + (n + 1) * series.period)
            for n in range(UNITS)
        )
        self._f1 = self._begin(unit_1, backward=False)
        self._f2 = self._begin(unit_2, backward=False)
        self._f3 = self._begin(tail, backward=False)
        self._b2 = self._begin(unit_2, backward=True)
        self._b1 = self._begin(unit_1, backward=True)
        self._b0 = self._begin(unit_0, backward=True)
        if not self._f1 < self._f2 < self._f3 <= self._b2 < self._b1 < self._b0:
            raise BlocksDifferError
        self._num_forward = self._f3 - self._f2  # rows of a unit
        self._num_backward = self._b1 - self._b2

    def _begin(self, blocks: range, *, backward: bool) -> int:
        """Return the first place of one of `blocks` in the forward or the backward pass."""
        rows = self._rows
        is_there = (rows["block"] >= blocks.start) & (rows["block"] < blocks.stop)
        is_there &= (rows["phase"] == PHASE_NUMBER[TracePhase.BACKWARD]) == backward
        if not is_there.any():
            raise BlocksDifferError
        return int(is_there.argmax())

    def _check_alike(self, of_unit_1: slice, of_unit_2: slice) -> None:
        """Raise unless both do the same, each in its modules. Tensors have other numbers."""
        one = self._rows[of_unit_1]
        two = self._rows[of_unit_2]
        is_alike = len(one) == len(two) and same_but(
            self._shifted(one, self._series.period), two, "tensor"
        )
        if not is_alike:
            raise BlocksDifferError

    def _shifted(self, rows: Rows, by: int) -> Rows:
        """Return `rows` of modules that lie `by` blocks further on."""
        names = self._series.names
        first = self._series.first
        found = rows.copy()
        inside = (rows["block"] >= first) & (rows["block"] < first + len(names))
        found["block"][inside] += by
        places = np.stack([rows["module"], rows["block"] - first], axis=1)[inside]
        different, which = distinct(places)
        shifted = []
        for number, block in different.tolist():
            if block + by >= len(names):
                raise BlocksDifferError
            within = self._modules.values[number].removeprefix(names[block])
            shifted.append(self._modules.number_of(names[block + by] + within))
        if shifted:
            found["module"][inside] = np.array(shifted)[which]
        return found

    def _is_forward(self, place: int) -> bool:
        return self._f2 <= place < self._f3

    def _is_backward(self, place: int) -> bool:
        return self._b2 <= place < self._b1

    # Writing it out

    def rows(self) -> Rows:
        """Return all rows: copies run forward after unit 2, and backward before it."""
        numbers = range(1, self._copies + 1)
        forward = self._owners(self._f2, self._f3)
        backward = self._owners(self._b2, self._b1)
        out = [self._rows[: self._f3]]
        out += [self._copy(self._f2, self._f3, number, forward) for number in numbers]
        out += self._outside(self._f3, self._b2)
        for number in (*reversed(numbers), 0):
            out.append(self._copy(self._b2, self._b1, number, backward))
        out += self._outside(self._b1, len(self._rows))
        return np.concatenate(out)

    def _copy(
        self, start: int, stop: int, number: int, owners: tuple[NDArray[Any], NDArray[Any]]
    ) -> Rows:
        """Return the rows from `start` to `stop` as copy `number` has them.

        `start` is the first place, of unit 2, and `stop` the one after the last; `owners` are as
        `_owners` returns them, of these rows.
        """
        found = self._shifted(self._rows[start:stop], number * self._series.period)
        tensors, steps = owners
        copy_numbers = number + steps
        # The unit before the first copy, and the one after the last, are in the pass itself.
        is_copied = (tensors >= 0) & (copy_numbers >= 0) & (copy_numbers <= self._copies)
        found["tensor"][is_copied] = self._tensors(tensors[is_copied], copy_numbers[is_copied])
        return found

    def _tensors(self, tensors: NDArray[Any], copy_numbers: NDArray[Any]) -> NDArray[Any]:
        """Return what corresponds in copies to these tensors of unit 2."""
        first_of_copy = self._first_copied + (copy_numbers - 1) * self._num_copied
        of_copy = first_of_copy + self._number_in_unit[tensors]
        return np.where(copy_numbers == 0, tensors, of_copy)

    def _owners(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return whose tensors rows of unit 2 are about.

        Returns:
            The corresponding tensor of unit 2, -1 for operators; and the copy that it belongs to,
            counted from the own one: 0 for its own, -1 for the unit before, 1 for the one after.
        """
        tensors = self._rows["tensor"][start:stop].copy()
        steps = np.zeros(len(tensors), dtype=np.int64)
        for offset in np.flatnonzero(tensors >= 0).tolist():
            tensor = int(tensors[offset])
            came = int(self._came[tensor])
            if self._is_forward(came) or self._is_backward(came):
                continue
            if self._f1 <= came < self._f2:
                tensors[offset] = self._rows["tensor"][came + self._num_forward]
                steps[offset] = -1
            elif self._f3 <= came < self._b2 <= start:
                # Of the unit after, whose backward ran before. Unit 1 frees that of unit 2.
                of_unit_2 = int(self._rows["tensor"][start + offset + self._num_backward])
                if not self._is_backward(int(self._came[of_unit_2])):
                    raise BlocksDifferError
                tensors[offset] = of_unit_2
                steps[offset] = 1
            else:
                raise BlocksDifferError
        return tensors, steps

    def _outside(self, start: int, stop: int) -> list[Rows]:
        """Return the rows outside of unit 2, which may free what came in its forward pass."""
        rows = self._rows
        out = []
        done = start
        for place in range(start, stop):
            tensor = int(rows["tensor"][place])
            is_free = tensor >= 0 and not rows["alloc"][place]
            if is_free and self._is_forward(int(self._came[tensor])):
                out += [rows[done:place], self._frees(place, tensor)]
                done = place + 1
        out.append(rows[done:stop])
        return out

    def _frees(self, place: int, tensor: int) -> Rows:
        """Return what stands for a row that frees `tensor` of unit 2 outside of it."""
        of_unit_1 = int(self._rows["tensor"][self._came[tensor] - self._num_forward])
        went = int(self._went[of_unit_1])
        if went < 0:
            raise BlocksDifferError
        if self._is_forward(went) or self._is_backward(went):
            # Each unit frees that of the one before: here it is the last copy's.
            numbers = np.array([self._copies])
        elif (went < self._b2) == (place < self._b2):
            numbers = np.arange(self._copies + 1)  # collected, and given up together
        else:
            raise BlocksDifferError
        found = np.repeat(self._rows[place : place + 1], len(numbers))
        found["tensor"] = self._tensors(np.full(len(numbers), tensor), numbers)
        return found


def alike(one: Rows, other: Rows) -> bool:
    """Return whether two passes are the same but for the numbers of tensors."""
    if not same_but(one, other, "tensor"):
        return False
    pairs = set(zip(one["tensor"].tolist(), other["tensor"].tolist(), strict=True))
    return len(pairs) == len({tensor for tensor, _ in pairs})
