"""Releases: zrun's own, and the oldest ones of torch and transformers that it is tested with."""

from __future__ import annotations

import re
from importlib import metadata

from zrun_core.errors import PreflightError

LOWEST = {"torch": "2.11", "transformers": "5.23"}  # as in pyproject.toml


def own_release() -> str:
    """Return the version of zrun; "source" where it runs from a folder, without being installed."""
    try:
        return metadata.version("zrun")
    except metadata.PackageNotFoundError:
        return "source"


def check_release(package: str, version: str) -> None:
    """Refuse a release that is older than the lowest one.

    Args:
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
