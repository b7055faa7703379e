"""The oldest releases of torch and of transformers that zrun is tested with; older are refused."""

from __future__ import annotations

import re

from zrun_core.errors import PreflightError

LOWEST = {"torch": "2.11", "transformers": "5.23"}  # as in pyproject.toml


def check_release(package: str, version: str) -> None:
    """Refuse a release that is older than the lowest one.

    Args:
        package: torch or transformers.
        version: that is installed, such as 2.13.0+cpu.

    Raises:
        PreflightError: it is older.
    """
    lowest = LOWEST[package]
    if _numbers(version) < _numbers(lowest):
        raise PreflightError(
            f"{package} {version} is too old: zrun is tested from {lowest} on: "
            f"pip install '{package}>={lowest}'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a release: a candidate of 2.11 counts as 2.11."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
