"""What a rank has sent to others in its steps, by axis, as events tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from zrun_core.distributed.comm import TrafficKey
from zrun_core.memory.tensors import TENSOR
from zrun_core.pipeline.messages import PIPE

# What goes to other stages of a pipeline, by the axis of the groups that carry it.
_CARRIED = {PIPE: "activations", "pipe_back": "gradients"}


class SentBytes:
    """Bytes that a rank has sent in the steps of this process.

    What a model's layers exchange, and what its stages hand on, follow from the user's forward:
    they are told apart from what follows from the layouts.
    """

    def __init__(self) -> None:
        self._by_kind: Counter[str] = Counter()  # of parameters and their gradients
        self._apart: dict[str, Counter[str]] = {TENSOR: Counter(), PIPE: Counter()}
        self._micro_batches = 0

    def add(self, sent: Mapping[TrafficKey, int], micro_batches: int) -> None:
        """Add a step of so many micro-batches of this rank."""
        self._micro_batches += micro_batches
        for key, num_bytes in sent.items():
            if key.kind == "send" and key.axis in _CARRIED:
                self._apart[PIPE][_CARRIED[key.axis]] += num_bytes
            elif key.axis == TENSOR:
                self._apart[TENSOR][key.kind] += num_bytes
            else:
                self._by_kind[key.kind] += num_bytes

    def beside(self, expected: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Return the field `traffic` of an `end` event.

        Args:
            expected: bytes by kind of collective, of parameters and their gradients.
        """
        found: dict[str, dict[str, Any]] = {
            kind: {"measured_bytes": self._by_kind[kind], "expected_bytes": num_bytes}
            for kind, num_bytes in expected.items()
        }
        for axis, by_kind in self._apart.items():
            sent = {kind: num_bytes for kind, num_bytes in by_kind.items() if num_bytes}
            if sent:
                found[axis] = {"measured_bytes": sum(sent.values()), "by_kind": sent}
        return found

    def to_other_stages(self) -> dict[str, int]:
        """Return what went to other stages of a pipeline, and of how many micro-batches."""
        return {**self._apart[PIPE], "micro_batches": self._micro_batches}
