"""Checks of the numbers and paths that a user's own loop gives to the library."""

from __future__ import annotations

import math
import operator
import os
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError

from zrun_core.errors import JobError
from zrun_core.spine.sections.section import Section

_Section = TypeVar("_Section", bound=Section)


def whole(function: str, name: str, value: Any, least: int | None, write: str) -> int:
    """Return an argument as an int.

    Args:
        function, name: of the argument, for the message.
        value: of the user.
        least: None: any whole number will do.
        write: what to write instead; the end of the message.

    Raises:
        JobError: it is no whole number, or one below `least`.
    """
    number = None
    if not isinstance(value, bool):
        with suppress(TypeError):
            number = operator.index(value)
    if number is None or (least is not None and number < least):
        raise JobError(f"{function}({name}={value!r}): write {write}")
    return number


def number(
    function: str, name: str, value: Any, write: str, *, above: float | None = None
) -> float:
    """Return an argument as a finite float.

    Args:
        function, name: of the argument, for the message.
        value: of the user.
        write: what to write instead; the end of the message.
        above: None: any finite number will do.

    Raises:
        JobError: it is none, or not above `above`.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (above is not None and not value > above):
        raise JobError(f"{function}({name}={value!r}): write {write}")
    return float(value)


def folder(function: str, value: Any, name: str = "folder") -> Path:
    """Return an argument as a path without symbolic links: one folder is one path.

    Args:
        function, name: of the argument, for the message.
        value: of the user.

    Raises:
        JobError: it is no path.
    """
    path = None
    if isinstance(value, str | os.PathLike):
        path = os.fspath(value)
    if not isinstance(path, str) or not path or "\0" in path:
        raise JobError(f"{function}({name}={value!r}): write the path of a folder")
    return Path(os.path.realpath(path))


def scalar(function: str, name: str, value: Any, *, is_weight: bool = False) -> torch.Tensor:
    """Return an argument as a 0-d float64 tensor, on its device; the value of a tensor is not read.

    Args:
        function, name: of the argument, for the message.
        value: a number, or a tensor of one element.
        is_weight: a number must be finite, and 0 or more.

    Raises:
        JobError: it is not one number.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise JobError(
                f"{function}({name}=...): a tensor of shape {tuple(value.shape)} "
                "where one number is needed"
            )
        return value.detach().view(()).double()
    if not isinstance(value, Real):
        raise JobError(f"{function}({name}={value!r}): write a number")
    if is_weight and not (math.isfinite(value) and float(value) >= 0):
        raise JobError(f"{function}({name}={value!r}): write a finite number, 0 or more")
    return torch.tensor(float(value), dtype=torch.float64)


def section(function: str, name: str, kind: type[_Section], value: Any) -> _Section:
    """Return an argument, in the short form or as a mapping, as a section of a job.

    Args:
        function, name: of the argument, for the message.
        kind: of the section.
        value: of the user.

    Raises:
        JobError: it is not one.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"] and first["type"] == "model_type":
            short = ""
            if kind.short:
                short = f"{kind.short[1].__name__} or "
            write = f"write {short}a mapping with some of {', '.join(kind.model_fields)}"
            raise JobError(f"{function}({name}={value!r}): {write}") from None
        problem = first["msg"]
        place = ".".join(str(part) for part in first["loc"])
        if place:
            problem = f"{place}: {problem}"
        raise JobError(f"{function}({name}={value!r}): {problem}") from None
