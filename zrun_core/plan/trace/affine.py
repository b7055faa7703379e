"""Affine sizes from passes of two micro-batches: `fit`, and `fit_loops` where one does more.

A loss in chunks runs its loop more often for a larger micro-batch, with the same bytes each time:

    pass of 2 samples    in | scratch kept -scratch | sum
    pass of 4 samples    in | scratch kept -scratch | scratch kept -scratch | sum

What is more in the larger pass then has size 0 in the smaller one: what a repetition leaves behind
grows with the micro-batch ("kept": 8 bytes per repetition are 4 m - 8 in the second one, for m
samples), and what it frees itself takes the place of what the one before it freed ("scratch" is
there once, however often the loop runs).
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from zrun_core.plan.trace.rows import AFFINE_FIELDS, Rows, Vocabulary, distinct

_MAX_ROWS = 15_000  # between the common beginning and end: matching what lies there takes long


def line_through(low: int, at_low: float, high: int, at_high: float) -> tuple[float, float]:
    """Return the line through two points.

    Returns:
        The value at 0, and the slope.
    """
    per_sample = (at_high - at_low) / (high - low)
    return at_low - per_sample * low, per_sample


def _lines_through(
    low: int, at_low: NDArray[np.float64], high: int, at_high: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return [n, 2], the lines through points [n] at `low` and at `high`."""
    per_sample = (at_high - at_low) / (high - low)
    return np.stack([at_low - per_sample * low, per_sample], axis=1)


def fit(rows: Rows, low: int, more: Rows, high: int, vocabulary: Vocabulary) -> Rows | None:
    """Return `rows` with affine sizes; None if something else happened in the other pass.

    Args:
        rows: of a pass of `low` samples.
        more: of a pass of `high` samples.
    """
    if len(rows) != len(more) or not np.array_equal(rows["tensor"], more["tensor"]):
        return None
    if not np.array_equal(_deeds(rows, vocabulary), _deeds(more, vocabulary)):
        return None
    return _with_lines(rows, low, more, high)


def fit_loops(rows: Rows, low: int, more: Rows, high: int, vocabulary: Vocabulary) -> Rows | None:
    """Do as `fit`, where `more` repeats what `rows` has; None if they have too little in common.

    The result is a guess about what a repetition is: compare it with a third micro-batch.

    Args:
        rows: of a pass of `low` samples.
        more: of a pass of `high` samples.
    """
    if len(more) <= len(rows):
        return None
    _, numbers = distinct(np.concatenate([_deeds(rows, vocabulary), _deeds(more, vocabulary)]))
    one = numbers[: len(rows)].tolist()
    other = numbers[len(rows) :].tolist()
    phases, starts = _runs(rows["phase"])
    phases_of_more, starts_of_more = _runs(more["phase"])
    if phases != phases_of_more:
        return None
    same = []
    # A loop runs in the forward pass, and again in the backward pass: each is matched by itself.
    for span, span_of_more in zip(pairwise(starts), pairwise(starts_of_more), strict=True):
        found = _common(one[slice(*span)], other[slice(*span_of_more)])
        if found is None:
            return None
        same += [(span[0] + place, span_of_more[0] + at) for place, at in found]
    return _Merge(rows, low, more, high, _moved_up(same, other)).rows()


def _runs(phases: NDArray[np.int32]) -> tuple[list[int], list[int]]:
    """Return the phases of a pass in order, and where each begins, and the end."""
    starts = [0, *(np.flatnonzero(np.diff(phases)) + 1).tolist()]
    return phases[starts].tolist(), [*starts, len(phases)]


def _common(one: list[int], other: list[int]) -> list[tuple[int, int]] | None:
    """Return the places of what both do, in order; None where that takes too long to find."""
    shorter = min(len(one), len(other))
    before = 0
    while before < shorter and one[before] == other[before]:
        before += 1
    after = 0
    while after < shorter - before and one[-1 - after] == other[-1 - after]:
        after += 1
    same = [(place, place) for place in range(before)]
    if before + after < shorter:
        if max(len(one), len(other)) - before - after > _MAX_ROWS:
            return None
        middle = SequenceMatcher(
            None, one[before : len(one) - after], other[before : len(other) - after], autojunk=False
        )
        for block in middle.get_matching_blocks():
            same += [(before + block.a + n, before + block.b + n) for n in range(block.size)]
    return same + [(len(one) - n, len(other) - n) for n in range(after, 0, -1)]


def _deeds(rows: Rows, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return [n, 5], equal for rows that do the same, whatever their sizes and shapes."""
    names: dict[str, int] = {}
    of_operator = [names.setdefault(op.name, len(names)) for op in vocabulary.operators.values]
    name_of = np.array([*of_operator, -1], dtype=np.int64)  # at -1, which stands for no operator
    columns = (
        rows["alloc"],
        rows["phase"],
        rows["module"],
        rows["kind"],
        name_of[rows["operator"]],
    )
    return np.stack(columns, axis=1).astype(np.int64)


def _with_lines(rows: Rows, low: int, more: Rows, high: int) -> Rows:
    """Return `rows` with sizes through those of `more`, row by row."""
    found = rows.copy()
    for name in AFFINE_FIELDS:
        found[name] = _lines_through(low, rows[name][:, 0], high, more[name][:, 0])
    return found


def _moved_up(same: Sequence[tuple[int, int]], does: Sequence[int]) -> list[tuple[int, int]]:
    """Return the same pairs, with repetitions that the smaller pass lacks moved to its start.

    So all that a loop collects is there when the scratch of its last repetition comes: in
    "a b a b a b" against "a b", the pair of "a b" moves from the first to the last one.
    """
    small_of = {large: small for small, large in same}
    alone = [place for place in range(len(does)) if place not in small_of]
    starts = [place for place in alone if place == 0 or place - 1 in small_of]
    stops = [place + 1 for place in alone if place + 1 == len(does) or place + 1 in small_of]
    for start, stop in zip(starts, stops, strict=True):
        while start - 1 in small_of and does[start - 1] == does[stop - 1]:
            small_of[stop - 1] = small_of.pop(start - 1)
            start -= 1
            stop -= 1
    return sorted((small, large) for large, small in small_of.items())


class _Merge:
    """Two passes as one. Places are those in the rows of the smaller or of the larger one."""

    def __init__(
        self, rows: Rows, low: int, more: Rows, high: int, same: Sequence[tuple[int, int]]
    ) -> None:
        """Merge `rows`, of a pass of `low` samples, with `more`, of one of `high`, which are more.

        `same` has the places, in `rows` and in `more`, of what both do, in order.
        """
        self._rows = rows
        self._more = more
        self._same = same
        self._small = self._sized_small(low, high)
        self._large = _with_lines(_without_sizes(more), low, more, high)
        self._in_small = {large: small for small, large in same}
        goes = (more["tensor"] >= 0) & ~more["alloc"]
        self._free_place = {
            int(more["tensor"][place]): place for place in np.flatnonzero(goes).tolist()
        }
        # Which tensor of the larger pass came where one of the smaller pass did.
        self._partner = {
            int(rows["tensor"][small]): int(more["tensor"][large])
            for small, large in same
            if rows["alloc"][small]
        }
        # Rows of the larger pass alone: after how many common rows. Equal in one run of such rows.
        self._run: dict[int, int] = {}
        common = 0
        for place in range(len(more)):
            if place in self._in_small:
                common += 1
            else:
                self._run[place] = common

    def _sized_small(self, low: int, high: int) -> Rows:
        """Return the smaller pass with sizes through those of the larger one where both do it."""
        small_places, large_places = (np.array(each, dtype=np.int64) for each in _unzip(self._same))
        rows = self._rows
        found = rows.copy()
        found[small_places] = _with_lines(rows[small_places], low, self._more[large_places], high)
        # A tensor has one size, which its first row tells, also where it goes in one pass alone.
        size_of = {
            tensor: size
            for tensor, size, alloc in zip(
                rows["tensor"].tolist(), found["size"].tolist(), rows["alloc"].tolist(), strict=True
            )
            if alloc
        }
        for place in np.flatnonzero((rows["tensor"] >= 0) & ~rows["alloc"]).tolist():
            found["size"][place] = size_of[int(rows["tensor"][place])]
        return found

    def rows(self) -> Rows:
        """Return what both passes do, what either does alone, and its affine sizes."""
        added = self._added()
        out: list[Rows] = []
        small_done = large_done = 0
        for small, large in [*self._same, (len(self._rows), len(self._more))]:
            for place in range(large_done, large):  # in the larger pass alone
                if self._more["operator"][place] >= 0:
                    out.append(self._large[place : place + 1])
                out += added.get(place, [])
            out.append(self._small[small_done : small + 1])  # in the smaller pass alone, and both
            small_done = small + 1
            large_done = large + 1
        return np.concatenate(out)

    def _added(self) -> dict[int, list[Rows]]:
        """Return the events of the larger pass alone, by place.

        Without those that take the place of another repetition's.
        """
        tensor = int(self._rows["tensor"].max(initial=-1)) + 1
        found: dict[int, list[Rows]] = {}
        for place in self._run:
            if not self._more["alloc"][place]:
                continue
            end = self._end(int(self._more["tensor"][place]))
            # What lasts until a loop's end is used there, in a run of common rows after this one:
            # that tells it from scratch.
            if end is not None and (end < place or self._run[end] == self._run[place]):
                continue
            event = self._large[place : place + 1].copy()
            event["tensor"] = tensor
            found.setdefault(place, []).append(event)
            if end is not None:
                last = self._large[end : end + 1].copy()
                last["tensor"] = tensor
                last["size"] = event["size"]
                found.setdefault(end, []).append(last)
            tensor += 1
        return found

    def _end(self, tensor: int) -> int | None:
        """Return where the larger pass alone frees `tensor`, or what takes its place there.

        Where both passes free it, the smaller one frees a tensor of its own, whose partner in the
        larger pass lives on in its stead. None: it stays.
        """
        end = self._free_place.get(tensor)
        while end is not None and end in self._in_small:
            instead = self._partner.get(int(self._rows["tensor"][self._in_small[end]]))
            if instead is None:
                return None
            end = self._free_place.get(instead)
        return end


def _without_sizes(rows: Rows) -> Rows:
    """Return `rows` that take nothing."""
    found = rows.copy()
    for name in AFFINE_FIELDS:
        found[name] = 0.0
    return found


def _unzip(pairs: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [one for one, _ in pairs], [other for _, other in pairs]
