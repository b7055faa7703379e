"""Keep functions out of graphs of `torch.compile`, without a compiler where nothing is compiled.

`torch.compiler.disable` imports `torch._dynamo`: 5 s of a core and 72 MB of each rank (torch 2.13).
A process whose job compiles, or whose user's code does, has it by the time that functions are
marked, as models are divided after they are built.

`torch._check` imports the compiler's symbolic shapes, and with them sympy, 31 MB of each rank, to
find out that True holds: attention with a mask of paddings asks it in its first forward.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_COMPILER = "torch._dynamo"


def load_compiler() -> None:
    """Import the compiler: functions that are marked from here on stay out of graphs."""
    importlib.import_module(_COMPILER)


def check_without_compiler() -> None:
    """Let `torch._check` of what is plainly true import nothing, in this process.

    A compiler that is loaded has its own way with this function, and keeps it.
    """
    check: Callable[..., None] | None = getattr(torch, "_check_with", None)
    if check is None or _COMPILER in sys.modules or hasattr(check, "__wrapped__"):
        return

    @functools.wraps(check)
    def check_with(error_type: type[Exception], condition: Any, *message: Any) -> None:
        if condition is not True:
            check(error_type, condition, *message)

    vars(torch)["_check_with"] = check_with


def outside_graphs(function: _Function) -> _Function:
    """Return a function that breaks graphs where it is called, if this process compiles any.

    Args:
        function: that communicates, changes random streams, or keeps state between calls.
    """
    if _COMPILER not in sys.modules:
        return function
    outside: _Function = torch.compiler.disable(function)
    return outside
