"""A loop of a user's own on the ranks of a pool: its beginning, and the values of its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from toys import build

import zrun_core


def start() -> zrun_core.Run:
    """Begin, or return the run that has begun."""
    return zrun_core.init(threads=1, patience_s=3.0)


def sharded(stage: int, factory: Callable[[], nn.Module] = build, **options: Any) -> nn.Module:
    """Begin, and shard a model at a ZeRO stage."""
    start()
    return zrun_core.shard(factory, zero={"stage": stage, "bucket": 1 << 14}, **options)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the whole parameters by name."""
    with zrun_core.gathered(model):
        return {name: param.float().numpy().copy() for name, param in model.named_parameters()}
