"""Numbers as a person reads them in passing.

    count(18300) == "18.3k"
    duration(17000) == "4h43m"

Bytes are always in binary units that are written out, KiB, MiB, GiB or TiB: behind the number, or
where a table has one unit for all its sizes, in its head. The letters k, M, B and T count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zrun_core.sizes import format_size
from zrun_core.spine.events import Event

_BLOCKS = "▁▂▃▄▅▆▇█"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_GIB = _UNITS.index("GiB")
_ASCII_BLOCKS = "_.-=+*#@"


def count(value: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.99995 * limit:  # what would be 1000.0 of the next smaller unit
            return f"{value / limit:.1f}{unit}"
    if value == round(value):
        return f"{value:.0f}"
    return f"{value:.1f}"


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    if minutes:
        return f"{minutes}m{rest:02}s"
    return f"{rest}s"


def seconds(value: float) -> str:
    """Return the time of one step as text."""
    if value < 0.1:
        return f"{value * 1000:.0f}ms"
    return f"{value:.2f}s"


def flops(tera: float) -> tuple[str, str]:
    """Return 10^12 operations per second as a number, and the letter of a unit that suits it."""
    for scale, unit in ((1.0, "T"), (1e3, "G")):
        if tera * scale >= 1e-3:
            return f"{tera * scale:.3g}", unit
    return f"{tera * 1e6:.3g}", "M"


@dataclass(frozen=True)
class Unit:
    """One unit for all sizes of a table, whose head names it."""

    name: str
    num_bytes: int
    digits: int

    @classmethod
    def of(cls, sizes: Iterable[float], least: int = 10) -> Unit:
        """Return the largest unit in which the largest of `sizes` is `least` or more."""
        largest = max(map(abs, sizes), default=0)
        exponent = 1
        while exponent + 1 < len(_UNITS) and largest >= least * 1024 ** (exponent + 1):
            exponent += 1
        digits = 1
        if exponent >= _GIB:
            digits = 2
        return cls(_UNITS[exponent], 1024**exponent, digits)

    def text(self, num_bytes: float) -> str:
        return f"{num_bytes / self.num_bytes:.{self.digits}f}"


def metrics(values: Mapping[str, Any]) -> str:
    """Return numbers with their names, in the order in which they are given."""
    return "  ".join(f"{name} {float(value):.6g}" for name, value in values.items())


def foretold(event: Event) -> str:
    """Return an `estimate` event in words: memory and time as measured, and as predicted."""
    predicted = event.get("predicted") or {}
    measured = event.get("measured") or {}
    parts = []
    if measured.get("peak_bytes") and predicted.get("peak_bytes"):
        was = int(measured["peak_bytes"])
        said = int(predicted["peak_bytes"])
        foretold = f"predicted {_beside(was, said)}"
        if predicted.get("source") == "states alone":
            foretold = f"at least {format_size(said)} predicted"
        elif predicted.get("is_bound") and said >= was:
            foretold = f"at most {format_size(said)} predicted, of the longest samples"
        parts.append(f"peak {format_size(was)} in tensors ({foretold})")
        if taken := measured.get("process_bytes"):
            guess = ""
            if predicted.get("device_bytes"):
                guess = f" ({_beside(taken, predicted['device_bytes'])})"
            parts[-1] += f", {format_size(int(taken))} in the process{guess}"
    if measured.get("step_s") and predicted.get("step_s"):
        took = float(measured["step_s"])
        expected = float(predicted["step_s"])
        low = float(predicted.get("low_s") or expected)
        high = float(predicted.get("high_s") or expected)
        bounds = f"{seconds(low)} to {seconds(high)}"
        if runs := predicted.get("runs"):
            bounds += ", as the last run took" if runs == 1 else f", as the last {runs} runs took"
        elif not predicted.get("calibrated"):
            bounds += ", not calibrated"
        parts.append(f"step {seconds(took)}, predicted {seconds(expected)} ({bounds})")
    return "; ".join(parts)


def _beside(measured: float, predicted: float) -> str:
    """Return a prediction in bytes and its error: `257.1 MiB, -0.0%`."""
    return f"{format_size(int(predicted))}, {(predicted - measured) / measured:+.1%}"


def sparkline(values: Sequence[float], width: int, ascii_only: bool) -> str:
    """Draw the shape of a series.

    Args:
        width: characters, each the mean of its share of the values; fewer for fewer values.
    """
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    width = min(width, len(values))
    if width <= 0:
        return ""
    edges = [len(values) * index // width for index in range(width + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low = min(means)
    high = max(means)
    scale = 0.0
    if high > low:
        scale = (len(blocks) - 1) / (high - low)
    return "".join(blocks[round((mean - low) * scale)] for mean in means)


def share_bar(shares: Sequence[float], letters: str, width: int) -> list[tuple[str, int]]:
    """Divide a bar of characters among shares.

    Rounding loses nothing: each share begins where the one before it ends.

    Args:
        shares: fractions of 1, in order.
        letters: one for each share.
        width: of the bar, in characters.

    Returns:
        each letter and how many characters it gets.
    """
    edges = [0]
    total = 0.0
    for share in shares:
        total += share
        edges.append(round(min(total, 1.0) * width))
    return [
        (letter, b - a) for letter, (a, b) in zip(letters, itertools.pairwise(edges), strict=True)
    ]
