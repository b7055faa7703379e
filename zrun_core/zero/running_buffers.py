"""Buffers that forward passes write, such as BatchNorm's running statistics: a skipped step puts them back.

A step is skipped because a number was not finite, and the forward pass that made it has folded that number into the
statistics already. They would stay NaN for good, and go into every checkpoint from then on.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn


class RunningBuffers:
    """Keeps a copy of what passes write, from the beginning of a step to its update.

    Which buffers those are shows in the first step, for which all are copied: most models have none, and rotary tables
    and masks are never written. The copies of one dtype lie in one tensor, so that on a GPU the cost is a few kernels
    and no wait, however many buffers there are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (inner, key) for inner in module.modules() for key in inner._buffers if key is not None
        ]
        self._written: list[int] | None = None  # places; None: not known before the first step
        self._copied: list[torch.Tensor] = []
        self._versions: dict[int, int] = {}  # by identity, in the first step
        self._copies: dict[torch.dtype, torch.Tensor] = {}

    def begin_step(self) -> None:
        """Copy what the step's passes may write."""
        wanted = range(len(self._places)) if self._written is None else self._written
        found = [self._buffer(place) for place in wanted]
        self._copied = [buffer for buffer in found if buffer is not None and buffer.numel()]
        self._versions = {id(buffer): buffer._version for buffer in self._copied}
        self._copies = {dtype: _flat(group) for dtype, group in _by_dtype(self._copied).items()}

    def end_step(self, skipped: torch.Tensor) -> None:
        """Put back what was written since `begin_step`, if `skipped`, a 0-d bool tensor, is true."""
        if self._written is None:
            self._learn()
        if not self._copied:
            return
        if skipped.device.type == "cpu" and not bool(skipped):
            return
        with torch.no_grad():
            for dtype, group in _by_dtype(self._copied).items():
                right = torch.where(skipped.to(group[0].device), self._copies[dtype], _flat(group))
                parts = right.split([buffer.numel() for buffer in group])
                pairs = zip(parts, group, strict=True)
                torch._foreach_copy_(group, [part.view(buffer.shape) for part, buffer in pairs])

    def _learn(self) -> None:
        """Find which buffers the first step has written; only they are copied from now on."""
        untouched = set()
        for dtype, group in _by_dtype(self._copied).items():
            parts = self._copies[dtype].split([buffer.numel() for buffer in group])
            for buffer, part in zip(group, parts, strict=True):
                # The version does not count what is written through `.data`.
                if buffer._version == self._versions[id(buffer)] and torch.equal(
                    buffer.reshape(-1), part
                ):
                    untouched.add(id(buffer))
        found = [self._buffer(place) for place in range(len(self._places))]
        self._written = [
            place
            for place, buffer in enumerate(found)
            if buffer is not None and id(buffer) not in untouched
        ]

    def _buffer(self, place: int) -> torch.Tensor | None:
        module, key = self._places[place]
        buffer = module._buffers.get(key)
        if buffer is None or buffer.is_meta or buffer.is_inference():
            return None
        return buffer


def _by_dtype(buffers: list[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    groups = defaultdict(list)
    for buffer in buffers:
        groups[buffer.dtype].append(buffer)
    return groups


def _flat(buffers: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
