"""Operators of ours inside of a block that torch's selective checkpoint recomputes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

_CHECKPOINT_MODES = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)


@contextmanager
def beside_checkpoints() -> Iterator[None]:
    """Run operators of ours inside that no selective checkpoint sees.

    It counts those of a block, and a recomputation gathers other units than the forward did.
    """
    if any(isinstance(mode, _CHECKPOINT_MODES) for mode in _get_current_dispatch_mode_stack()):
        with _disable_current_modes():
            yield
        return
    yield
