"""A call of a block that runs a second time in backward, as it ran the first time.

    forward     counters, buffers and random numbers go on: copies of what they were before
    backward    the copies, for as long as the block is recomputed; then they are as they were

Torch's `checkpoint` does so for its own random numbers. A hook that the block registers on its
input must not be registered once more: the recomputation has an input of its own.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zrun_core.data.batch import map_tensors
from zrun_core.errors import JobError
from zrun_core.hardware.spans import NOTHING
from zrun_core.sizes import format_size
from zrun_core.user_code.trial import (
    Attributes,
    AttributesCopy,
    Holder,
    first_written_tensor,
    without_graphs,
)

_LARGEST = 1 << 20  # bytes of a buffer, or of attributes, copied before they are known to change


class RecomputedForward:
    """The forward of a block, recomputed in backward.

    Attributes:
        options: of torch's `checkpoint`.
        named: returns what names a recomputation, for a profile.
    """

    def __init__(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        options: Mapping[str, Any],
        named: Callable[[], AbstractContextManager[object]] = lambda: NOTHING,
    ) -> None:
        self.named = named
        self._block = block
        self._forward = forward
        self.options = options
        # Known once it is called: then the block is whole. By which of its modules train: what a
        # forward in evaluation leaves as it is, as running statistics, others may change.
        self._modules: list[nn.Module] = []
        self._states: dict[tuple[bool, ...], BlockState] = {}

    def recomputed(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward: in place of the block's own."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self.call(), *args, **self.options, **kwargs)

    def call(self) -> Callable[..., Any]:
        """Return the block's forward for one call: it knows the first run from the second."""
        if not self._modules:
            self._modules = list(self._block.modules())
        modes = tuple(module.training for module in self._modules)
        if modes not in self._states:
            self._states[modes] = BlockState(self._block)
        return _Call(self._forward, self._states[modes], self.named)

    def __deepcopy__(self, memo: dict[int, Any]) -> RecomputedForward:
        """Return that of the copied block."""
        block = memo.get(id(self._block), self._block)
        return RecomputedForward(block, copy.deepcopy(self._forward, memo), self.options)


class _Call:
    """One call of a block."""

    def __init__(
        self,
        forward: Callable[..., Any],
        state: BlockState,
        named: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._forward = forward
        self._named = named
        self._state = state
        self._begun: _Begun | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._begun is None:
            self._begun = self._state.copy()
            with self._state.watched(self._begun):
                return self._forward(*args, **kwargs)
        made: dict[int, torch.Tensor] = {}  # one that is given twice stays one

        def own(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
            return made[id(tensor)]

        with self._named(), self._state.as_of(self._begun):
            return self._forward(*map_tensors(own, args), **map_tensors(own, kwargs))


class _Begun:
    """What a block's forward began with."""

    def __init__(
        self, attributes: AttributesCopy | None, buffers: dict[int, torch.Tensor], numbers: Any
    ) -> None:
        self.attributes = attributes
        self.buffers = buffers
        self.numbers = numbers


class BlockState:
    """What the forward of a block may change, beside its random numbers of torch's.

    All of it is copied in its first forward, and what that one changes from then on; but for large
    buffers and tensors, such as masks and tables, of which none should change.
    """

    def __init__(self, block: nn.Module) -> None:
        modules = list(block.modules())
        self._attributes = Attributes(modules, None, enters_modules=False, most_bytes=_LARGEST)
        self._places = [(module, key) for module in modules for key in module._buffers]
        self._written = {
            place
            for place in range(len(self._places))
            if (buffer := self._buffer(place)) is not None and buffer.nbytes <= _LARGEST
        }
        self._holders: dict[int, list[Holder]] = {}  # attributes that hold such a buffer too
        self._keeps_attributes = True
        self._draws = True  # from Python's or numpy's random numbers
        self._is_first = True

    def copy(self) -> _Begun:
        """Return what it is now."""
        attributes = None
        if self._keeps_attributes:
            attributes = without_graphs(self._attributes.copy())
        buffers = {}
        for place in self._written:
            buffer = self._buffer(place)
            if buffer is not None:
                buffers[place] = buffer.clone()
        return _Begun(attributes, buffers, _numbers() if self._draws else None)

    def _buffer(self, place: int) -> torch.Tensor | None:
        module, key = self._places[place]
        return module._buffers.get(key)

    @contextmanager
    def watched(self, begun: _Begun) -> Iterator[None]:
        """See what the first forward changes, which runs inside and has begun with `begun`."""
        if not self._is_first:
            yield
            return
        versions = [self._version(place) for place in range(len(self._places))]
        yield
        self._is_first = False
        assert begun.attributes is not None
        changed_attributes = self._attributes.changed(begun.attributes)
        self._keeps_attributes = any(changed_attributes)
        self._attributes.leave_out_steady(begun.attributes, changed_attributes)
        written = first_written_tensor(changed_attributes, begun.attributes)
        if written:
            raise JobError(
                f"activations.checkpoint: a recomputed block writes in place to {written}, a "
                "tensor that is no buffer, and would write twice: make it a buffer "
                "(self.register_buffer), or write checkpoint: none"
            )
        self._draws = not _are_same(begun.numbers, _numbers())
        changed = {place for place, was in enumerate(versions) if self._version(place) != was}
        # Versions do not count what native code writes, as of running statistics.
        for place, before in begun.buffers.items():
            now = self._buffer(place)
            if type(now) is not torch.Tensor or now.is_meta:
                continue  # it has no values, as where memory is planned
            if not torch.equal(now, before):
                changed.add(place)
        for place in changed - self._written:
            if self._version(place)[0] != versions[place][0]:
                continue  # made anew, as a table that grows: not written to
            key = self._places[place][1]
            raise JobError(
                f"activations.checkpoint: a recomputed block writes to its buffer {key}, which is "
                f"larger than {format_size(_LARGEST)}, and would write twice: leave it as it is in "
                "forward, or write checkpoint: none"
            )
        self._written &= changed
        for place in self._written:
            now = self._buffer(place)
            if now is not None and id(now) == versions[place][0]:
                self._holders[place] = self._attributes.holders_of(now, begun.attributes)

    def _version(self, place: int) -> tuple[int, int]:
        buffer = self._buffer(place)
        return (0, 0) if buffer is None else (id(buffer), buffer._version)

    @contextmanager
    def as_of(self, begun: _Begun) -> Iterator[None]:
        """Have a forward begin as another did, and undo what it changes."""
        attributes = None
        if begun.attributes is not None:
            attributes = self._attributes.copy()
            self._attributes.put_back(begun.attributes)
        # Not in place: autograd may have saved the buffers themselves.
        buffers = {place: self._buffer(place) for place in begun.buffers}
        replaced = []
        for place, values in begun.buffers.items():
            own = values.clone()
            self._set(place, own)
            for holder, key in self._holders.get(place, ()):
                if not _holds(holder, key, buffers[place]):
                    continue
                replaced.append((holder, key, buffers[place]))
                holder[key] = own
        numbers = None
        if begun.numbers is not None:
            numbers = _numbers()
            _set_numbers(begun.numbers)
        try:
            yield
        finally:
            if numbers is not None:
                _set_numbers(numbers)
            for holder, key, buffer in replaced:
                holder[key] = buffer
            for place, buffer in buffers.items():
                self._set(place, buffer)
            if attributes is not None:
                self._attributes.put_back(attributes)

    def _set(self, place: int, buffer: torch.Tensor | None) -> None:
        module, key = self._places[place]
        module._buffers[key] = buffer


def _holds(holder: Any, key: Any, value: object) -> bool:
    try:
        return holder[key] is value
    except (IndexError, KeyError):
        return False


def _numbers() -> tuple[Any, Any]:
    """Return the positions of Python's and numpy's random numbers."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _are_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Return whether nothing was drawn between two positions."""
    if one[0] != other[0] or (one[1] is None) != (other[1] is None):
        return False
    if one[1] is None:
        return True
    _, words, *rest = one[1]
    _, other_words, *other_rest = other[1]
    return rest == other_rest and bool((words == other_words).all())


def _set_numbers(numbers: tuple[Any, Any]) -> None:
    python, of_numpy = numbers
    random.setstate(python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
