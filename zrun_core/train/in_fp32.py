"""Run code that is written for halves in fp32, operator by operator.

    with InFp32():
        loss = model(batch)     # parameters in bf16: their values; activations in fp32

What two ways to compute the same may differ by is then rounding in fp32, a hundredth of what halves
would hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_HALVES = (torch.bfloat16, torch.float16)


class InFp32(TorchDispatchMode):
    """Has each operator read halves as fp32, and return fp32 where halves are asked for.

    Views of a half, and what is written to one, stay halves: a buffer keeps what it is given.
    """

    changes_formats = True  # ghosts of a pipeline ask for it

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not _views_or_writes(func):
            return func(*tree_map(_widened, args), **tree_map(_widened, kwargs))
        written = next((args[at] for at in _places_written(func) if at < len(args)), None)
        if written is None or not _is_half(written):
            return func(*args, **kwargs)
        narrowed = partial(_narrowed, dtype=written.dtype)
        return func(*tree_map(narrowed, args), **tree_map(narrowed, kwargs))


@cache
def _views_or_writes(func: Any) -> bool:
    return any(argument.alias_info is not None for argument in func._schema.arguments)


@cache
def _places_written(func: Any) -> list[int]:
    arguments = enumerate(func._schema.arguments)
    return [
        at for at, each in arguments if each.alias_info is not None and each.alias_info.is_write
    ]


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALVES


def _widened(value: Any) -> Any:
    """Return a half, or its format, as fp32; all else as it is."""
    if isinstance(value, torch.dtype):
        return torch.float32 if value in _HALVES else value
    return value.float() if _is_half(value) else value


def _narrowed(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor in fp32 in the format of what it is written to."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        return value.to(dtype)
    return value
