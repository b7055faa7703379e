"""Bytes that autograd keeps for backward, by the module whose backward needs them.

    kept_for_backward(model, device, known)       {"blocks.3.mlp.up": 25165824, ...}

Nothing is noted in forward: the graph is walked when memory has run out. A node that uses a
parameter belongs to the module of that parameter; another one, such as a GELU, to that of the node
whose output it takes.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_RAW = "_raw_saved_"


class _Node(NamedTuple):
    """What is known of a node of the graph.

    Attributes:
        module: that it belongs to; None: unknown.
        is_param: it passes on a parameter and nothing else, maybe transposed or in another format.
    """

    module: str | None
    is_param: bool


def kept_for_backward(model: nn.Module, device_type: str, known: set[int]) -> Counter[str]:
    """Return the bytes of tensors that wait for backward, by the name of a module.

    Args:
        model: the outermost module.
        known: addresses of storages that do not; those that are found here are added.
    """
    owners = {id(param): name.rpartition(".")[0] for name, param in model.named_parameters()}
    found: Counter[str] = Counter()
    nodes: dict[Any, _Node] = {}
    for root in _roots():
        for node in _from_inputs_on(root, nodes):
            about = _about(node, nodes, owners)
            nodes[node] = about
            for tensor in _saved(node):
                is_elsewhere = tensor.device.type != device_type or isinstance(tensor, FakeTensor)
                if is_elsewhere or tensor.layout is not torch.strided:
                    continue
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in known:
                    known.add(storage.data_ptr())
                    found[about.module or ""] += storage.nbytes()
    return found


def _roots() -> list[Any]:
    """Return the nodes that made the tensors which Python knows."""
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            with suppress(RuntimeError):  # a view whose base was changed in place
                if thing.grad_fn is not None:
                    found.append(thing.grad_fn)
    return found


def _from_inputs_on(root: Any, seen: dict[Any, _Node]) -> Iterator[Any]:
    """Yield the nodes below `root` that are not in `seen`, each after those that it takes from."""
    stack = [(root, False)]
    entered = set()
    while stack:
        node, is_left = stack.pop()
        if is_left:
            yield node
        elif node not in seen and node not in entered:
            entered.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)


def _about(node: Any, nodes: dict[Any, _Node], owners: dict[int, str]) -> _Node:
    variable = getattr(node, "variable", None)
    if variable is not None:  # the end of the graph, at a parameter
        return _Node(owners.get(id(variable)), is_param=True)
    inputs = [child for child, _ in node.next_functions]
    below = [nodes[child] for child in inputs if child in nodes]
    if len(inputs) == 1 and below:
        return below[0]
    # Of several, a bias or weight itself says most; a weight is transposed, and comes last.
    direct = [
        nodes[child].module
        for child in inputs
        if child in nodes and getattr(child, "variable", None) is not None
    ]
    params = [each.module for each in reversed(below) if each.is_param]
    others = [each.module for each in below if not each.is_param]
    module = next((name for name in (*direct, *params, *others) if name is not None), None)
    return _Node(module, is_param=False)


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """Yield what a node keeps, as it lies there: hooks that would bring it back are not called."""
    for name in dir(node):
        if not name.startswith(_RAW):
            continue
        with suppress(RuntimeError, AttributeError):  # let go of, or of an older torch
            kept = getattr(node, name)
            for saved in kept if isinstance(kept, (list, tuple)) else (kept,):
                data = getattr(saved, "data", None)
                if isinstance(data, torch.Tensor):
                    yield data
