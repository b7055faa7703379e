"""Passes in layer-major order: all micro-batches go through a slice before the next one comes.

A slice is a repeated block and what follows it, up to the next block; what comes before the first
block is a slice too. `pipeline/schedule.py` has the order in which they run, `idle_units.py` what
it does to units, and `slice_walk.py` how one micro-batch goes through them.

Gradients of a parameter add up in the order of the micro-batches, as in F0 B0 F1 B1 ..., and have
the same bits, unless several slices use it (a tied weight): there they add up slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from zrun_core.errors import JobError
from zrun_core.hardware import accelerator
from zrun_core.pipeline.actions import Action, ActionKind
from zrun_core.user_code.grad_hooks import check_of_parts
from zrun_core.user_code.trial import Attributes
from zrun_core.user_code.turns import Turns
from zrun_core.zero.passes.gather import Gatherer
from zrun_core.zero.passes.slice_walk import INSTEAD, KEY, Walk, watch
from zrun_core.zero.reduce.reducer import Reducer
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.unit.micro_pass import MicroPass, PassKind
from zrun_core.zero.wrap.auto_wrap import repeated_blocks

T = TypeVar("T")


class SlicedPasses:
    """Runs the forwards and backwards of one model in slices.

    Attributes:
        num_slices: of the model.
        forward_context: returns the context of a forward.
        device: of this rank.
        turns: attributes that forwards write while others come between.
        is_lost: the step's gradients are made of zeros: see `drop`.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: object,
        gatherer: Gatherer,
        reducer: Reducer,
        forward_context: Callable[[], AbstractContextManager[object]],
        device: torch.device,
    ) -> None:
        """Register a hook on each block of `module`, before those of its units.

        Args:
            loss: the user's loss function, which may have attributes.

        Raises:
            JobError: it has no repeated blocks.
        """
        blocks = repeated_blocks(module)
        if not blocks:
            raise JobError(
                f"{KEY}: the model has no repeated blocks (two members of one class in a "
                f"ModuleList or Sequential, with modules inside); {INSTEAD}"
            )
        self._names = {id(block): name for name, block in blocks}
        self.num_slices = 1 + len(self._names)
        self.forward_context = forward_context
        self.device = device
        self.turns = Turns(Attributes(module.modules(), loss), KEY, INSTEAD)
        self._gatherer = gatherer
        self._reducer = reducer
        self._order: dict[int, int] = {}  # by identity of a block, its slice: as first called
        self._walks: list[Walk] = []
        self._slice: int | None = None  # that runs
        self._first_use: dict[int, int] = {}  # by index of a unit, the first slice that uses it
        self._checked: set[tuple[FlatUnit, int]] = set()  # see `_check_hooks`
        self._completed_in: list[set[int]] | None = None  # by slice, indices of units: see `_agree`
        self.is_lost = False
        for _, block in blocks:
            watch(block)

    def slice_of(self, block: nn.Module, *, after: int) -> int:
        """Return the slice that begins with `block`.

        Args:
            block: a repeated one, which is called.
            after: slice in which it is called.

        Raises:
            JobError: the slice is over.
        """
        number = self._order.setdefault(id(block), 1 + len(self._order))
        if number <= after:
            raise JobError(
                f"{KEY}: {self.name_of(block)} is called a second time by a micro-batch, or "
                f"in another order than by the first one; {INSTEAD}"
            )
        return number

    def name_of(self, block: nn.Module) -> str:
        """Return the name of a block in the model."""
        return self._names[id(block)]

    def knows(self, module: nn.Module) -> bool:
        """Return whether `module` is a block of the model, and no copy of one."""
        return id(module) in self._names

    # One optimizer step

    @contextmanager
    def step(self, forwards: Sequence[Callable[[], Any]]) -> Iterator[None]:
        """Run the actions of one step inside.

        Args:
            forwards: by micro-batch; each calls the model.
        """
        self.is_lost = False
        self._slice = None
        self._walks = [
            Walk(_as_in_this_thread(forward, self.device), number, self)
            for number, forward in enumerate(forwards)
        ]
        self._gatherer.begin_pass(MicroPass(), PassKind.FORWARD)
        try:
            yield
        except BaseException:
            self._abandon()
            raise
        self._walks = []
        self.turns.end_step()
        self._gatherer.end_pass()

    def forward(self, action: Action) -> None:
        """Run a micro-batch's forward through a slice."""
        walk = self._switch_to(action)
        # A micro-batch may leave out blocks.
        if self.is_lost or walk.call.is_over or walk.slice != action.chunk:
            return
        walk.go_on()
        if self._completed_in is None:
            for index in walk.micro.num_calls:
                self._first_use.setdefault(index, action.chunk)

    def take_result(self, number: int) -> Any:
        """Return what the forward of a micro-batch returned, which has gone through all slices."""
        call = self._walks[number].call
        result = call.result
        del call.result  # with its graph
        return result

    def backward(self, action: Action, loss: torch.Tensor | None, *, boundary: bool) -> None:
        """Run a micro-batch's backward through a slice.

        Args:
            loss: for the last slice.
            boundary: the micro-batch is the last one of the step.

        Raises:
            JobError: this model's backward cannot be run in slices.
        """
        walk = self._switch_to(action)
        micro = walk.micro
        reducer = self._reducer
        if self._completed_in is None:
            self._completed_in = self._agree()
        if action.chunk == self.num_slices - 1:
            if action.micro == 0:
                self._gatherer.order.prefetch_backward()
            if micro.grads is None:
                reducer.begin_backward(micro, boundary=boundary, awaits_slices=True)
        units = self._completed_in[action.chunk]
        reducer.begin_slice(micro, units)
        if not self.is_lost:
            self._differentiate(walk, action.chunk, loss)
            self._check_hooks(micro)
        reducer.end_slice(micro, units)
        if action.chunk == 0:
            reducer.end_backward(micro)
            self._gatherer.pins.release(micro)

    def _agree(self) -> list[set[int]]:
        """Return by slice the units that get their last gradients there. Collective.

        They are those that it uses and no earlier one does, as rank 0 has seen in the first step,
        and what else its block has: ranks may run different parts of a block.
        """
        order = self._reducer.order
        slices = {self._names[key]: number for key, number in self._order.items()}
        of_units = []
        for unit in order.units:
            uses = [self._first_use.get(unit.index), slices.get(unit.layout.block)]
            of_units.append(min((use for use in uses if use is not None), default=0))
        of_units = order.agree_on(of_units)
        found: list[set[int]] = [set() for _ in range(self.num_slices)]
        for unit, number in zip(order.units, of_units, strict=True):
            found[number].add(unit.index)
        if not order.is_recorded:  # that of registration may contradict the slices
            order.adopt([index for units in reversed(found) for index in sorted(units)])
        return found

    def _switch_to(self, action: Action) -> Walk:
        if action.chunk != self._slice:
            self._slice = action.chunk
            self._gatherer.idle.begin_slice()
        walk = self._walks[action.micro]
        kind = PassKind.FORWARD if action.kind is ActionKind.FORWARD else PassKind.BACKWARD
        self._gatherer.running.switch_to(walk.micro, kind)
        return walk

    def _differentiate(self, walk: Walk, number: int, loss: torch.Tensor | None) -> None:
        try:
            walk.backward(number, loss)
        except RuntimeError as error:
            if "through the graph a second time" not in str(error):
                raise
            block = next((key for key, each in self._order.items() if each == number), None)
            where = "what comes before the blocks" if block is None else self._names[block]
            raise JobError(
                f"{KEY}: the backward of {where} was run twice, because a later part of the model "
                "uses what it makes other than as an input of a block (a skip connection, an "
                f"auxiliary loss); {INSTEAD}"
            ) from error

    def _check_hooks(self, micro: MicroPass) -> None:
        """Check hooks on parameters of which several slices have made a part of the gradient.

        Raises:
            JobError: one makes something else of parts than of the whole.
        """
        assert micro.grads is not None
        for unit, number in micro.grads.again - self._checked:
            slot = unit.layout.slots[number]
            check_of_parts(
                slot.name,
                unit.params[number],
                slot.shape,
                key=KEY,
                parts="each slice of the model that uses the parameter gives it a part",
                instead=INSTEAD,
            )
        self._checked |= micro.grads.again

    def drop(self) -> None:
        """Drop the step of this rank, whose reductions are made of zeros from now on."""
        self.is_lost = True
        self._abandon()

    def _abandon(self) -> None:
        for walk in self._walks:
            walk.end()
        for walk in self._walks:
            self._gatherer.abandon(walk.micro)


def _as_in_this_thread(call: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """Return `call` for another thread, with what torch keeps for each thread as in this one."""
    default = torch.get_default_device()
    stream = None
    if accelerator.is_accelerator(device):
        stream = accelerator.current_stream(device)

    def same() -> T:
        with ExitStack() as contexts:
            if default.type != "cpu":
                contexts.enter_context(default)
            if stream is not None:
                contexts.enter_context(accelerator.on_stream(stream))
            return call()

    return same
