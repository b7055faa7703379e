"""The inputs of recomputed blocks in a timeline, and those in which they wait elsewhere or divided.

As `zrun_core/activations/offloaded_inputs.py` moves them: an input gives up its memory when the
next recomputed block begins, and has memory again from the moment at which that block begins its
backward. The last one stays. Of divided inputs a rank keeps a slice, and has the whole only while
its block runs.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zrun_core.plan.trace.rows import PHASE_NUMBER, Rows, TracePhase, values_at

_FORWARD = PHASE_NUMBER[TracePhase.FORWARD]
_BACKWARD = PHASE_NUMBER[TracePhase.BACKWARD]


class BlockInput(NamedTuple):
    """The rows with which the input of a block comes, in forward, and goes, in backward."""

    comes: int
    goes: int


def inputs_of_blocks(events: Rows, every: int) -> dict[int, BlockInput]:
    """Return the inputs of recomputed blocks, by block.

    An input is what the block before makes and backward of the block frees. That of the first block
    comes from outside, and is as large as the others.

    Args:
        events: rows of memory that comes or goes.
        every: one block in so many is recomputed.
    """
    is_forward = events["phase"] == _FORWARD
    is_backward = events["phase"] == _BACKWARD
    blocks = events["block"]
    came = {int(events["tensor"][row]): int(row) for row in np.flatnonzero(events["alloc"])}
    is_freed = ~events["alloc"] & is_backward & (blocks >= 0) & (blocks % every == 0)
    found: dict[int, BlockInput] = {}
    outside: list[BlockInput] = []  # of the first block, and made before it
    for goes in np.flatnonzero(is_freed).tolist():
        comes = came.get(int(events["tensor"][goes]))
        block = int(blocks[goes])
        if comes is None or not is_forward[comes] or blocks[comes] != block - 1:
            continue
        each = BlockInput(comes, goes)
        if block == 0:
            outside.append(each)
        elif block not in found or comes > found[block].comes:
            found[block] = each
    sizes = {tuple(events["size"][each.comes]) for each in found.values()}
    alike = [each for each in outside if tuple(events["size"][each.comes]) in sizes]
    if alike:
        found[0] = max(alike)
    return dict(sorted(found.items()))


def without_waiting_inputs(events: Rows, every: int) -> Rows:
    """Return the events of the same micro-batch whose inputs of blocks wait elsewhere.

    Args:
        events: rows of memory that comes or goes.
        every: one block in so many is recomputed.
    """
    inputs = inputs_of_blocks(events, every)
    changed = events.copy()
    next_tensor = int(events["tensor"].max(initial=-1)) + 1
    inserted: list[tuple[int, Rows]] = []  # before which row, and the new one
    blocks = list(inputs)
    for block, following in itertools.pairwise(blocks):
        comes, goes = inputs[block]
        left = _first(events, _FORWARD, following)
        back = _first(events, _BACKWARD, following)
        if not comes < left < back < goes:
            continue
        inserted.append((left, _row(events, left, comes, int(events["tensor"][comes]))))
        returned = _row(events, back, comes, next_tensor)
        returned["alloc"] = True
        inserted.append((back, returned))
        changed["tensor"][goes] = next_tensor
        next_tensor += 1
    return _with_rows(changed, inserted)


def with_divided_inputs(events: Rows, every: int, ranks: int, *, away: bool) -> Rows:
    """Return the events of the same micro-batch of which each rank keeps slices of inputs.

        forward     block i begins    its input's slice is there
                    block i ends      the whole input goes
        backward    block i begins    the whole input is there again, until it is not needed

    Args:
        events: rows of memory that comes or goes.
        every: one block in so many is recomputed.
        away: slices leave the device when the next recomputed block begins, and come back as soon
            as that block begins its backward.
    """
    inputs = inputs_of_blocks(events, every)
    changed = events.copy()
    next_tensor = int(events["tensor"].max(initial=-1)) + 1
    inserted: list[tuple[int, Rows]] = []  # before which row, and the new one

    def add(place: int, like: int, tensor: int, *, alloc: bool, divided: bool) -> None:
        row = _row(events, like, comes, tensor)
        row["alloc"] = alloc
        if divided:
            row["size"] = row["size"] / ranks
        inserted.append((place, row))

    for block, following in itertools.zip_longest(inputs, list(inputs)[1:]):
        comes, goes = inputs[block]
        begin = _first(events, _FORWARD, block)
        end = _last(events, _FORWARD, block) + 1
        back = _first(events, _BACKWARD, block)
        if not comes < begin < end <= back < goes:
            continue
        own, whole, returned = next_tensor, next_tensor + 1, next_tensor + 2
        next_tensor += 3
        add(begin, begin, own, alloc=True, divided=True)
        add(end, end - 1, int(events["tensor"][comes]), alloc=False, divided=False)
        if away and following is not None:
            left = _first(events, _FORWARD, following)
            add(left, left, own, alloc=False, divided=True)
            here = _first(events, _BACKWARD, following)
            add(here, here, returned, alloc=True, divided=True)
            own = returned
        add(back, back, whole, alloc=True, divided=False)
        changed["tensor"][goes] = whole
        add(goes + 1, goes, own, alloc=False, divided=True)
    return _with_rows(changed, inserted)


def _with_rows(events: Rows, inserted: list[tuple[int, Rows]]) -> Rows:
    """Return events with more rows, each before the row of the number it comes with.

    Of those before one row, what goes is first.
    """
    if not inserted:
        return events
    inserted = sorted(inserted, key=lambda item: (item[0], bool(item[1]["alloc"][0])))
    rows = np.concatenate([row for _, row in inserted])
    return np.insert(events, [place for place, _ in inserted], rows)


def input_bytes(events: Rows, every: int, micro: int) -> NDArray[np.float64]:
    """Return the bytes of each input that moves, for `micro` samples."""
    rows = [each.comes for each in inputs_of_blocks(events, every).values()]
    return values_at(events["size"][rows], micro)


def _first(events: Rows, phase: int, block: int) -> int:
    """Return the first row of a block in a phase; -1 if there is none."""
    rows = np.flatnonzero((events["phase"] == phase) & (events["block"] == block))
    return int(rows[0]) if len(rows) else -1


def _last(events: Rows, phase: int, block: int) -> int:
    """Return the last row of a block in a phase; -2 if there is none."""
    rows = np.flatnonzero((events["phase"] == phase) & (events["block"] == block))
    return int(rows[-1]) if len(rows) else -2


def _row(events: Rows, where: int, comes: int, tensor: int) -> Rows:
    """Return a row, [1], in which a tensor goes, before another row.

    Row `where` is the one before which it is, row `comes` the one with which the input came.
    """
    row = events[where : where + 1].copy()
    for name in ("kind", "size", "accumulates", "operator", "flops"):
        row[name] = events[name][comes]
    row["tensor"] = tensor
    row["alloc"] = False
    return row
