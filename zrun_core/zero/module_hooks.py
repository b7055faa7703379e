"""The places where a running model touches its units.

    module begins            its units become whole
    module ends              its units may be given up; its outputs announce its backward
    gradient of an output    backward of the module begins: its units become whole again
    gradient of an input     backward of the module is over
    gradient of a parameter  moves into the unit's flat gradient; the last one sends it on its way
    look at a parameter      outside its module: its unit becomes whole and stays so

No module is wrapped and no forward is replaced: hooks and parameters are all that is added to the user's model.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from zrun_core.errors import UserCodeError
from zrun_core.zero.gather import Gatherer
from zrun_core.zero.micro_pass import MicroPass
from zrun_core.zero.reduce import Reducer
from zrun_core.zero.unit import FlatUnit

_PLAIN = (str, bytes, int, float, complex, Enum, torch.dtype, torch.device, type(None))


def _leaves(value: Any) -> Iterator[Any]:
    """What nested tuples, lists, mappings and dataclasses hold."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor inside nested tuples, lists, mappings and dataclasses."""
    return [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]


def _may_hide_tensors(value: Any) -> bool:
    """Whether there are objects in which `tensors_in` does not look."""
    return not all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in _leaves(value))


def _storage(tensor: torch.Tensor) -> int | None:
    """What views of one memory have in common."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None


_CALLS = "_zrun_calls"  # attribute of a tensor: what its gradient calls, with the node that it belongs to


def on_gradient(tensor: torch.Tensor, call: Callable[[], None]) -> None:
    """Call `call` when the gradient of `tensor` is complete.

    Backward is forward reversed, so the last call to be registered comes first: the modules that consumed the tensor
    give up their units before the one that produced it asks for its own.
    """
    node, calls = getattr(tensor, _CALLS, (None, None))
    if calls is None or node is not tensor.grad_fn:  # new, or written in place since
        calls = []
        setattr(tensor, _CALLS, (tensor.grad_fn, calls))
        tensor.register_hook(lambda grad: _call_reversed(calls))
    calls.append(call)


def _call_reversed(calls: Sequence[Callable[[], None]]) -> None:
    for call in reversed(calls):
        call()


class ModuleHooks:
    """The hooks of one module that brings `units` with it."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[FlatUnit],
        leaf: bool,
        gatherer: Gatherer,
        reducer: Reducer,
    ):
        self._units = list(units)
        self._freed = [unit for unit in units if unit.reshard_after_use]
        self._leaf = leaf
        self._gatherer, self._reducer = gatherer, reducer
        self._was_refused = False
        module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        # Also when the module raises: a checkpoint's recomputation stops that way.
        module.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    def __deepcopy__(self, memo: Any) -> ModuleHooks:
        """A copy of the user's module is a plain module: its hooks have nothing to do."""
        hooks = copy.copy(self)
        hooks._units = hooks._freed = []
        return hooks

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._units and not self._gatherer.active and not self._gatherer.is_all_unsharded:
            self._was_refused = True  # what is called after the module, also after this
            raise UserCodeError(
                f"{self._units[0].layout.modules} ({type(module).__name__}) was called outside of its model's forward: "
                "call the model itself, or enter zrun_core.forward(model); in a hook or to generate, enter gathered()"
            )
        for unit in self._units:
            self._gatherer.pre_forward(unit)
        if torch.is_grad_enabled() and not self._gatherer.in_backward:
            self._watch_inputs((args, kwargs))

    def _watch_inputs(self, inputs: Any) -> None:
        watched = [t for t in tensors_in(inputs) if t.requires_grad]
        if not watched:
            return
        micro = self._gatherer.micro
        micro.open_calls[self] += 1
        waiting = {id(t): t for t in watched}
        remaining = [len(waiting)]

        def arrived() -> None:
            if not self._gatherer.in_backward_of(micro):
                return  # a gradient that the loss itself is made of: backward is yet to come
            remaining[0] -= 1
            if remaining[0] == 0:
                self._over(micro)

        for tensor in waiting.values():
            on_gradient(tensor, arrived)

    def _over(self, micro: MicroPass) -> None:
        """The gradients of all inputs of one call are known: nothing inside runs any more for that call."""
        micro.open_calls[self] -= 1
        if micro.open_calls[self]:
            return
        for unit in self._units:
            if unit.trainable and self._leaf:
                self._reducer.mark_complete(micro, unit)
            if not unit.trainable or self._leaf:
                self._gatherer.post_backward(unit)

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._was_refused:
            self._was_refused = False
            return
        if self._freed:
            handed_out = {_storage(t) for t in tensors_in(output)}  # a weight, or a view of one?
            self._gatherer.pin([unit for unit in self._freed if _storage(unit.full) in handed_out])
        if self._freed and torch.is_grad_enabled() and not self._gatherer.in_backward:
            seen = tensors_in(output)
            begins = functools.partial(self._backward_begins, self._gatherer.micro)
            for tensor in seen:
                if tensor.requires_grad and tensor.grad_fn is not None:
                    on_gradient(tensor, begins)
            if not seen or _may_hide_tensors(output):
                self._gatherer.pin(self._freed)
        for unit in self._units:
            self._gatherer.post_forward(unit)

    def _backward_begins(self, micro: MicroPass) -> None:
        micro.on_gradient_arrival(of_param=False)
        if (
            not self._gatherer.in_backward
        ):  # backward of this backward is yet to come, and cannot be seen
            self._gatherer.pin(self._freed)
        for unit in self._freed:
            self._gatherer.unshard(unit)


class UnshardOnAccess(dict[str, Any]):
    """A module's parameter dictionary: looking one up outside its module makes its unit whole."""

    def __init__(
        self, original: Mapping[str, Any], unit_of: Mapping[int, FlatUnit], gatherer: Gatherer
    ) -> None:
        super().__init__(original)
        self._unit_of, self._gatherer = unit_of, gatherer

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        """Copies are plain dictionaries, as the copied module's parameters are no unit's."""
        return dict, (dict(super().items()),)

    def _look(self, param: Any) -> Any:
        if (
            self._gatherer.active
            and param is not None
            and (unit := self._unit_of.get(id(param))) is not None
        ):
            self._gatherer.unshard_on_access(unit)
        return param

    def __getitem__(self, name: str) -> Any:
        return self._look(super().__getitem__(name))

    def items(self) -> Any:
        return [(name, self._look(param)) for name, param in super().items()]

    def values(self) -> Any:
        return [self._look(param) for param in super().values()]


def install(
    model: nn.Module,
    units: Sequence[FlatUnit],
    hooked: Sequence[tuple[nn.Module, list[int], bool]],
    gatherer: Gatherer,
    reducer: Reducer,
    *,
    watched: Sequence[nn.Module],
) -> None:
    """Connect the modules of `model` to its units.

    Args:
        watched: modules where a look at a parameter is noticed; not those that are compiled.
    """
    for module, indices, leaf in hooked:
        ModuleHooks(module, [units[i] for i in indices], leaf, gatherer, reducer)
    model.register_forward_hook(lambda *_: gatherer.reshard_idle(), always_call=True)
    for unit in units:
        if unit.trainable:
            # Weakly: Python's collector does not see what a parameter's hook holds.
            owners = weakref.ref(unit), weakref.ref(gatherer), weakref.ref(reducer)
            for number, param in enumerate(unit.params):
                param.register_post_accumulate_grad_hook(functools.partial(_take, *owners, number))
    unit_of = {id(param): unit for unit in units for param in unit.params}
    for module in watched:
        if any(id(p) in unit_of for p in module._parameters.values()):
            module._parameters = UnshardOnAccess(module._parameters, unit_of, gatherer)


def _take(
    unit_ref: weakref.ref[FlatUnit],
    gatherer_ref: weakref.ref[Gatherer],
    reducer_ref: weakref.ref[Reducer],
    number: int,
    param: torch.Tensor,
) -> None:
    unit, gatherer, reducer = unit_ref(), gatherer_ref(), reducer_ref()
    assert unit is not None
    assert gatherer is not None
    assert reducer is not None
    micro = gatherer.micro
    micro.on_gradient_arrival(of_param=True)
    if reducer.accumulate_grad(micro, unit, number) and not unit.leaf:
        reducer.mark_complete(micro, unit)
        gatherer.post_backward(unit)
