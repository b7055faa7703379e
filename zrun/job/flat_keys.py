"""The keys of a job in one level: `optim.lr`, `zero.stage`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat_keys(keys: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return keys by their full names; those without a value are left out.

    Args:
        keys: of a job, as its file has them.
        prefix: of the names, with a dot at its end.
    """
    found: dict[str, Any] = {}
    for key, value in keys.items():
        inside = value
        if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            inside = {str(number): each for number, each in enumerate(value)}
        if isinstance(inside, Mapping):
            found |= flat_keys(inside, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found
