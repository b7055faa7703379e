"""Numbers as a person reads them in passing: `count(18300) == "18.3k"`, `duration(17000) == "4h43m"`.

Bytes are always in binary units that are written out, KiB, MiB, GiB or TiB: behind the number, or
where a table has one unit for all its sizes, in its head. The letters k, M, B and T count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zrun_core.spine.events import Event
from zrun_core.spine.sizes import format_size

_BLOCKS = "▁▂▃▄▅▆▇█"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_GIB = _UNITS.index("GiB")
_ASCII_BLOCKS = "_.-=+*#@"


def count(value: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def seconds(value: float) -> str:
    """The time of one step."""
    return f"{value * 1000:.0f}ms" if value < 0.1 else f"{value:.2f}s"


@dataclass(frozen=True)
class Unit:
    """One unit for all sizes of a table, whose head names it."""

    name: str
    num_bytes: int
    digits: int

    @classmethod
    def of(cls, sizes: Iterable[float]) -> Unit:
        """The largest unit in which the largest of `sizes` is a number of two digits or more."""
        largest = max(map(abs, sizes), default=0)
        exponent = max(n for n in range(1, len(_UNITS)) if n == 1 or largest >= 10 * 1024**n)
        return cls(_UNITS[exponent], 1024**exponent, 1 if exponent < _GIB else 2)

    def text(self, num_bytes: float) -> str:
        return f"{num_bytes / self.num_bytes:.{self.digits}f}"


def metrics(values: Mapping[str, Any]) -> str:
    """Numbers with their names, in the order in which they are given."""
    return "  ".join(f"{name} {float(value):.6g}" for name, value in values.items())


def foretold(event: Event) -> str:
    """An `estimate` event in words: what was measured of memory and time, and what had been predicted."""
    predicted, measured = event.get("predicted") or {}, event.get("measured") or {}
    parts = []
    if measured.get("peak_bytes") and predicted.get("peak_bytes"):
        was, said = int(measured["peak_bytes"]), int(predicted["peak_bytes"])
        foretold = f"predicted {_beside(was, said)}"
        if predicted.get("source") == "guessed":
            foretold = f"guessed {format_size(said)}"
        elif predicted.get("is_bound") and said >= was:
            foretold = f"at most {format_size(said)} predicted, of the longest samples"
        parts.append(f"peak {format_size(was)} in tensors ({foretold})")
        if taken := measured.get("process_bytes"):
            guess = (
                f" ({_beside(taken, predicted['device_bytes'])})"
                if predicted.get("device_bytes")
                else ""
            )
            parts[-1] += f", {format_size(int(taken))} in the process{guess}"
    if measured.get("step_s") and predicted.get("step_s"):
        took, expected = float(measured["step_s"]), float(predicted["step_s"])
        low, high = (float(predicted.get(name) or expected) for name in ("low_s", "high_s"))
        guess = "" if predicted.get("calibrated") else ", not calibrated"
        parts.append(
            f"step {seconds(took)}, predicted {seconds(expected)} ({seconds(low)} to {seconds(high)}{guess})"
        )
    return "; ".join(parts)


def _beside(measured: float, predicted: float) -> str:
    """A prediction in bytes and its error: `257.1 MiB, -0.0%`."""
    return f"{format_size(int(predicted))}, {(predicted - measured) / measured:+.1%}"


def sparkline(values: Sequence[float], width: int, ascii_only: bool) -> str:
    """The shape of a series in `width` characters, each the mean of its share of the values."""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    width = min(width, len(values))
    if width <= 0:
        return ""
    edges = [len(values) * index // width for index in range(width + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((mean - low) * scale)] for mean in means)


def share_bar(shares: Sequence[float], letters: str, width: int) -> list[tuple[str, int]]:
    """How many of `width` characters each share gets: rounded so that they fill it, nothing lost between them."""
    edges, total = [0], 0.0
    for share in shares:
        total += share
        edges.append(round(min(total, 1.0) * width))
    return [
        (letter, b - a) for letter, (a, b) in zip(letters, itertools.pairwise(edges), strict=True)
    ]
