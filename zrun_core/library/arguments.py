"""Numbers and paths that a user's own loop gives to the library, looked at where they enter."""

from __future__ import annotations

import math
import operator
import os
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from zrun_core.errors import JobError


def whole(function: str, name: str, value: Any, least: int | None, write: str) -> int:
    """Argument `name` of `function` as an int.

    Raises:
        JobError: it is no whole number, or one below `least`. The message ends with `write`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise JobError(f"{function}({name}={value!r}): write {write}")
    return number


def number(
    function: str, name: str, value: Any, write: str, *, above: float | None = None
) -> float:
    """Argument `name` of `function` as a finite float.

    Raises:
        JobError: it is none, or not above `above`. The message ends with `write`.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (above is not None and not value > above):
        raise JobError(f"{function}({name}={value!r}): write {write}")
    return float(value)


def folder(function: str, value: Any, name: str = "folder") -> Path:
    """Argument `name` of `function`, without symbolic links: one folder is one path.

    Raises:
        JobError: it is no path.
    """
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise JobError(f"{function}({name}={value!r}): write the path of a folder")
    return Path(os.path.realpath(path))


def scalar(function: str, name: str, value: Any, *, is_weight: bool = False) -> torch.Tensor:
    """Argument `name` of `function` as a 0-d float64 tensor, on the device where it is; a tensor's value is not read.

    Args:
        is_weight: a number must be finite, and 0 or more.

    Raises:
        JobError: it is not one number.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise JobError(
                f"{function}({name}=...): a tensor of shape {tuple(value.shape)} where one number is needed"
            )
        return value.detach().view(()).double()
    if not isinstance(value, Real):
        raise JobError(f"{function}({name}={value!r}): write a number")
    if is_weight and not (math.isfinite(value) and float(value) >= 0):
        raise JobError(f"{function}({name}={value!r}): write a finite number, 0 or more")
    return torch.tensor(float(value), dtype=torch.float64)
