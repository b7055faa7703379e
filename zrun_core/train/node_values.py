"""What the nodes of a forward return, as numbers by which two forwards are compared.

[Note: what is compared of a node]
Of the first tensor that it returns, the 2-norm, and the sums of `tensor_sums.py`, which see
features in another order too. Of the whole tensor the same is noted of each rank's slice of the
sequence, where that could be one; of other slices the norms of the group are added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from zrun_core.stages.node_calls import Node
from zrun_core.train.tensor_sums import NUM_SUMS, distance, sums_of
from zrun_core.zero.passes.module_hooks import tensors_in

_ALIKE = 1e-5  # how far numbers are apart, beside the largest, that differ by rounding alone


class Seen(NamedTuple):
    """What a node has returned: see [Note: what is compared of a node].

    Attributes:
        name: of the node.
        shape: of the tensor.
        norm: 2-norm.
        sums: see the note.
        slices: sums of each rank's slice of the sequence; empty: there are none.
        is_alike: all of its tokens are the same.
    """

    name: str
    shape: Sequence[int]
    norm: float
    sums: Sequence[float]
    slices: Sequence[Sequence[float]]
    is_alike: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Watch:
    """Notes what the nodes of a forward return, by the number of the call."""

    def __init__(self, num_slices: int = 1) -> None:
        """
        Args:
            num_slices: of the sequence, of each of which the sums are noted too.
        """
        self._num_slices = num_slices
        self._seen: dict[int, tuple[str, torch.Size, torch.Tensor]] = {}

    def __call__(self, number: int, node: Node, output: Any) -> None:
        """Note what a call returns."""
        first = next((t for t in tensors_in(output) if t.is_floating_point()), None)
        if first is None or not first.numel():
            return
        values = first.detach().double()
        tokens = values.flatten(0, -2) if values.dim() > 1 else values.view(-1, 1)
        distance = (tokens - tokens[0]).abs().max()
        parts = [values]
        if values.dim() > 1 and self._num_slices > 1 and not values.shape[1] % self._num_slices:
            parts += values.chunk(self._num_slices, dim=1)
        own = torch.stack([values.norm(), distance, values.abs().max()])
        numbers = torch.cat([own, *(sums_of(part.flatten()) for part in parts)])
        self._seen[number] = node.name, first.shape, numbers

    def read(self) -> dict[int, Seen]:
        """Return all of it."""
        found = {}
        for number, (name, shape, numbers) in self._seen.items():
            norm, distance, largest, *rest = numbers.tolist()
            sums, *slices = (rest[at : at + NUM_SUMS] for at in range(0, len(rest), NUM_SUMS))
            is_alike = distance <= _ALIKE * largest and math.prod(shape[:-1]) > 1
            found[number] = Seen(name, list(shape), norm, sums, slices, is_alike)
        return found


def apart(expected: Seen, found: Sequence[Seen]) -> float:
    """Return how much of the norm differs; 0 where that cannot be told."""
    if not math.isfinite(expected.norm):
        return 0.0
    scale = max(expected.norm, 1e-12)
    if found and all(seen.numel == expected.numel for seen in found):
        norm = max(abs(seen.norm - expected.norm) for seen in found)
        tensors = max(distance(seen.sums, expected.sums) for seen in found)
        return max(norm, tensors) / scale
    if has_slices_of_sequence(expected, found):
        pairs = zip(found, expected.slices, strict=True)
        tensors = max(distance(seen.sums, sums) for seen, sums in pairs)
        return tensors / scale
    if sum(seen.numel for seen in found) == expected.numel:  # slices
        norm = math.sqrt(math.fsum(seen.norm**2 for seen in found))
        return abs(norm - expected.norm) / scale
    return 0.0


def has_slices_of_sequence(expected: Seen, found: Sequence[Seen]) -> bool:
    """Return whether each rank, in their order, has returned its equal part of the tokens."""
    if not expected.slices or len(found) != len(expected.slices):
        return False
    batch, tokens, *features = expected.shape
    part = [batch, tokens // len(found), *features]
    return all(list(seen.shape) == part for seen in found)
