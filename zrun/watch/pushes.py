"""How late gradients came to an asynchronous parameter server, in words and as a histogram."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zrun_core.spine.events import Event

_BINS = 12


@dataclass(frozen=True)
class Pushes:
    """The pushes of a launch.

    Attributes:
        staleness: by updates between pull and push, how many pushes.
        by_rank: how many each rank has made.
        most_ahead: pushes that a rank was ahead of the slowest when it began a share, at most.
        bound: of that; None: there is none.
        left_out: those that were not finite.
    """

    staleness: Counter[int]
    by_rank: tuple[int, ...]
    most_ahead: int
    bound: int | None
    left_out: int = 0

    @property
    def count(self) -> int:
        return self.staleness.total()

    @property
    def mean(self) -> float:
        """Updates between pull and push, on average."""
        return sum(late * number for late, number in self.staleness.items()) / max(1, self.count)


class Bin(NamedTuple):
    """A bar of the histogram: pushes of some stalenesses."""

    first: int
    last: int
    number: int

    @property
    def name(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"


def fold_pushes(before: Pushes | None, event: Event) -> Pushes:
    """Return the pushes of a launch after an event of its newest window."""
    staleness = Counter({int(late): int(n) for late, n in event["staleness"].items()})
    by_rank = tuple(int(number) for number in event["by_rank"])
    most_ahead = int(event["most_ahead"])
    bound = event.get("bound")
    left_out = int(event.get("left_out", 0))
    if before is not None:
        staleness += before.staleness
        by_rank = tuple(a + b for a, b in zip(before.by_rank, by_rank, strict=True))
        most_ahead = max(before.most_ahead, most_ahead)
        left_out += before.left_out
    known = bound if isinstance(bound, int) else None
    return Pushes(staleness, by_rank, most_ahead, known, left_out)


def histogram(pushes: Pushes) -> Sequence[Bin]:
    """Return all pushes in a few bins of one width."""
    most = max(pushes.staleness, default=0)
    width = most // _BINS + 1
    found: Counter[int] = Counter()
    for late, number in pushes.staleness.items():
        found[late // width] += number
    return [
        Bin(start * width, start * width + width - 1, found[start])
        for start in range(most // width + 1)
    ]


def pushes_in_words(pushes: Pushes | None) -> list[str]:
    """Return `mean 1.4`, `most 6`, `by rank 40 20`, `up to 3 ahead of the slowest (no bound)`."""
    if pushes is None or not pushes.count:
        return []
    bound = "no bound" if pushes.bound is None else f"bound {pushes.bound}"
    return [
        f"mean {pushes.mean:.2f} updates",
        f"most {max(pushes.staleness)}",
        f"pushes by rank {' '.join(map(str, pushes.by_rank))}",
        f"up to {pushes.most_ahead} ahead of the slowest ({bound})",
        *([f"{pushes.left_out} left out"] if pushes.left_out else []),
    ]


def numerics_in_words(start: Event | None) -> str:
    """Return the label of a run whose gradients are of older parameters; "" for any other."""
    what = (start or {}).get("changes_numerics")
    return f"changes numerics ({what})" if what else ""
