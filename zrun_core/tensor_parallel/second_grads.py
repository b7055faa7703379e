"""Gradients of gradients, as of a gradient penalty: they do not pass divided layers.

    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)

What crosses the border of a region is summed over ranks, and autograd knows the gradient of that
sum, not how that one is made of others. A forward without values finds most of them before
training; where that cannot be, the border refuses to be crossed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from zrun_core.errors import JobError
from zrun_core.spine.tracebacks import is_users
from zrun_core.user_code.asked_gradients import seeing_gradients
from zrun_core.zero.passes.module_hooks import tensors_in


class SecondGrads:
    """Looks for them in one forward of the whole model."""

    def __init__(self) -> None:
        self._made: list[Any] = []  # nodes of the graph that divided layers have made
        self._before: dict[int, torch.Tensor] = {}  # by identity of a leaf, what it stands for
        self._leaves: list[torch.Tensor] = []  # kept, so that no other has their identities

    def made(self, out: Any) -> None:
        """Take in the result of a layer that will be divided."""
        self._made += [each.grad_fn for each in tensors_in(out) if each.grad_fn is not None]

    def cut(self, leaf: torch.Tensor, before: torch.Tensor) -> None:
        """Take in that the forward goes on with a leaf in place of a tensor."""
        self._leaves.append(leaf)
        self._before[id(leaf)] = before

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Refuse them inside.

        Raises:
            JobError: the forward asks for gradients of gradients that pass a divided layer.
        """

        def see(outputs: Sequence[torch.Tensor], *args: Any, **_: Any) -> None:
            _, _, create_graph, inputs = args[:4]
            if create_graph and self._passes(outputs, inputs):
                raise _error()

        with seeing_gradients(see):
            yield

    def _passes(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
        """Return whether gradients pass a divided layer on the way from `outputs` to `inputs`.

        Without `inputs`, all leaves are meant.
        """
        wanted = {each.grad_fn or id(each) for each in tensors_in(list(inputs))}
        after: dict[Any, list[Any]] = defaultdict(list)  # by node, those that hand it a gradient
        reached: list[Any] = []
        waiting = [each.grad_fn for each in tensors_in(list(outputs))]
        seen = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            before = [each for each, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if id(leaf) in self._before:
                source = self._before[id(leaf)]
                leaf, before = source, [source.grad_fn]
            if node in wanted or id(leaf) in wanted or (not wanted and leaf is not None):
                reached.append(node)
            for each in before:
                after[each].append(node)
            waiting += before
        run = set()  # nodes through which a gradient goes on
        while reached:
            new = [each for each in after[reached.pop()] if each not in run]
            run.update(new)
            reached += new
        return not run.isdisjoint(self._made)


def refuse_second_grads() -> None:
    """Refuse, in a backward across a border, that autograd records it.

    Raises:
        JobError: it does.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise _error()


def _error() -> JobError:
    place = _place()
    at = f" ({place})" if place else ""
    return JobError(
        "parallel.tp: gradients of gradients, as of a gradient penalty by autograd.grad with "
        f"create_graph=True, do not pass layers that are divided{at}: write tp: 1, with zero: 3 "
        "where the model is large, or leave the penalty out"
    )


def _place() -> str:
    """Return the file and line of the user's that asks for a gradient; "" on another thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
