"""A sharded model in the user's own loop: its passes begin and end by themselves.

    outermost call of the model     a forward begins, unless one is under way that has no backward
    ... under torch.no_grad()       an evaluation, which ends with the call
    gradient of an output           the backward begins
    gradient of a parameter         the same, and its gradients are reduced
    end of the autograd engine      everything is reduced; the backward is over

Several calls may be followed by one backward, and one call by several: everything between two steps
is one pass. What the backward of a gradient needs (`create_graph=True`) stays unsharded until the
step. After the step, graphs of earlier calls are of no use: the values that they need are gone, and
recomputation would use other parameters.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from zrun_core.errors import UserCodeError
from zrun_core.zero.passes.gather import Gatherer
from zrun_core.zero.passes.module_hooks import on_gradient, tensors_in
from zrun_core.zero.reduce.reducer import Reducer
from zrun_core.zero.unit.micro_pass import MicroPass, PassKind


class _OwnPass(MicroPass):
    """The pass of a user's loop between two steps. Gradients announce its backward."""

    def __init__(self, loop: ImplicitPasses) -> None:
        super().__init__()
        self._loop = loop

    def on_gradient_arrival(self, *, of_param: bool) -> None:
        self._loop.on_gradient_arrival(self, of_param=of_param)

    def gathered_refusal(self, kind: PassKind) -> str:
        if kind is not PassKind.FORWARD:
            return super().gathered_refusal(kind)
        return (
            "gathered(): the model was called and backward() has not followed: enter gathered() "
            "after it, and call the model under torch.no_grad() where no backward is to follow"
        )


class ImplicitPasses:
    """Drives the gatherer and the reducer of one model from what its user's loop does.

    Attributes:
        accumulate: backwards with gradients that the user's loop makes for each step.
        num_backwards: of these since the last step, or since their gradients were dropped.
    """

    def __init__(
        self,
        module: nn.Module,
        gatherer: Gatherer,
        reducer: Reducer,
        autocast: Callable[[], AbstractContextManager[object]],
        accumulate: int,
    ) -> None:
        """Register hooks on `module`.

        Args:
            module: the outermost one.
            accumulate: backwards of one optimizer step.
        """
        self._gatherer = gatherer
        self._reducer = reducer
        self._autocast = autocast
        self.accumulate = accumulate
        self._open: list[ExitStack] = []  # forwards under way, the outermost first
        self._in_backward = False
        self.num_backwards = 0
        self._is_inert = False
        self._begin_pass()
        module.register_forward_pre_hook(self._before, prepend=True)
        module.register_forward_hook(self._after, always_call=True)

    def __deepcopy__(self, memo: Any) -> ImplicitPasses:
        """Return hooks that do nothing: a copy of the user's module is a plain module."""
        loop = copy.copy(self)
        loop._is_inert = True
        return loop

    def _begin_pass(self) -> None:
        self._micro = _OwnPass(self)
        self._gatherer.running.micro = self._micro

    # Forward

    def _enter(self) -> None:
        contexts = ExitStack()
        self._open.append(contexts)
        if len(self._open) == 1:
            self._begin_outermost(contexts)
        contexts.enter_context(self._autocast())

    def _begin_outermost(self, contexts: ExitStack) -> None:
        """Begin a forward or an evaluation, where this call is one."""
        gatherer = self._gatherer
        if gatherer.whole.is_unsharded:
            return  # inside of gathered(): nothing moves
        if gatherer.running.in_forward:
            return  # one more call of the forward that is under way
        if gatherer.running.in_backward:
            return  # recomputed for backward
        if torch.is_grad_enabled():
            self._micro.open_calls.clear()  # calls of the last forward that got no gradient
            gatherer.begin_pass(self._micro, PassKind.FORWARD)
        else:
            contexts.enter_context(gatherer.evaluation())

    def _leave(self) -> None:
        self._open.pop().close()

    def _before(self, module: nn.Module, args: Any) -> None:
        if not self._is_inert:
            self._enter()

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._is_inert:
            return None
        self._leave()
        if self._open:
            return None
        output = in_fp32(output)
        if torch.is_grad_enabled() and not self._gatherer.running.in_backward:
            on_arrival = functools.partial(self._micro.on_gradient_arrival, of_param=False)
            for tensor in tensors_in(output):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    on_gradient(tensor, on_arrival)
        return output

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Allow calls of parts of the model inside. Their results are not cast to fp32."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    # Backward

    def on_gradient_arrival(self, micro: MicroPass, *, of_param: bool) -> None:
        """Begin the backward of `micro`, unless it is under way.

        Args:
            micro: pass of the forward that the gradient is of.
            of_param: it is a parameter's gradient, not that of a module's output.

        Raises:
            UserCodeError: this backward cannot be made.
        """
        if micro is not self._micro:
            raise UserCodeError(
                "backward() on an output from before the last step(), which has changed the "
                "parameters since: call the model again, and detach() what you keep across steps"
            )
        if self._open:  # of what a module differentiates in its own forward
            if of_param:
                raise UserCodeError(
                    "backward() inside of a forward: call it when the model has returned"
                )
            return
        if not of_param and torch.is_grad_enabled():
            return  # the gradient itself is to be differentiated
        if not self._in_backward:
            self._in_backward = True
            self._gatherer.begin_pass(self._micro, PassKind.BACKWARD)
            self._reducer.foresee(self._micro)
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        if of_param and self._micro.grads is None:
            self.num_backwards += 1
            is_boundary = self.num_backwards % self.accumulate == 0
            self._reducer.begin_backward(self._micro, boundary=is_boundary)

    def _backward_ends(self) -> None:
        self._in_backward = False
        if self._micro.grads is not None:
            self._reducer.end_backward(self._micro)
        self._gatherer.end_pass()

    # One optimizer step

    def end_gradients(self) -> None:
        """Reduce what is not reduced yet, because the step is to be made.

        Raises:
            UserCodeError: there is no gradient, or a backward raised.
        """
        if self._in_backward:
            raise UserCodeError(
                "step(): the last backward() raised, so its gradients are not whole: "
                "call zero_grad()"
            )
        if not self.num_backwards:
            raise UserCodeError(
                "step(): no backward() of this model's outputs since the last step() or zero_grad()"
            )
        if (
            self._gatherer.running.active
        ):  # a forward that has raised, or that nobody differentiates
            self._gatherer.end_pass()
        self._reducer.flush()

    def drop_gradients(self) -> None:
        """Forget the gradients of the backwards so far."""
        if self._in_backward:  # one that raised; the other ranks have its reductions under way
            self._backward_ends()
        self.num_backwards = 0

    def end_step(self) -> None:
        """Begin a new pass: nothing that was called before the step is to be differentiated."""
        self.num_backwards = 0
        self._gatherer.pins.release(self._micro)
        self._begin_pass()


def in_fp32(value: Any) -> Any:
    """Return `value` with its bf16 and fp16 tensors cast to fp32.

    Looks into nested tuples, lists, mappings and dataclasses; containers without such tensors are
    returned as they are.
    """
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if isinstance(value, MutableMapping):
        return _mapping_in_fp32(value)
    if isinstance(value, list | tuple):
        return _sequence_in_fp32(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value) if each.init]
        changed = _changed({name: getattr(value, name) for name in names})
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _mapping_in_fp32(value: MutableMapping[Any, Any]) -> Any:
    changed = _changed(value)
    if not changed:
        return value
    made = copy.copy(value)
    for key, item in changed.items():
        made[key] = item
    return made


def _sequence_in_fp32(value: Any) -> Any:
    items = [in_fp32(item) for item in value]
    if all(new is item for new, item in zip(items, value, strict=True)):
        return value
    if hasattr(value, "_fields"):  # a named tuple
        return type(value)(*items)
    return type(value)(items)


def _changed(items: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the items that `in_fp32` changes, changed."""
    changed = {}
    for key, item in items.items():
        new = in_fp32(item)
        if new is not item:
            changed[key] = new
    return changed
