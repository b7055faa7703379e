"""Put back the buffers that forward passes write when a step is skipped.

Such as BatchNorm's running statistics. A step is skipped because a number was not finite, and the
forward pass that made it has folded that number into the statistics already. They would stay NaN
for good, and go into every checkpoint from then on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn


class RunningBuffers:
    """Keeps a copy of what passes write, from the beginning of a step to its update.

    In the first step all buffers are copied, and those that it writes are copied from then on: most
    models have none, and rotary tables and masks are never written. The copies of one dtype lie in
    one tensor, so that on a GPU the cost is a few kernels and no wait, however many there are.
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
        places: Sequence[int] = range(len(self._places))
        if self._written is not None:
            places = self._written
        found = [self._buffer(place) for place in places]
        self._copied = [buffer for buffer in found if buffer is not None and buffer.numel()]
        self._versions = {id(buffer): buffer._version for buffer in self._copied}
        self._copies = {dtype: _flat(group) for dtype, group in _by_dtype(self._copied).items()}

    def end_step(self, skipped: torch.Tensor) -> None:
        """Put back what was written since `begin_step`, if the step was skipped.

        Args:
            skipped: 0-d bool, on any device.
        """
        if self._written is None:
            self._written = self._find_written()
        if not self._copied:
            return
        if skipped.device.type == "cpu" and not bool(skipped):
            return
        with torch.no_grad():
            for dtype, group in _by_dtype(self._copied).items():
                is_skipped = skipped.to(group[0].device)
                right = torch.where(is_skipped, self._copies[dtype], _flat(group))
                torch._foreach_copy_(group, _split_like(right, group))

    def _find_written(self) -> list[int]:
        """Return the places of the buffers that the first step has written."""
        untouched = set()
        for dtype, group in _by_dtype(self._copied).items():
            copies = _split_like(self._copies[dtype], group)
            for buffer, before in zip(group, copies, strict=True):
                # The version does not count what is written through `.data`: compare values too.
                same_version = buffer._version == self._versions[id(buffer)]
                if same_version and torch.equal(buffer, before):
                    untouched.add(id(buffer))
        written = []
        for place in range(len(self._places)):
            found = self._buffer(place)
            if found is not None and id(found) not in untouched:
                written.append(place)
        return written

    def _buffer(self, place: int) -> torch.Tensor | None:
        """Return the buffer that is registered there now; None: none with memory of its own."""
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


def _split_like(flat: torch.Tensor, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of `flat` [total numel], in the shapes of `buffers`."""
    parts = flat.split([buffer.numel() for buffer in buffers])
    return [part.view(buffer.shape) for part, buffer in zip(parts, buffers, strict=True)]


def _flat(buffers: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
