"""A backward in two passes: what other stages of a pipeline wait for, and the weights' gradients.

backward = SplitBackward(sharded)
with backward.input_pass(micro) as hold:
    loss.backward()                              # linears hold the gradients of their weights
backward.weight_pass(micro, boundary=True)       # any time later; this ends `micro`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.micro_pass import HeldGrad, HeldGrads, MicroPass, PassKind

# Holds the gradient of a parameter, which a call will make.
HoldGrad = Callable[[nn.Parameter, Callable[[], torch.Tensor]], None]


class SplitBackward:
    """The two passes of a model's backwards."""

    def __init__(self, sharded: ShardedModel, late: Iterable[nn.Parameter]) -> None:
        """
        Args:
            late: parameters whose gradients are made in the second pass. Those of their units wait
                for it too; others are added up in the first one, where nothing speaks against it.
        """
        self._sharded = sharded
        self._gatherer = sharded.gatherer
        # By identity of a parameter its unit, and its number there.
        self._places = {
            id(param): (unit, number)
            for unit in sharded.units
            if unit.trainable
            for number, param in enumerate(unit.params)
        }
        waits = {self._places[id(param)][0].index for param in late if id(param) in self._places}
        self._at_once = {
            unit.index
            for unit, _ in self._places.values()
            if unit.index not in waits and sharded.reducer.adds_at_once(unit)
        }

    @contextmanager
    def input_pass(self, micro: MicroPass) -> Iterator[HoldGrad]:
        """Run the backward of `micro` inside, as far as other stages of a pipeline wait for it.

        The gradients of parameters are held, until `weight_pass`.

        Yields:
            What holds a gradient that is still to be made.
        """
        held = HeldGrads(self._at_once)

        def hold(param: nn.Parameter, make: Callable[[], torch.Tensor]) -> None:
            unit, number = self._places[id(param)]
            if held.add(HeldGrad(unit, number, make)) and not unit.leaf:
                self._gatherer.post_backward(unit)

        self._gatherer.begin_pass(micro, PassKind.BACKWARD)
        micro.held = held
        yield hold
        self._gatherer.pins.release(micro)
        self._gatherer.end_pass()

    def weight_pass(self, micro: MicroPass, *, boundary: bool) -> None:
        """Make the gradients that `input_pass` has held, and reduce them; this ends `micro`.

        Args:
            boundary: as of `ShardedModel.backward_pass`.
        """
        held = micro.held
        assert held is not None
        micro.held = None
        reducer = self._sharded.reducer
        with self._sharded.backward_pass(micro, boundary=boundary):
            left = Counter((each.unit.index, each.number) for each in held.grads)
            for unit, number, make in held.grads:
                if make is not None:
                    _add(unit.params[number], make)
                left[unit.index, number] -= 1
                if left[unit.index, number]:
                    continue
                if reducer.accumulate_grad(micro, unit, number, is_added=make is None):
                    reducer.mark_complete(micro, unit)
            held.grads.clear()


def _add(param: nn.Parameter, make: Callable[[], torch.Tensor]) -> None:
    """Make a part of a parameter's gradient."""
    with torch.no_grad():
        grad = make()
        param.grad = grad if param.grad is None else param.grad + grad
