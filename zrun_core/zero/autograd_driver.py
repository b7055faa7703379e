"""A sharded model in a loop that is not ours: its pass begins and ends by itself.

    model is called, outermost call       a forward begins, unless one is under way whose backward has not come
    ... under torch.no_grad()             an evaluation, over when the call is
    gradient of an output                 its backward begins
    gradient of a parameter               the same, and gradients are on their way
    the autograd engine has finished      everything is reduced, the backward is over

Several calls may be followed by one backward, and one call by several: all between two steps is one pass. What the
backward of a gradient needs (`create_graph=True`) stays whole until the step. After it the graph of what was called
before is of no use: what it needs is no longer there, and what recomputes would do so with other parameters.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from zrun_core.errors import UserCodeError
from zrun_core.zero.gather import Gatherer
from zrun_core.zero.micro_pass import MicroPass, PassKind
from zrun_core.zero.module_hooks import on_gradient, tensors_in
from zrun_core.zero.reduce import Reducer


class _OwnPass(MicroPass):
    """What a user's loop does between two steps. Nobody announces a backward: its gradients do."""

    def __init__(self, loop: ImplicitPasses) -> None:
        super().__init__()
        self._loop = loop

    def on_gradient_arrival(self, *, of_param: bool) -> None:
        self._loop.on_gradient_arrival(self, of_param=of_param)

    def gathered_refusal(self, kind: PassKind) -> str:
        if kind is not PassKind.FORWARD:
            return super().gathered_refusal(kind)
        return (
            "gathered(): the model was called and backward() has not followed: enter gathered() after it, and "
            "call the model under torch.no_grad() where no backward is to follow"
        )


class ImplicitPasses:
    """Tells the gatherer and the reducer of one model what its user's loop does.

    Attributes:
        accumulate: passes with gradients that the user's loop makes for each step.
        num_backwards: passes that gave gradients since the last step, or since these were dropped.
    """

    def __init__(
        self,
        module: nn.Module,
        gatherer: Gatherer,
        reducer: Reducer,
        autocast: Callable[[], AbstractContextManager[object]],
        accumulate: int,
    ) -> None:
        self._gatherer, self._reducer, self._autocast = gatherer, reducer, autocast
        self.accumulate = accumulate
        self._open: list[ExitStack] = []  # forwards under way, the outermost first
        self._in_backward = False
        self.num_backwards = 0
        self._is_inert = False
        self._begin_pass()
        module.register_forward_pre_hook(self._before, prepend=True)
        module.register_forward_hook(self._after, always_call=True)

    def __deepcopy__(self, memo: Any) -> ImplicitPasses:
        """A copy of the user's module is a plain module: its hooks have nothing to do."""
        loop = copy.copy(self)
        loop._is_inert = True
        return loop

    def _begin_pass(self) -> None:
        self._micro = self._gatherer.micro = _OwnPass(self)

    # Forward

    def _enter(self) -> None:
        passes = ExitStack()
        self._open.append(passes)
        gatherer = self._gatherer
        is_recomputed = gatherer.in_backward
        if (
            len(self._open) == 1
            and not gatherer.is_all_unsharded
            and not gatherer.in_forward
            and not is_recomputed
        ):
            if torch.is_grad_enabled():
                self._micro.open_calls.clear()  # what the last forward left open never had a gradient
                gatherer.begin_pass(self._micro, PassKind.FORWARD)
            else:
                passes.enter_context(gatherer.evaluation())
        passes.enter_context(self._autocast())

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
        if torch.is_grad_enabled() and not self._gatherer.in_backward:
            begins = functools.partial(self._micro.on_gradient_arrival, of_param=False)
            for tensor in tensors_in(output):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    on_gradient(tensor, begins)
        return output

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context in which parts of the model may be called by themselves; what they return is not cast to fp32."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    # Backward

    def on_gradient_arrival(self, micro: MicroPass, *, of_param: bool) -> None:
        """Hear of a gradient, of an output or of a parameter: a backward of `micro` is under way."""
        if micro is not self._micro:
            raise UserCodeError(
                "backward() of what the model returned before the last step(), which was to change its parameters: "
                "call the model again, and detach() what is kept from before"
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
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        if of_param and self._micro.grads is None:
            self.num_backwards += 1
            self._reducer.begin_backward(
                self._micro, boundary=self.num_backwards % self.accumulate == 0
            )

    def _backward_ends(self) -> None:
        self._in_backward = False
        if self._micro.grads is not None:
            self._reducer.end_backward(self._micro)
        self._gatherer.end_pass()

    # One optimizer step

    def end_gradients(self) -> None:
        """The step is to be made: every gradient is reduced.

        Raises:
            UserCodeError: there is no gradient, or a backward raised.
        """
        if self._in_backward:
            raise UserCodeError(
                "step(): the last backward() raised, so its gradients are not whole: call zero_grad()"
            )
        if not self.num_backwards:
            raise UserCodeError(
                "step(): no backward() of this model's outputs since the last step() or zero_grad()"
            )
        if self._gatherer.active:  # a forward that has raised, or that nobody differentiates
            self._gatherer.end_pass()
        self._reducer.flush()

    def drop_gradients(self) -> None:
        """What backward passes have given so far is forgotten."""
        if self._in_backward:  # one that raised; the other ranks have its reductions under way
            self._backward_ends()
        self.num_backwards = 0

    def end_step(self) -> None:
        """The step was made: nothing of what was called before it is to be differentiated."""
        self.num_backwards = 0
        self._gatherer.unpin(self._micro)
        self._begin_pass()


def in_fp32(value: Any) -> Any:
    """`value` with the bf16 and fp16 tensors in nested tuples, lists, mappings and dataclasses cast to fp32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if isinstance(value, MutableMapping):
        changed = {key: new for key, item in value.items() if (new := in_fp32(item)) is not item}
        if not changed:
            return value
        made: Any = copy.copy(value)
        for key, new in changed.items():
            made[key] = new
        return made
    if isinstance(value, list | tuple):
        items = [in_fp32(item) for item in value]
        if all(new is item for new, item in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.init
        }
        changed = {name: new for name, item in fields.items() if (new := in_fp32(item)) is not item}
        return dataclasses.replace(value, **changed) if changed else value
    return value
