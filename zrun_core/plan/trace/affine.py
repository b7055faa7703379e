"""Sizes as functions of the micro-batch, from passes of two of them: `fit`, and `fit_loops` where one does more.

A loss in chunks runs its loop more often for a larger micro-batch, with the same bytes each time. What is more in the
larger pass then has size 0 in the smaller one: what a repetition leaves behind grows with the micro-batch, and what it
gives up itself takes the place of what the one before it gave up.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from zrun_core.plan.trace.block_extrapolation import Timeline
from zrun_core.plan.trace.op_recorder import OpCall, OpRow
from zrun_core.plan.trace.profile import Affine, Event, Op

_MOST_ROWS = 6000  # between what both passes begin and end with: finding what is common takes long


def line(low: int, at_low: float, high: int, at_high: float) -> Affine:
    """The line through two points."""
    per_sample = (at_high - at_low) / (high - low) if high != low else 0.0
    return Affine(at_low - per_sample * low, per_sample)


def fit(rows: Sequence[OpRow], low: int, more: Sequence[OpRow], high: int) -> Timeline | None:
    """Sizes as lines through those of two micro-batches; None if something else happened in the other one."""
    if len(rows) != len(more):
        return None
    out: Timeline = []
    for row, other in zip(rows, more, strict=True):
        if row.tensor != other.tensor or _does(row) != _does(other):
            return None
        if row.op is None or other.op is None:
            out.append(_event(row, row.tensor, line(low, row.size, high, other.size)))
        else:
            out.append(_work(row, row.op, low, other.op, high))
    return out


def fit_loops(rows: Sequence[OpRow], low: int, more: Sequence[OpRow], high: int) -> Timeline | None:
    """As `fit`, where `more` repeats what `rows` has; None if they have too little in common.

    Whoever uses it compares it with a third micro-batch.
    """
    one, other = [_does(row) for row in rows], [_does(row) for row in more]
    shorter = min(len(one), len(other))
    before = next((place for place in range(shorter) if one[place] != other[place]), shorter)
    rest = shorter - before
    after = next((n for n in range(rest) if one[-1 - n] != other[-1 - n]), rest)
    if len(more) <= len(rows) or len(other) - before - after > _MOST_ROWS:
        return None
    matcher = SequenceMatcher(
        None, one[before : len(one) - after], other[before : len(other) - after], autojunk=False
    )
    same = [(place, place) for place in range(before)]
    for block in matcher.get_matching_blocks():
        same += [(before + block.a + n, before + block.b + n) for n in range(block.size)]
    same += [(len(one) - n, len(other) - n) for n in range(after, 0, -1)]
    return _Merge(rows, low, more, high, _moved_up(same, other)).timeline()


def _moved_up(same: Sequence[tuple[int, int]], does: Sequence[Any]) -> list[tuple[int, int]]:
    """The same pairs, but with repetitions that the smaller pass lacks at the beginning of their loop, not at its end.

    So all that a loop collects is there when the scratch of its last repetition comes.
    """
    small_of = {large: small for small, large in same}
    alone = [place for place in range(len(does)) if place not in small_of]
    starts = [place for place in alone if place == 0 or place - 1 in small_of]
    stops = [place + 1 for place in alone if place + 1 == len(does) or place + 1 in small_of]
    for start, stop in zip(starts, stops, strict=True):
        while start - 1 in small_of and does[start - 1] == does[stop - 1]:
            small_of[stop - 1] = small_of.pop(start - 1)
            start, stop = start - 1, stop - 1
    return sorted((small, large) for large, small in small_of.items())


class _Merge:
    """Two passes as one. Places are those in the rows of the smaller or of the larger one."""

    def __init__(
        self,
        rows: Sequence[OpRow],
        low: int,
        more: Sequence[OpRow],
        high: int,
        same: Sequence[tuple[int, int]],
    ) -> None:
        self._rows, self._low, self._more, self._high, self._same = rows, low, more, high, same
        self._in_small = {large: small for small, large in same}
        self._went = {
            row.tensor: place for place, row in enumerate(more) if row.tensor >= 0 and not row.alloc
        }
        # Which tensor of the larger pass came where one of the smaller pass did.
        self._partner = {
            rows[small].tensor: more[large].tensor for small, large in same if rows[small].alloc
        }
        self._run: dict[int, int] = {}  # of the larger pass alone: after how many common rows
        common = 0
        for place in range(len(more)):
            if place in self._in_small:
                common += 1
            else:
                self._run[place] = common

    def timeline(self) -> Timeline:
        sizes = {row.tensor: float(row.size) for row in self._rows if row.alloc}
        lines = {tensor: line(self._low, size, self._low, size) for tensor, size in sizes.items()}
        for small, large in self._same:
            row = self._rows[small]
            if row.alloc:
                lines[row.tensor] = line(self._low, row.size, self._high, self._more[large].size)
        added = self._added()
        out: Timeline = []
        done = 0
        for small, large in [*self._same, (len(self._rows), len(self._more))]:
            start = self._same_before(large)
            for place in range(start, large):
                row = self._more[place]
                if row.op is not None:
                    out.append(_work(row, None, self._low, row.op, self._high))
                out += added.get(place, [])
            for row in self._rows[done:small]:  # in the smaller pass alone
                out.append(self._own(row, lines, row.op))
            if small < len(self._rows):
                out.append(self._own(self._rows[small], lines, self._more[large].op))
            done = small + 1
        return out

    def _same_before(self, large: int) -> int:
        """The first place of the run of rows, of the larger pass alone, that ends at `large`."""
        start = large
        while start - 1 in self._run:
            start -= 1
        return start

    def _own(self, row: OpRow, lines: dict[int, Affine], other: OpCall | None) -> Event | Op:
        if row.op is not None:
            return _work(row, row.op, self._low, other, self._high)
        return _event(row, row.tensor, lines[row.tensor])

    def _added(self) -> dict[int, list[Event]]:
        """What comes and goes in the larger pass alone, by place, without what takes another repetition's place."""
        number = max((row.tensor for row in self._rows), default=-1) + 1
        found: dict[int, list[Event]] = {}
        for place, row in enumerate(self._more):
            if place in self._in_small or not row.alloc:
                continue
            end = self._end(row.tensor)
            # What lasts until a loop's end is used there, which both passes do: that tells it from scratch.
            if end is not None and (end < place or self._run[end] == self._run[place]):
                continue
            size = line(self._low, 0.0, self._high, row.size)
            found.setdefault(place, []).append(_event(row, number, size))
            if end is not None:
                found.setdefault(end, []).append(_event(self._more[end], number, size))
            number += 1
        return found

    def _end(self, tensor: int) -> int | None:
        """Where the larger pass alone gives up `tensor`, or what has its place in the smaller pass; None: it stays."""
        end = self._went.get(tensor)
        while end is not None and end in self._in_small:
            instead = self._partner.get(self._rows[self._in_small[end]].tensor)
            if instead is None:
                return None
            end = self._went.get(instead)
        return end


def _does(row: OpRow) -> tuple[Any, ...]:
    """What is equal for rows that do the same, whatever their sizes."""
    return row.alloc, row.phase, row.module, row.kind, None if row.op is None else row.op.name


def _event(row: OpRow, tensor: int, size: Affine) -> Event:
    return Event(
        tensor, size, row.alloc, row.phase, row.module, row.block, row.kind, row.accumulates
    )


def _work(row: OpRow, at_low: OpCall | None, low: int, at_high: OpCall | None, high: int) -> Op:
    """An operator's work from that at two micro-batches, of which one may do without it."""
    op = at_low or at_high
    assert op is not None
    flops = line(low, at_low.flops if at_low else 0.0, high, at_high.flops if at_high else 0.0)
    moved = line(
        low, at_low.bytes_moved if at_low else 0.0, high, at_high.bytes_moved if at_high else 0.0
    )
    return Op(
        op.name, op.family, flops, moved, row.phase, row.module, row.block, op.dtype, op.shape
    )
