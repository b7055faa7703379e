"""What a forward changes outside of nodes, on a stage that runs it once for each of its chunks.

Counters of the model itself, of its loss and the like belong to the micro-batch, not to the chunk:
the forward through the first chunk changes them, and those through the others begin with what that
one began with, and leave no trace.

    chunk 0   micro 0: calls 0 -> 1     micro 1: calls 1 -> 2
    chunk 2                                                       micro 0: 0 -> 1, then 2 again
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from zrun_core.user_code.trial import Attributes, AttributesCopy


class OutsideState(NamedTuple):
    """State of what is outside of nodes.

    Attributes:
        attributes: of modules and of the loss.
        buffers: values of those that forwards change, by place.
    """

    attributes: AttributesCopy
    buffers: dict[int, torch.Tensor]


class Outside:
    """What is outside of the nodes of a model: attributes and buffers."""

    def __init__(self, model: nn.Module, nodes: Sequence[nn.Module], loss: object) -> None:
        """
        Args:
            model: whose forward runs more than once.
            nodes: each of which runs in one chunk only.
            loss: the user's loss function, if there is one.
        """
        inside = {id(module) for node in nodes for module in node.modules()}
        modules = [module for module in model.modules() if id(module) not in inside]
        self._attributes = Attributes(modules, loss)
        self._buffers = [
            buffer
            for module in modules
            for buffer in module._buffers.values()
            if buffer is not None
        ]
        self._changing = set(range(len(self._buffers)))  # all of them, until a forward has run

    def copy(self) -> OutsideState:
        """Return what it is now."""
        buffers = {place: self._buffers[place].clone() for place in self._changing}
        return OutsideState(self._attributes.copy(), buffers)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at which buffers the forward inside changes, and copy no other from now on."""
        before = [buffer._version for buffer in self._buffers]
        yield
        versions = zip(before, self._buffers, strict=True)
        self._changing = {
            place for place, (version, buffer) in enumerate(versions) if buffer._version != version
        }

    @contextmanager
    def as_of(self, state: OutsideState) -> Iterator[None]:
        """Begin a forward inside with an earlier state, and undo what it changes."""
        now = self.copy()
        self._put_back(state)
        try:
            yield
        finally:
            self._put_back(now)

    def _put_back(self, state: OutsideState) -> None:
        self._attributes.put_back(state.attributes)
        with torch.no_grad():
            for place in self._changing:
                self._buffers[place].copy_(state.buffers[place])
