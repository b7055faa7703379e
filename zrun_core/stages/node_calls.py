"""Calls of a model's nodes, which a walk may take over: what a pipeline cuts a model between.

A node is a repeated block, or an outermost module outside of the blocks that has parameters and no
block inside. A call of one goes to the walk that is under way in this thread, before any hook of
the module; without a walk it is a plain call.

    with walking(walk):
        model(**batch)          # walk.call(node, args, kwargs) for each call of a node
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from zrun_core.distributed.rng import ForwardStreams
from zrun_core.errors import UserCodeError
from zrun_core.user_code.forward_layers import Layer, calls_without_layers, wrap_forward

_here = threading.local()  # `walk`: of the pass that this thread runs


class Walk(Protocol):
    """Takes over the calls of nodes."""

    def call(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any: ...


# Is told what a node has returned: the number of the call, the node, and that.
Watcher = Callable[[int, "Node", Any], None]


class DrawingWalk:
    """Runs all nodes, each of which draws from a stream of its own."""

    def __init__(self, draws: ForwardStreams, watcher: Watcher | None = None) -> None:
        self._draws = draws
        self._watcher = watcher
        self._num_calls = 0

    def call(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        number = self._num_calls
        self._num_calls += 1
        with self._draws.of_call(number):
            output = node.run(args, kwargs)
        if self._watcher is not None:
            self._watcher(number, node, output)
        return output


class Node:
    """Stands before a module's hooks: a layer.

    Attributes:
        module: whose calls come here.
        name: of it in the model.
        is_block: it is a repeated block.
        forward: of the module, as the user wrote it.
        is_elsewhere: another stage has its parameters.
    """

    def __init__(self, module: nn.Module, name: str, *, is_block: bool) -> None:
        self.module = module
        self.name = name
        self.is_block = is_block
        self.forward = module.forward
        self.is_elsewhere = False

    def call_of_node(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, or have the walk that is under way do it."""
        walk: Walk | None = getattr(_here, "walk", None)
        if walk is None and self.is_elsewhere:
            raise UserCodeError(
                f"{self.name} is on another stage: with parallel.pp a rank has a part of the "
                "model. A hook calls the whole model, within context.gathered(), on each rank "
                "where context.runs_model; else export a checkpoint (zrun ckpt export)"
            )
        if walk is None:
            return self.run(args, kwargs)
        return walk.call(self, args, kwargs)

    def run(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the module, hooks and all. Nodes inside of it are part of it."""
        walk = getattr(_here, "walk", None)
        _here.walk = None
        try:
            return type(self.module)._call_impl(self.module, *args, **kwargs)
        finally:
            _here.walk = walk

    def __deepcopy__(self, memo: dict[int, Any]) -> Node:
        """Return the node of the copied module, of which no walk knows."""
        module = memo.get(id(self.module), self.module)
        return Node(module, self.name, is_block=self.is_block)


def is_walking() -> bool:
    """Return whether a walk takes over the calls of nodes in this thread."""
    return getattr(_here, "walk", None) is not None


@contextmanager
def walking(walk: Walk) -> Iterator[None]:
    """Let `walk` take over the calls of nodes in this thread."""
    _here.walk = walk
    try:
        yield
    finally:
        _here.walk = None


@contextmanager
def installed_nodes(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
    """Have a model's nodes installed inside, and afterwards those that were."""
    with calls_without_layers(list(model.modules())):
        install_nodes(model, blocks)
        yield


def install_nodes(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> list[Node]:
    """Make nodes of the blocks and of the modules outside of them that have parameters.

    Args:
        blocks: names and modules of its repeated blocks.

    Returns:
        The nodes, in order of registration.
    """
    of_blocks = {id(block) for _, block in blocks}
    found: list[Node] = []
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        is_block = id(module) in of_blocks
        holds_block = any(id(inner) in of_blocks for inner in module.modules())
        has_params = any(True for _ in module.parameters())
        if is_block or (has_params and not holds_block):
            node = Node(module, name, is_block=is_block)
            wrap_forward(module, Layer.NODE, node.call_of_node)
            found.append(node)
            if is_block:
                return
        # A container that is never called has nodes inside; one that is called hides them.
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child)

    visit("", model)
    return found
