"""Keep functions out of graphs of `torch.compile`, without a compiler where nothing is compiled.

`torch.compiler.disable` imports `torch._dynamo`: 5 s of a core and 72 MB of each rank (torch 2.13).
A process whose job compiles, or whose user's code does, has it by the time that functions are
marked, as models are divided after they are built.
"""

from __future__ import annotations

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


def outside_graphs(function: _Function) -> _Function:
    """Return a function that breaks graphs where it is called, if this process compiles any.

    Args:
        function: that communicates, changes random streams, or keeps state between calls.
    """
    if _COMPILER not in sys.modules:
        return function
    outside: _Function = torch.compiler.disable(function)
    return outside
