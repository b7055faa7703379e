"""What a forward changes outside of nodes, on a stage that runs it once for each of its chunks.

Counters of the model itself, of its loss and the like belong to the micro-batch, not to the chunk.
What the forward through one chunk has changed, those through later chunks begin with as that one
did, and leave as they found it; what only they change, since they go further, stays.

    chunk 0   micro 0: calls 0 -> 1     micro 1: calls 1 -> 2
    chunk 2                                                       micro 0: 0 -> 1, then 2 again
                                                                           losses 0 -> 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from zrun_core.errors import JobError
from zrun_core.user_code.trial import Attributes, AttributesCopy, as_in, goes_on, joined


class OutsideState(NamedTuple):
    """State of what is outside of nodes.

    Attributes:
        attributes: of modules and of the loss, as they were: all, or those that forwards of the
            micro-batch have changed.
        after: the same as these forwards have left them.
        buffers: values of those that forwards change, by place.
    """

    attributes: AttributesCopy
    after: AttributesCopy
    buffers: dict[int, torch.Tensor]


class Outside:
    """What is outside of the nodes of a model: attributes and buffers."""

    def __init__(self, model: nn.Module, nodes: Sequence[nn.Module], loss: object) -> None:
        """
        Args:
            model: whose forward runs more than once.
            nodes: each of which runs in one chunk only.
        """
        inside = {id(module) for node in nodes for module in node.modules()}
        modules = [module for module in model.modules() if id(module) not in inside]
        self._attributes = Attributes(modules, loss, enters_modules=False)  # nodes are inside
        self._buffers = [
            buffer
            for module in modules
            for buffer in module._buffers.values()
            if buffer is not None
        ]
        self._changing = set(range(len(self._buffers)))  # all of them, until a forward has run
        self._is_first = True
        self._copies_all = True  # attributes, until a forward has come to its end
        self._begun: dict[int, OutsideState] = {}  # by micro-batch

    def _copied_buffers(self) -> dict[int, torch.Tensor]:
        return {place: self._buffers[place].clone() for place in self._changing}

    @contextmanager
    def first(self, micro: int) -> Iterator[None]:
        """Run the forward of a micro-batch through its first chunk inside.

        Which buffers it changes is seen, and no other is copied from now on.
        """
        attributes = self._attributes.copy()
        buffers = self._copied_buffers()
        versions = [buffer._version for buffer in self._buffers]
        yield
        changed = self._changed(versions, buffers)
        if self._is_first:
            self._is_first = False
            self._changing = changed
        elif not changed <= self._changing:
            raise JobError(
                "parallel.schedule: interleaved: a forward changes a buffer of the model that the "
                "first one has not changed: change it in every forward, or write schedule: 1f1b"
            )
        after = self._attributes.changed(attributes)
        self._begun[micro] = OutsideState(as_in(attributes, after), after, buffers)

    @contextmanager
    def later(self, micro: int, *, is_last: bool) -> Iterator[None]:
        """Run the forward of a micro-batch through a later chunk inside.

        Args:
            is_last: no chunk comes after this one.

        Raises:
            JobError: it changes a number further on that an earlier chunk has changed.
        """
        state = self._begun[micro]
        now = as_in(self._attributes.copy(), state.attributes)
        buffers = self._copied_buffers()
        self._attributes.put_back_only(state.attributes)
        self._put_back(state.buffers)
        begun = self._attributes.copy()
        try:
            yield
            changed = self._attributes.changed(begun)
            _refuse_numbers(state.after, changed)
            if is_last and self._copies_all:
                self._copies_all = False
                self._attributes.leave_out_steady(begun, joined(state.after, changed))
            if not is_last:
                new = [
                    {key: each for key, each in own.items() if key not in known}
                    for own, known in zip(changed, state.attributes, strict=True)
                ]
                self._begun[micro] = OutsideState(
                    joined(state.attributes, as_in(begun, new)),
                    joined(state.after, new),
                    state.buffers,
                )
        finally:
            self._attributes.put_back_only(now)
            self._put_back(buffers)
        if is_last:
            del self._begun[micro]

    def _changed(self, versions: Sequence[int], copies: dict[int, torch.Tensor]) -> set[int]:
        """Return the places of buffers that a forward has changed.

        Versions do not count what native code writes, as of running statistics.
        """
        return {
            place
            for place, (version, buffer) in enumerate(zip(versions, self._buffers, strict=True))
            if buffer._version != version
            or (place in copies and not torch.equal(buffer, copies[place]))
        }

    def _put_back(self, buffers: dict[int, torch.Tensor]) -> None:
        with torch.no_grad():
            for place, values in buffers.items():
                self._buffers[place].copy_(values)


def _refuse_numbers(after: AttributesCopy, changed: AttributesCopy) -> None:
    """Refuse a number that both sides of a border change: the next micro-batch comes between."""
    for known, now in zip(after, changed, strict=True):
        for name, value in now.items():
            if name in known and goes_on(value, known[name]):
                raise JobError(
                    f"parallel.schedule: interleaved: forward goes on with `{name}` (a number, a "
                    "generator or a tensor) before and after a border between stages, where other "
                    "micro-batches come between: do it in one place, or write schedule: 1f1b"
                )
