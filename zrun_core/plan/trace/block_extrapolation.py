"""Trace a deep model with few of its repeated blocks, and write the others out: `find_series`, `shortened`, `expand`.

    blocks of a list of 32        0 1 2   31          those that run: three units and the end
    forward    ...|0|1|2|31|...   ->   ...|0|1|2|2'|2''|...|31|...
    backward   ...|31|2|1|0|...   ->   ...|31|...|2''|2'|2|1|0|...

A unit is one block, or as many as it takes until they repeat (every second one checkpointed). Unit 1 and unit 2 must do
the same things in the same order; what is freed in unit 2 but came from unit 1 tells what each copy frees of the one
before it. Whoever expands compares the result with a trace of one unit more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import nn

from zrun_core.plan.trace.profile import Event, Op, TracePhase

Timeline: TypeAlias = list[Event | Op]
_MAX_PERIOD = 8
UNITS = 3  # that run before the last blocks


@dataclass(frozen=True)
class BlockSeries:
    """The repeated blocks of one list, of which only some need to run.

    Attributes:
        container: the list.
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
        """Blocks at the end that always run."""
        rest = len(self.names) % self.period
        return self.period + rest

    @property
    def num_units(self) -> int:
        """Units before the tail."""
        return (len(self.names) - self.tail) // self.period

    def kept(self, units: int) -> list[int]:
        """Places in the list of the blocks that run when `units` units do."""
        return [*range(units * self.period), *range(len(self.names) - self.tail, len(self.names))]


def find_series(
    blocks: Sequence[tuple[str, nn.Module]], model: nn.Module, multiple: int
) -> list[BlockSeries]:
    """The lists of blocks that are longer than what has to run, with alike blocks.

    Args:
        blocks: all repeated blocks of `model`, in order.
        multiple: every how many blocks something is different although they look alike (checkpointing).
    """
    numbers = {id(block): number for number, (_, block) in enumerate(blocks)}
    names = {id(block): name for name, block in blocks}
    found = []
    for container in model.modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        members = list(container._modules.values())
        own = [numbers[id(member)] for member in members if id(member) in numbers]
        if len(own) != len(members) or len(set(own)) != len(own) or not own:
            continue
        if own != list(range(own[0], own[0] + len(own))):
            continue
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
    """After how many blocks they repeat, a multiple of `multiple`; None: they do not."""
    traits = _traits(members)
    for period in range(multiple, _MAX_PERIOD + 1, multiple):
        if all(traits[place] == traits[place + period] for place in range(len(traits) - period)):
            return period
    return None


def _traits(members: Sequence[nn.Module]) -> list[Any]:
    """What of each block may decide what it does: classes, shapes, numbers; not what merely counts the blocks."""
    columns: list[dict[str, Any]] = []
    for member in members:
        column: dict[str, Any] = {}
        for name, module in member.named_modules():
            column[f"{name} class"] = type(module)
            column[f"{name} training"] = module.training
            for key, param in module._parameters.items():
                column[f"{name}.{key}"] = (
                    None if param is None else (tuple(param.shape), param.requires_grad)
                )
            for key, buffer in module._buffers.items():
                column[f"{name}.{key}"] = (
                    None if buffer is None else (tuple(buffer.shape), buffer.dtype)
                )
            for key, value in vars(module).items():
                if isinstance(value, bool | int | float | str) and not key.startswith("_"):
                    column[f"{name}.{key}"] = bool(value) if isinstance(value, float) else value
        columns.append(column)
    counters = {
        key
        for key, value in columns[0].items()
        if type(value) is int
        and [column.get(key) for column in columns] == [value + n for n in range(len(columns))]
    }
    return [
        {key: value for key, value in column.items() if key not in counters} for column in columns
    ]


@contextmanager
def shortened(series: Sequence[BlockSeries], units: int) -> Iterator[None]:
    """Inside, each list holds `units` units and its tail, renumbered."""
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


class _NotAlikeError(Exception):
    """The timeline is not what a repetition looks like."""


def expand(timeline: Timeline, series: BlockSeries, copies: int) -> Timeline | None:
    """`timeline`, in which `UNITS` units of `series` and its tail run, with `copies` more units; None: it cannot be."""
    try:
        return _Expansion(timeline, series, copies).result()
    except _NotAlikeError:
        return None


class _Expansion:
    """Places are those in the timeline that is given. Unit 2 is what is copied; copy 0 of it is itself."""

    def __init__(self, timeline: Timeline, series: BlockSeries, copies: int) -> None:
        self._rows, self._series, self._copies = timeline, series, copies
        period, first = series.period, series.first
        last = [
            first + place for place in range(len(series.names) - series.tail, len(series.names))
        ]
        units = [range(first + n * period, first + (n + 1) * period) for n in range(UNITS)]

        def begin(blocks: Sequence[int], *, backward: bool) -> int:
            for place, row in enumerate(timeline):
                if row.block in blocks and (row.phase is TracePhase.BACKWARD) == backward:
                    return place
            raise _NotAlikeError

        self.f1, self.f2 = (begin(units[n], backward=False) for n in (1, 2))
        self.f3 = begin(last, backward=False)
        self.b2, self.b1, self.b0 = (begin(units[n], backward=True) for n in (2, 1, 0))
        if not self.f1 < self.f2 < self.f3 <= self.b2 < self.b1 < self.b0:
            raise _NotAlikeError
        self._forward, self._backward = self.f3 - self.f2, self.b1 - self.b2  # rows of a unit
        if self.f2 - self.f1 != self._forward or self.b0 - self.b1 != self._backward:
            raise _NotAlikeError
        self._came: dict[int, int] = {}
        self._went: dict[int, int] = {}
        for place, row in enumerate(timeline):
            if isinstance(row, Event):
                (self._came if row.alloc else self._went)[row.tensor] = place
        self._next_tensor = max(self._came, default=-1) + 1
        self._copied: dict[tuple[int, int], int] = {}
        for offset in range(self._forward):
            self._check_alike(self.f1 + offset, self.f2 + offset)
        for offset in range(self._backward):
            self._check_alike(self.b1 + offset, self.b2 + offset)

    def _check_alike(self, of_unit_1: int, of_unit_2: int) -> None:
        one, two = self._rows[of_unit_1], self._rows[of_unit_2]
        if isinstance(one, Event) and isinstance(two, Event):
            one = replace(one, tensor=two.tensor)
        if type(one) is not type(two) or self._shift(one, self._series.period) != two:
            raise _NotAlikeError

    def _shift(self, row: Event | Op, by: int) -> Event | Op:
        """`row`, of a module that lies `by` blocks further on."""
        place = row.block - self._series.first
        if row.block < 0 or not 0 <= place < len(self._series.names):
            return row
        old, new = self._series.names[place], self._series.names[place + by]
        return _in_module(row, new + row.module.removeprefix(old), row.block + by)

    # Which region a tensor came in

    def _in_forward_2(self, tensor: int) -> bool:
        return self.f2 <= self._came[tensor] < self.f3

    def _in_backward_2(self, tensor: int) -> bool:
        return self.b2 <= self._came[tensor] < self.b1

    def _of_unit_2(self, tensor: int) -> int:
        """The tensor of unit 2 that corresponds to one of unit 1's forward."""
        row = self._rows[self._came[tensor] + self._forward]
        assert isinstance(row, Event)
        return row.tensor

    def _of_unit_1(self, tensor: int) -> int:
        """The tensor of unit 1 that corresponds to one of unit 2's forward."""
        row = self._rows[self._came[tensor] - self._forward]
        assert isinstance(row, Event)
        return row.tensor

    def _copy(self, tensor: int, number: int) -> int:
        """The tensor of copy `number` that corresponds to `tensor` of unit 2."""
        if number == 0:
            return tensor
        found = self._copied.get((tensor, number))
        if found is None:
            found = self._copied[tensor, number] = self._next_tensor
            self._next_tensor += 1
        return found

    # Writing it out

    def result(self) -> Timeline:
        rows, numbers = self._rows, range(1, self._copies + 1)
        out = rows[: self.f3]
        for number in numbers:
            out += [self._row_of_copy(place, number) for place in range(self.f2, self.f3)]
        for place in range(self.f3, self.b2):
            out += self._after(place)
        for number in (*reversed(numbers), 0):
            out += [self._row_of_copy(place, number) for place in range(self.b2, self.b1)]
        for place in range(self.b1, len(rows)):
            out += self._after(place)
        return out

    def _row_of_copy(self, place: int, number: int) -> Event | Op:
        row = self._shift(self._rows[place], number * self._series.period)
        if isinstance(row, Op):
            return row
        tensor = self._copy(row.tensor, number) if row.alloc else self._freed(place, number)
        return Event(
            tensor, row.size, row.alloc, row.phase, row.module, row.block, row.kind, row.accumulates
        )

    def _freed(self, place: int, number: int) -> int:
        """What copy `number` frees where unit 2 frees something."""
        row = self._rows[place]
        assert isinstance(row, Event)
        tensor = row.tensor
        came = self._came[tensor]
        if self._in_forward_2(tensor) or self._in_backward_2(tensor):
            return self._copy(tensor, number)
        if self.f1 <= came < self.f2:  # of the unit before
            return tensor if number == 0 else self._copy(self._of_unit_2(tensor), number - 1)
        if (
            self.f3 <= came < self.b2 and place >= self.b2
        ):  # of the unit after, whose backward was before this one's
            if number == self._copies:
                return tensor
            same = self._rows[place + self._backward]
            assert isinstance(same, Event)
            if not self._in_backward_2(same.tensor):
                raise _NotAlikeError
            return self._copy(same.tensor, number + 1)
        raise _NotAlikeError

    def _after(self, place: int) -> Timeline:
        """A row outside of the copied unit: it may free what came in it."""
        row = self._rows[place]
        if isinstance(row, Op) or row.alloc or not self._in_forward_2(row.tensor):
            return [row]
        went = self._went.get(self._of_unit_1(row.tensor))
        # Each unit frees that of the one before: here it is the last copy's.
        if went is not None and (self.f2 <= went < self.f3 or self.b2 <= went < self.b1):
            return [replace(row, tensor=self._copy(row.tensor, self._copies))]
        if went is not None and (went < self.b2) == (
            place < self.b2
        ):  # collected, and given up together
            return [
                replace(row, tensor=self._copy(row.tensor, number))
                for number in range(self._copies + 1)
            ]
        raise _NotAlikeError


def _in_module(row: Event | Op, module: str, block: int) -> Event | Op:
    """`row`, of another module. There are a hundred thousand: `dataclasses.replace` takes thrice the time."""
    if isinstance(row, Op):
        return Op(
            row.name,
            row.family,
            row.flops,
            row.bytes_moved,
            row.phase,
            module,
            block,
            row.dtype,
            row.shape,
        )
    return Event(
        row.tensor, row.size, row.alloc, row.phase, module, block, row.kind, row.accumulates
    )


def alike(one: Timeline, other: Timeline) -> bool:
    """Whether two timelines are the same but for the numbers of tensors."""
    if len(one) != len(other):
        return False
    matched: dict[int, int] = {}
    for row, same in zip(one, other, strict=True):
        if type(row) is not type(same):
            return False
        if isinstance(row, Event) and isinstance(same, Event):
            if matched.setdefault(row.tensor, same.tensor) != same.tensor:
                return False
            row = replace(row, tensor=same.tensor)
        if row != same:
            return False
    return True
