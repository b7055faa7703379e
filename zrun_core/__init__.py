"""The training runtime: ZeRO stages 0-3 over a user's own module, in `zrun train` or an own loop.

What is in `__all__` is for such a loop, started by torchrun, and documented in docs/library.md. All
else is private. Nothing is imported before it is used: torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zrun_core.errors import ZrunError as ZrunError
    from zrun_core.library.grad_scaler import GradScaler as GradScaler
    from zrun_core.library.model import evaluation as evaluation
    from zrun_core.library.model import forward as forward
    from zrun_core.library.model import gathered as gathered
    from zrun_core.library.model import shard as shard
    from zrun_core.library.optimizer import Optimizer as Optimizer
    from zrun_core.library.optimizer import optimizer as optimizer
    from zrun_core.library.run import Run as Run
    from zrun_core.library.run import init as init
    from zrun_core.library.saving import Loaded as Loaded
    from zrun_core.library.saving import finish as finish
    from zrun_core.library.saving import load as load
    from zrun_core.library.saving import save as save
    from zrun_core.library.verifying import Verified as Verified
    from zrun_core.library.verifying import verify as verify

_HOMES = {
    "init": "library.run",
    "Run": "library.run",
    "shard": "library.model",
    "forward": "library.model",
    "gathered": "library.model",
    "evaluation": "library.model",
    "optimizer": "library.optimizer",
    "Optimizer": "library.optimizer",
    "GradScaler": "library.grad_scaler",
    "save": "library.saving",
    "finish": "library.saving",
    "load": "library.saving",
    "Loaded": "library.saving",
    "verify": "library.verifying",
    "Verified": "library.verifying",
    "ZrunError": "errors",
}

__all__ = [
    "GradScaler",
    "Loaded",
    "Optimizer",
    "Run",
    "Verified",
    "ZrunError",
    "evaluation",
    "finish",
    "forward",
    "gathered",
    "init",
    "load",
    "optimizer",
    "save",
    "shard",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"zrun_core has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"zrun_core.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
