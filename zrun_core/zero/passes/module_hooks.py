"""The hooks through which a running model drives its units.

    module begins            unshard its units                              Gatherer.pre_forward
    module ends              its units may be resharded; its outputs        Gatherer.post_forward
                             announce its backward
    gradient of an output    its backward begins: unshard its units again   Gatherer.pre_backward
    gradient of an input     its backward is over                           Gatherer.post_backward
    gradient of a parameter  moves into the unit's flat gradient; the last  Reducer.accumulate_grad
                             one of a unit issues its reduction             Reducer.mark_complete
    access to a parameter    outside its module: unshard its unit until     Gatherer
                             the pass ends                                  .unshard_on_access

No module is wrapped and no forward is replaced: hooks and parameters are all that is added to the
user's model.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import torch
from torch import nn

from zrun_core.errors import UserCodeError
from zrun_core.zero.passes.gather import Gatherer
from zrun_core.zero.reduce.reducer import Reducer
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.unit.micro_pass import HeldGrad, MicroPass

_HOLDS_NO_TENSOR = (str, bytes, int, float, complex, Enum, torch.dtype, torch.device, type(None))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what nested tuples, lists, mappings and dataclasses hold."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor inside nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]


def _may_hide_tensors(value: Any) -> bool:
    """Return whether there are objects in which `tensors_in` does not look."""
    return not all(isinstance(leaf, (torch.Tensor, *_HOLDS_NO_TENSOR)) for leaf in _leaves(value))


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return the identity that views of one memory share."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None


# Attribute of a tensor: its grad_fn, and what its gradient calls.
_CALLS = "_zrun_calls"


def on_gradient(tensor: torch.Tensor, call: Callable[[], None]) -> None:
    """Call `call` when the gradient of `tensor` is complete.

    The calls of one tensor run in reverse, as backward does: the modules that consumed it reshard
    their units before the one that produced it unshards its own.

        forward     y = A(x)    registers "A begins" on y
                    z = B(y)    registers "B is over" on y
        backward    y.grad      B is over, A begins

    Args:
        tensor: a result of autograd, or a leaf that requires a gradient.
        call: must not keep the tensor alive.
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
    """The hooks of one module."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[FlatUnit],
        leaf: bool,
        gatherer: Gatherer,
        reducer: Reducer,
        name: str,
    ) -> None:
        """Register the hooks.

        Args:
            units: that a call of it needs, own ones or tied ones.
            leaf: gathered and reduced as a whole, whatever runs inside.
        """
        self._name = name
        self._spans = gatherer.spans
        self._entered: list[AbstractContextManager[object]] = []  # calls that a profile names
        self._units = list(units)
        self._resharded = [unit for unit in units if unit.param.reshard_after_use]
        self._leaf = leaf
        # The backward of other units is over with the last gradient of a parameter.
        self._ends_with_inputs = leaf or not all(unit.trainable for unit in units)
        self._gatherer = gatherer
        self._reducer = reducer
        self._was_refused = False
        module.register_forward_pre_hook(self._pre_forward, with_kwargs=True, prepend=True)
        # Also when the module raises: a checkpoint's recomputation stops that way.
        module.register_forward_hook(self._post_forward, with_kwargs=True, always_call=True)

    def __deepcopy__(self, memo: Any) -> ModuleHooks:
        """Return hooks that do nothing: a copy of the user's module is a plain module."""
        hooks = copy.copy(self)
        hooks._units = []
        hooks._resharded = []
        hooks._entered = []
        return hooks

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        gatherer = self._gatherer
        if self._units and not gatherer.running.active and not gatherer.whole.is_unsharded:
            self._was_refused = True  # the hook after the module runs all the same
            raise UserCodeError(
                f"{self._units[0].layout.modules} ({type(module).__name__}) was called outside of "
                "its model's forward: call the model itself, or enter zrun_core.forward(model); "
                "in a hook or to generate, enter gathered()"
            )
        gatherer.calls.under_way.append(self._leave)
        if self._spans.is_on:
            self._enter_call()
        for unit in self._units:
            gatherer.pre_forward(unit)
        if self._ends_with_inputs and torch.is_grad_enabled() and not gatherer.running.in_backward:
            self._watch_inputs((args, kwargs))

    def _enter_call(self) -> None:
        """Name what happens until the module ends, for a profile."""
        call = self._spans.named(self._name, self._gatherer.running.in_words)
        call.__enter__()
        self._entered.append(call)

    def _watch_inputs(self, inputs: Any) -> None:
        """Notice the end of this call's backward: the gradients of all its inputs are there."""
        waiting = {id(tensor): tensor for tensor in tensors_in(inputs) if tensor.requires_grad}
        if not waiting:
            return
        micro = self._gatherer.running.micro
        micro.open_calls[self] += 1
        num_missing = len(waiting)

        def on_input_gradient() -> None:
            nonlocal num_missing
            if not self._gatherer.running.in_backward_of(micro):
                return  # a gradient that the loss itself is made of: backward is yet to come
            num_missing -= 1
            if num_missing == 0:
                self._post_backward(micro)

        for tensor in waiting.values():
            on_gradient(tensor, on_input_gradient)

    def _post_backward(self, micro: MicroPass) -> None:
        """End the backward of one call. Other calls of the module may be open."""
        micro.open_calls[self] -= 1
        if micro.open_calls[self]:
            return
        for unit in self._units:
            if unit.trainable and not self._leaf:
                continue  # its last parameter gradient ends it
            if unit.trainable:
                self._reducer.mark_complete(micro, unit)
            self._gatherer.post_backward(unit)
        self._spans.mark()

    def _post_forward(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._was_refused:
            self._was_refused = False
            return
        if self._resharded:
            self._pin_handed_out(output)
            if torch.is_grad_enabled() and not self._gatherer.running.in_backward:
                self._watch_outputs(output)
        self._end(output)

    def _leave(self) -> None:
        """End a call that has no result. Its backward begins with that of the micro-batch."""
        micro = self._gatherer.running.micro
        if self._resharded:
            micro.left.append(functools.partial(self._pre_backward, micro))
        self._end(None)

    def _end(self, output: Any) -> None:
        under_way = self._gatherer.calls.under_way
        if self._leave in under_way:  # a micro-batch that was abandoned has none
            under_way.remove(self._leave)
        for unit in self._units:
            self._gatherer.post_forward(unit)
        if self._entered:
            self._end_call(output)

    def _end_call(self, output: Any) -> None:
        """End what `_enter_call` began, and have the backward of the call be marked."""
        if torch.is_grad_enabled() and not self._gatherer.running.in_backward:
            begins = functools.partial(self._spans.mark, self._name, "backward")
            for tensor in tensors_in(output):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    on_gradient(tensor, begins)  # called before the units are gathered for it
        self._entered.pop().__exit__(None, None, None)

    def _pin_handed_out(self, output: Any) -> None:
        """Pin the units of which `output` has a parameter, or a view of one."""
        storages = {storage_of(tensor) for tensor in tensors_in(output)}
        self._gatherer.pins.pin(
            [unit for unit in self._resharded if storage_of(unit.param.full) in storages]
        )

    def _watch_outputs(self, output: Any) -> None:
        """Notice the beginning of this call's backward: an output gets a gradient."""
        outputs = tensors_in(output)
        begins = functools.partial(self._pre_backward, self._gatherer.running.micro)
        for tensor in outputs:
            if tensor.requires_grad and tensor.grad_fn is not None:
                on_gradient(tensor, begins)
        if not outputs or _may_hide_tensors(output):
            self._gatherer.pins.pin(self._resharded)  # its backward cannot be seen to begin

    def _pre_backward(self, micro: MicroPass) -> None:
        micro.on_gradient_arrival(of_param=False)
        if not self._gatherer.running.in_backward:
            # A gradient that is differentiated again: that backward cannot be seen to begin.
            self._gatherer.pins.pin(self._resharded)
        for unit in self._resharded:
            self._gatherer.pre_backward(unit)


class UnshardOnAccess(dict[str, Any]):
    """A module's parameter dictionary: access outside of its module unshards the unit."""

    def __init__(
        self, original: Mapping[str, Any], unit_of: Mapping[int, FlatUnit], gatherer: Gatherer
    ) -> None:
        """
        Args:
            unit_of: by identity of a parameter, its unit.
        """
        super().__init__(original)
        self._unit_of = unit_of
        self._gatherer = gatherer
        self._running = gatherer.running  # asked for at each access

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        """Copy as a plain dictionary: the parameters of a copied module are in no unit."""
        return dict, (dict(super().items()),)

    def _look(self, param: Any) -> Any:
        if param is None or not self._running.active:
            return param
        unit = self._unit_of.get(id(param))
        if unit is not None:
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
        hooked: as `WrapPlan.hooked`: module, indices of the units that it needs, whether a leaf.
        watched: modules where access to a parameter is noticed; not those that are compiled.
    """
    names = {id(module): name or type(model).__name__ for name, module in model.named_modules()}
    for module, indices, leaf in hooked:
        needed = [units[i] for i in indices]
        ModuleHooks(module, needed, leaf, gatherer, reducer, names.get(id(module), "model"))
    model.register_forward_hook(lambda *_: gatherer.idle.reshard(), always_call=True)
    for unit in units:
        if unit.trainable:
            # Weakly: Python's collector does not see what a parameter's hook holds.
            owners = (weakref.ref(unit), weakref.ref(gatherer), weakref.ref(reducer))
            for number, param in enumerate(unit.params):
                hook = functools.partial(_post_accumulate_grad, *owners, number)
                param.register_post_accumulate_grad_hook(hook)
    unit_of = {id(param): unit for unit in units for param in unit.params}
    for module in watched:
        if any(id(param) in unit_of for param in module._parameters.values()):
            module._parameters = UnshardOnAccess(module._parameters, unit_of, gatherer)


def _post_accumulate_grad(
    unit_ref: weakref.ref[FlatUnit],
    gatherer_ref: weakref.ref[Gatherer],
    reducer_ref: weakref.ref[Reducer],
    number: int,
    param: torch.Tensor,
) -> None:
    """Take the gradient of parameter `number`; with the last one the unit's backward is over."""
    unit = unit_ref()
    gatherer = gatherer_ref()
    reducer = reducer_ref()
    assert unit is not None
    assert gatherer is not None
    assert reducer is not None
    grad = param.grad
    if grad is None:  # a function of the user's, or one that holds it, has given none
        return
    micro = gatherer.running.micro
    micro.on_gradient_arrival(of_param=True)
    if not gatherer.running.in_backward:
        raise UserCodeError(
            "the loss function, or forward, ran backward(): return the loss, and the step runs it"
        )
    if micro.held is not None:
        param.grad = None
        held = HeldGrad(unit, number, lambda: grad)
        if unit.index in micro.held.at_once:
            param.grad = grad
            unit.grad.accumulate(number)
            held = HeldGrad(unit, number, None)
        if micro.held.add(held) and not unit.leaf:
            gatherer.post_backward(unit)
        return
    has_all = reducer.accumulate_grad(micro, unit, number)
    if has_all and not unit.leaf:
        reducer.mark_complete(micro, unit)
        gatherer.post_backward(unit)
        gatherer.spans.mark()
