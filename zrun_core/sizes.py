"""Byte counts, and numbers of things, as people write them.

parse_size("64MiB")         67108864
format_size(67108864)       "64.0 MiB"
several(2, "host")          "2 hosts"
"""

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
# The texts that `parse_size` takes, for those who have a pattern only.
SIZE_PATTERN = r"^\s*\d+(\.\d+)?\s*(([kKmMgGtT][iI]?)?[bB])?\s*$"


def parse_size(text: str | int) -> int:
    """Return the bytes that `text` names.

    It is an integer, or a number with one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB.

    Raises:
        ValueError: the text is not a size.
    """
    if isinstance(text, bool):
        raise ValueError(f"{text} is not a size: write bytes with a unit, such as 64MiB")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"{text} is negative: a size is a number of bytes")
        return text
    is_short = len(text) <= 40
    match = _SIZE.fullmatch(text) if is_short else None
    if match is None or match.group(2).lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write bytes with a unit, such as 64MiB or 1.5GB")
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])


def format_size(num_bytes: float) -> str:
    """Return a byte count in the largest binary unit that keeps it at 1 or above: "1.5 KiB"."""
    value = float(num_bytes)
    if abs(value) < 1024:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def several(count: int, noun: str) -> str:
    """Return `1 host`, `2 hosts`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"
