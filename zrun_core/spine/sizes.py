"""Byte counts as people write them: `parse_size("64MiB") == 67108864`, `format_size(67108864) == "64.0 MiB"`."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes in `text`: an integer, or a number with one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB.

    Raises:
        ValueError: the text is not a size.
    """
    if isinstance(text, bool):
        raise ValueError(f"{text} is not a size: write bytes with a unit, such as 64MiB")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"{text} is negative: a size is a number of bytes")
        return text
    match = _SIZE.fullmatch(text) if len(text) <= 40 else None
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size: write bytes with a unit, such as 64MiB or 1.5GB")
    return int(float(match.group(1)) * unit)


def format_size(num_bytes: float) -> str:
    """A byte count in the largest binary unit that keeps it at 1 or above: `format_size(1536) == "1.5 KiB"`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
