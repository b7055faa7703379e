"""Slurm's short form of host names: `expand("node[001-003,7],gpu-[1-2]-[a,b]")`.

It is read here and not by `scontrol show hostnames`, which containers often lack.
"""

from __future__ import annotations

import re
from itertools import product

MAX_HOSTS = 1 << 16

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_WORD = re.compile(r"[A-Za-z0-9_.-]+")


def expand(text: str) -> list[str]:
    """Return the names that `text` stands for, as it lists them.

    Raises:
        ValueError: it is no such list, or one of more than `MAX_HOSTS` names; the message gives the
            column.
    """
    names: list[str] = []
    place = 0
    while True:
        parts, end = _item(text, place, MAX_HOSTS - len(names))
        names += ("".join(choice) for choice in product(*parts))
        if end == len(text):
            return names
        if text[end] != ",":
            raise ValueError(f"column {end + 1}: {text[end]!r} does not belong here")
        place = end + 1


def _item(text: str, place: int, limit: int) -> tuple[list[list[str]], int]:
    """Parse the name that begins at `place`.

    Returns:
        The choices for each of its parts, and where it ends.
    """
    parts: list[list[str]] = []
    end = place
    total = 1
    while match := _PIECE.match(text, end):
        inside, literal = match.groups()
        if literal is None:
            parts.append(_choices(inside, match.start(1)))
        elif _WORD.fullmatch(literal):
            parts.append([literal])
        else:
            raise ValueError(f"column {end + 1}: {literal[:60]!r} is not a part of a host name")
        end = match.end()
        total *= len(parts[-1])
        if total > limit:
            raise ValueError(f"column {place + 1}: more than {MAX_HOSTS} hosts")
    if not parts:
        raise ValueError(f"column {place + 1}: a host name is missing")
    return parts, end


def _choices(inside: str, place: int) -> list[str]:
    """Return the choices in a pair of brackets."""
    found: list[str] = []
    for choice in inside.split(","):
        if match := _RANGE.fullmatch(choice):
            first = int(match[1])
            last = int(match[2])
            width = len(match[1])  # 001 has leading zeros
            if last < first:
                raise ValueError(f"column {place + 1}: {choice} counts down")
            if last - first + len(found) >= MAX_HOSTS:
                raise ValueError(f"column {place + 1}: more than {MAX_HOSTS} hosts")
            found += (f"{number:0{width}}" for number in range(first, last + 1))
        elif re.fullmatch(r"[A-Za-z0-9_]+", choice):
            found.append(choice)
        else:
            raise ValueError(
                f"column {place + 1}: {choice[:60]!r} is neither a number, a range nor a word"
            )
        place += len(choice) + 1
    return found


def natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a key that sorts node2 before node10."""
    key = []
    for part in re.findall(r"[0-9]+|[^0-9]+", name):
        if part[0] in "0123456789":
            key.append((int(part), ""))
        else:
            key.append((-1, part))
    return key, name
