"""A series over steps in constant memory, however long the run."""

from __future__ import annotations

import math
from dataclasses import dataclass

Point = tuple[int, float]  # a step, and the value there

_MOST_BUCKETS = 500


@dataclass
class _Bucket:
    """Neighbouring steps, of which the extremes are kept: a spike of one step stays visible."""

    low: Point | None = None
    high: Point | None = None
    lacking: Point | None = None  # the first value that is no number
    num_lacking: int = 0

    def take(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            self.lacking = self.lacking or (step, value)
            self.num_lacking += 1
            return
        if self.low is None or value < self.low[1]:
            self.low = step, value
        if self.high is None or value > self.high[1]:
            self.high = step, value

    def merge(self, later: _Bucket) -> None:
        for point in (later.low, later.high):
            if point is not None:
                self.take(*point)
        self.lacking = self.lacking or later.lacking
        self.num_lacking += later.num_lacking

    def points(self) -> list[Point]:
        return sorted({point for point in (self.low, self.high, self.lacking) if point is not None})


class Thinned:
    """At most 1000 points: the lowest and the highest of each of 500 buckets.

    Values that are no numbers are kept apart: one of each bucket, and how many there were.
    """

    def __init__(self) -> None:
        self._stride = 1  # steps of a bucket
        self._buckets: dict[int, _Bucket] = {}  # by step // stride, in order
        self._last: Point | None = None

    def add(self, step: int, value: float) -> None:
        """Take in a value of a step that is not before those that are there."""
        number = step // self._stride
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = _Bucket()
        bucket.take(step, value)
        self._last = step, value
        if len(self._buckets) > _MOST_BUCKETS:
            self._widen()

    def _widen(self) -> None:
        self._stride *= 2
        old = self._buckets
        self._buckets = {}
        for number, bucket in old.items():
            self._buckets.setdefault(number // 2, _Bucket()).merge(bucket)

    def forget(self, step: int) -> None:
        """Drop what came from `step` on: a run that went on makes these steps again."""
        for number in [each for each in self._buckets if each >= step // self._stride]:
            kept = [point for point in self._buckets.pop(number).points() if point[0] < step]
            for point in kept:
                self._buckets.setdefault(number, _Bucket()).take(*point)
        self._last = None

    @property
    def points(self) -> list[Point]:
        """All that is kept, by step; a value that is no number is a gap."""
        found = [point for bucket in self._buckets.values() for point in bucket.points()]
        if self._last is not None and self._last not in found[-3:] and math.isfinite(self._last[1]):
            found.append(self._last)
        return found

    @property
    def num_lacking(self) -> int:
        """Number of values that were no numbers."""
        return sum(bucket.num_lacking for bucket in self._buckets.values())
