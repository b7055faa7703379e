"""Gradients that a forward itself asks for, as of a gradient penalty.

(grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zrun_core.spine.tracebacks import user_location

_ENGINE = "_engine_run_backward"  # of torch.autograd: all that asks for gradients goes through it


@contextmanager
def seeing_gradients(see: Callable[..., None]) -> Iterator[None]:
    """Call `see` with the arguments of each request for gradients inside, before it is met."""
    engine = getattr(torch.autograd, _ENGINE)

    def run(*args: Any, **kwargs: Any) -> Any:
        see(*args, **kwargs)
        return engine(*args, **kwargs)

    setattr(torch.autograd, _ENGINE, run)
    try:
        yield
    finally:
        setattr(torch.autograd, _ENGINE, engine)


@contextmanager
def noting_gradients() -> Iterator[list[str]]:
    """Yield the file and line of each request for gradients inside."""
    places: list[str] = []
    with seeing_gradients(lambda *_, **__: places.append(user_location(sys._getframe(1)))):
        yield places
