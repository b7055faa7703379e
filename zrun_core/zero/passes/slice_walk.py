"""A micro-batch on its way through the slices of a model: see `sliced_passes.py`.

    forward    The user's own forward runs, in a thread for each micro-batch, one at a time. A hook
               on each block parks it where a slice begins.
    border     What the block is given is cut off from its graph, and keeps its gradient there.
    backward   A slice is differentiated from its end: from the loss, or from what was cut there,
               with the gradients that were kept. Autograd ends at the border before it.

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
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zrun_core.distributed.rng import TurnStream
from zrun_core.errors import JobError
from zrun_core.user_code.turns import OwnAttributes
from zrun_core.zero.passes.module_hooks import tensors_in
from zrun_core.zero.passes.parked_call import ParkedCall
from zrun_core.zero.unit.micro_pass import MicroPass

if TYPE_CHECKING:
    from zrun_core.zero.passes.sliced_passes import SlicedPasses

KEY = "parallel.schedule: layer_major"
INSTEAD = "write parallel.schedule: 1f1b"
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
        return tensor.detach()  # not a view: a block may write to it, see `Walk.leave`

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        cut = ctx.cut
        cut.grad = grad if cut.grad is None else cut.grad + grad
        return None, None, None


class Walk:
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
        self._number = number
        self.call = ParkedCall(functools.partial(self._forward, call), f"micro-batch {number}")
        self.slices = slices
        self._stream = TurnStream(slices.device)
        self._attributes = OwnAttributes(slices.turns, number)
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
        with self._stream.turn(), self._attributes.turn():
            self.call.go_on()
        if self.call.is_over:
            self.slices.turns.note_end(self._number)

    def cross(self, block: nn.Module, inputs: Any) -> Any:
        """Wait at the border before `block`, and return its inputs as leaves."""
        self.slice = self.slices.slice_of(block, after=self.slice)
        self.call.park()
        self._begin_slice()
        if torch.is_grad_enabled():
            return _replaced(inputs, self._cut)
        if any(tensor.requires_grad for tensor in tensors_in(inputs)):
            raise JobError(
                f"{KEY}: {self.slices.name_of(block)} is called under torch.no_grad() with an "
                "input that requires a gradient, as by torch.utils.checkpoint with "
                f"use_reentrant=True: say use_reentrant=False there, or {INSTEAD}"
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
                f"{KEY}: {self.slices.name_of(block)} writes to its input in place, as by "
                f"x += y: write x = x + y, or {INSTEAD}"
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


def watch(block: nn.Module) -> None:
    """Have walks stop before `block`, ahead of the hooks of its units."""
    block.register_forward_pre_hook(_before_block, with_kwargs=True, prepend=True)
    block.register_forward_hook(_after_block, with_kwargs=True)


def _before_block(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Park a micro-batch that comes to `block`. Elsewhere blocks run as they are."""
    walk = _walk_to(block)
    return None if walk is None else walk.cross(block, (args, kwargs))


def _after_block(block: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    walk = _walk_to(block)
    if walk is not None:
        walk.leave(block, (args, kwargs))


def _walk_to(block: nn.Module) -> Walk | None:
    """Return the micro-batch that calls `block` in this thread, if it is one of the model's."""
    walk: Walk | None = getattr(_here, "walk", None)
    return walk if walk is not None and walk.slices.knows(block) else None


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
