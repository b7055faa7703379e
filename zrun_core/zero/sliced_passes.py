"""Passes in layer-major order: all micro-batches go through a slice before the next one comes.

A slice is a repeated block and what follows it, up to the next block; what comes before the first
block is a slice too. `pipeline/schedule.py` has the order in which they run, `gather.py` what it
does to units.

    forward    The user's own forward runs, in a thread for each micro-batch, one at a time. A hook
               on each block parks it where a slice begins.
    border     What the block is given is cut off from its graph, and keeps its gradient there.
    backward   A slice is differentiated from its end: from the loss, or from what was cut there,
               with the gradients that were kept. Autograd ends at the border before it.

Gradients of a parameter add up in the order of the micro-batches, as in F0 B0 F1 B1 ..., and have
the same bits, unless several slices use it (a tied weight): there they add up slice by slice.

[Note: what is not cut]
A tensor can go around the blocks: a skip connection, an auxiliary loss. Then the backward of a
later slice runs on into an earlier one, where it meets what that one's own backward will need.
Autograd is linear: where its graph can be walked twice, the sum is right. Where it cannot, because
something was saved for one backward only, torch says so, and the job is refused by name.
"""

from __future__ import annotations

import functools
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zrun_core.distributed.rng import TurnStream
from zrun_core.errors import JobError
from zrun_core.pipeline.schedule import Action, ActionKind
from zrun_core.zero.auto_wrap import repeated_blocks
from zrun_core.zero.gather import Gatherer
from zrun_core.zero.micro_pass import MicroPass, PassKind
from zrun_core.zero.module_hooks import tensors_in
from zrun_core.zero.parked_call import ParkedCall
from zrun_core.zero.reduce import Reducer

T = TypeVar("T")
_KEY = "parallel.schedule: layer-major"
_INSTEAD = "write parallel.schedule: 1f1b"
_here = threading.local()  # `walk`: the micro-batch whose forward this thread runs


@dataclass
class _Cut:
    """A tensor that goes from one slice to others. Its memory is theirs, and not held here.

    Attributes:
        origin: as it was made, while it lives.
        edge: its place in the graph of the slice that made it.
        made_in: that slice.
        grad: sum of the gradients that the others have got for it so far.
    """

    origin: weakref.ref[torch.Tensor]
    edge: GradientEdge
    made_in: int
    grad: torch.Tensor | None = None


class _Border(torch.autograd.Function):
    """Passes a tensor on without its graph, and keeps its gradient."""

    @staticmethod
    def forward(ctx: Any, begin: torch.Tensor, tensor: torch.Tensor, cut: _Cut) -> torch.Tensor:
        ctx.cut = cut
        return tensor.detach()  # not a view: a block may write to it, see `_Walk.leave`

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        cut = ctx.cut
        cut.grad = grad if cut.grad is None else cut.grad + grad
        return None, None, None


class _Walk:
    """A micro-batch on its way through the slices.

    Attributes:
        micro: its state in the gatherer and the reducer.
        slice: in which its forward runs, or runs next.
        call: its forward.
        slices: those of the model.
    """

    def __init__(self, call: Callable[[], Any], number: int, slices: SlicedPasses) -> None:
        self.micro = MicroPass()
        self.slice = 0
        self.call = ParkedCall(functools.partial(self._forward, call), f"micro-batch {number}")
        self.slices = slices
        self._stream = TurnStream(slices.device)
        self._starts: list[int] = []  # of slices that it went through: number of the next node
        self._started: list[int] = []  # these slices
        self._cuts: list[_Cut] = []
        self._newest: dict[int, _Cut] = {}  # by identity of the origin, which may be gone
        self._given: dict[int, int] = {}  # by identity of a tensor given to the block: its version
        self._begin = torch.empty((), device=slices.device, requires_grad=True)  # of all graphs

    def _forward(self, call: Callable[[], Any]) -> Any:
        _here.walk = self
        self._begin_slice()
        with self.slices.forward_context():
            return call()

    def go_on(self) -> None:
        """Run its forward to the next border, or to the end."""
        with self._stream.turn():
            self.call.go_on()

    def cross(self, block: nn.Module, inputs: Any) -> Any:
        """Wait at the border before `block`, and return its inputs as leaves."""
        self.slice = self.slices.slice_of(block, after=self.slice)
        self.call.park()
        self._begin_slice()
        if torch.is_grad_enabled():
            return _replaced(inputs, self._cut)
        if any(tensor.requires_grad for tensor in tensors_in(inputs)):
            raise JobError(
                f"{_KEY}: {self.slices.name_of(block)} is called under torch.no_grad() with an "
                "input that requires a gradient, as by torch.utils.checkpoint with "
                f"use_reentrant=True: say use_reentrant=False there, or {_INSTEAD}"
            )
        return inputs

    def _begin_slice(self) -> None:
        self._starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._started.append(self.slice)

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad or tensor.grad_fn is None:
            return tensor  # a constant, or a parameter
        edge = get_gradient_edge(tensor)
        cut = self._newest.get(id(tensor))
        # A tensor that was written in place has another node since.
        if cut is None or cut.origin() is not tensor or cut.edge.node is not edge.node:
            # Threads number the nodes that they make.
            place = bisect_right(self._starts, edge.node._sequence_nr()) - 1
            cut = _Cut(weakref.ref(tensor), edge, self._started[place])
            self._newest[id(tensor)] = cut
            self._cuts.append(cut)
        given: torch.Tensor = _Border.apply(self._begin, tensor.detach(), cut)  # type: ignore[no-untyped-call]
        self._given[id(given)] = given._version
        return given

    def leave(self, block: nn.Module, inputs: Any) -> None:
        """End the call of `block`. Whoever else has its inputs must find in them what was there.

        Raises:
            JobError: the block has written to one.
        """
        given = self._given
        self._given = {}
        if any(given.get(id(each), each._version) != each._version for each in tensors_in(inputs)):
            raise JobError(
                f"{_KEY}: {self.slices.name_of(block)} writes to its input in place, as by "
                f"x += y: write x = x + y, or {_INSTEAD}"
            )

    def backward(self, number: int, loss: torch.Tensor | None) -> None:
        """Run the backward of slice `number`.

        Args:
            loss: for the last slice.
        """
        edges: list[torch.Tensor | GradientEdge] = []
        grads: list[torch.Tensor | None] = []
        if loss is not None:
            edges.append(loss)
            grads.append(None)
        for cut in self._cuts:
            if cut.made_in == number and cut.grad is not None:
                edges.append(cut.edge)
                grads.append(cut.grad)
        self._newest.clear()
        self._cuts = [cut for cut in self._cuts if cut.made_in != number]
        if edges:
            torch.autograd.backward(edges, grads)  # type: ignore[arg-type]

    def end(self) -> None:
        """Forget its forward, and what it holds."""
        self.call.give_up()
        self._newest.clear()
        self._cuts.clear()


class SlicedPasses:
    """Runs the forwards and backwards of one model in slices.

    Attributes:
        num_slices: of the model.
        forward_context: returns the context of a forward.
        device: of this rank.
        is_lost: the step's gradients are made of zeros: see `drop`.
    """

    def __init__(
        self,
        module: nn.Module,
        gatherer: Gatherer,
        reducer: Reducer,
        forward_context: Callable[[], AbstractContextManager[object]],
        device: torch.device,
    ) -> None:
        """Register a hook on each block of `module`, before those of its units.

        Raises:
            JobError: it has no repeated blocks.
        """
        blocks = repeated_blocks(module)
        if not blocks:
            raise JobError(
                f"{_KEY}: the model has no repeated blocks (two members of one class in a "
                f"ModuleList or Sequential, with modules inside); {_INSTEAD}"
            )
        self._names = {id(block): name for name, block in blocks}
        self.num_slices = 1 + len(self._names)
        self.forward_context = forward_context
        self.device = device
        self._gatherer = gatherer
        self._reducer = reducer
        self._order: dict[int, int] = {}  # by identity of a block, its slice: as first called
        self._walks: list[_Walk] = []
        self._slice: int | None = None  # that runs
        self._first_use: dict[int, int] = {}  # by index of a unit, the first slice that uses it
        self._completed_in: list[set[int]] | None = None  # by slice, indices of units: see `_agree`
        self.is_lost = False
        for _, block in blocks:
            block.register_forward_pre_hook(_before_block, with_kwargs=True, prepend=True)
            block.register_forward_hook(_after_block, with_kwargs=True)

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
                f"{_KEY}: {self.name_of(block)} is called a second time by a micro-batch, or "
                f"in another order than by the first one; {_INSTEAD}"
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
            _Walk(_as_in_this_thread(forward, self.device), number, self)
            for number, forward in enumerate(forwards)
        ]
        self._gatherer.begin_pass(MicroPass(), PassKind.FORWARD)
        try:
            yield
        except BaseException:
            self._abandon()
            raise
        self._walks = []
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
                self._gatherer.prefetch_backward()
            if micro.grads is None:
                reducer.begin_backward(micro, boundary=boundary, awaits_slices=True)
        units = self._completed_in[action.chunk]
        reducer.begin_slice(micro, units)
        if not self.is_lost:
            self._differentiate(walk, action.chunk, loss)
        reducer.end_slice(micro, units)
        if action.chunk == 0:
            reducer.end_backward(micro)
            self._gatherer.unpin(micro)

    def _agree(self) -> list[set[int]]:
        """Return by slice the units that get their last gradients there. Collective.

        They are those that it uses and no earlier one does, as rank 0 has seen in the first step,
        and what else its block has: ranks may run different parts of a block.
        """
        slices = {self._names[key]: number for key, number in self._order.items()}
        of_units = []
        for unit in self._reducer.units:
            uses = [self._first_use.get(unit.index), slices.get(unit.layout.block)]
            of_units.append(min((use for use in uses if use is not None), default=0))
        of_units = self._reducer.agree_on(of_units)
        found: list[set[int]] = [set() for _ in range(self.num_slices)]
        for unit, number in zip(self._reducer.units, of_units, strict=True):
            found[number].add(unit.index)
        if not self._reducer.has_recorded_order:  # that of registration may contradict the slices
            self._reducer.use_order([index for units in reversed(found) for index in sorted(units)])
        return found

    def _switch_to(self, action: Action) -> _Walk:
        if action.chunk != self._slice:
            self._slice = action.chunk
            self._gatherer.begin_slice()
        walk = self._walks[action.micro]
        kind = PassKind.FORWARD if action.kind is ActionKind.FORWARD else PassKind.BACKWARD
        self._gatherer.switch_to(walk.micro, kind)
        return walk

    def _differentiate(self, walk: _Walk, number: int, loss: torch.Tensor | None) -> None:
        try:
            walk.backward(number, loss)
        except RuntimeError as error:
            if "through the graph a second time" not in str(error):
                raise
            block = next((key for key, each in self._order.items() if each == number), None)
            where = "what comes before the blocks" if block is None else self._names[block]
            raise JobError(
                f"{_KEY}: the backward of {where} was run twice, because a later part of the model "
                "uses what it makes other than as an input of a block (a skip connection, an "
                f"auxiliary loss); {_INSTEAD}"
            ) from error

    def drop(self) -> None:
        """Drop the step of this rank, whose reductions are made of zeros from now on."""
        self.is_lost = True
        self._abandon()

    def _abandon(self) -> None:
        for walk in self._walks:
            walk.end()
        for walk in self._walks:
            self._gatherer.abandon(walk.micro)


def _before_block(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Park a micro-batch that comes to `block`. Elsewhere blocks run as they are."""
    walk = _walk_to(block)
    return None if walk is None else walk.cross(block, (args, kwargs))


def _after_block(block: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    walk = _walk_to(block)
    if walk is not None:
        walk.leave(block, (args, kwargs))


def _walk_to(block: nn.Module) -> _Walk | None:
    """Return the micro-batch that calls `block` in this thread, if it is one of the model's."""
    walk: _Walk | None = getattr(_here, "walk", None)
    return walk if walk is not None and walk.slices.knows(block) else None


def _as_in_this_thread(call: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """Return `call` for another thread, with what torch keeps for each thread as in this one."""
    default = torch.get_default_device()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def same() -> T:
        with ExitStack() as contexts:
            if default.type != "cpu":
                contexts.enter_context(default)
            if stream is not None:
                contexts.enter_context(torch.cuda.stream(stream))
            return call()

    return same


def _replaced(value: Any, new: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with its tensors replaced: tuples anew, lists and mappings in place."""
    if isinstance(value, torch.Tensor):
        return new(value)
    if isinstance(value, tuple):
        items = [_replaced(item, new) for item in value]
        if all(item is old for item, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        value[:] = [_replaced(item, new) for item in value]
    elif isinstance(value, MutableMapping):
        for key, item in list(value.items()):
            replaced = _replaced(item, new)
            if replaced is not item:
                value[key] = replaced
    return value
