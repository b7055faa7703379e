"""Whether what experts return is a sum of what slices of them come to: their graph tells.

    up ─► act ─► down ─► * weight of the route ─► + others       each rank's part of the result
    up ─► act ─► down ─► norm                                    norms of parts are no parts
    up ─► act ─► down ─► + bias                                  ranks would add it each

Behind the products with the weights that are divided by columns, operations have to be linear, and
what is added has to be made of such a product too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

_PRODUCTS = {"Mm", "Addmm", "Bmm", "Baddbmm", "GroupedMm", "Linear"}
_ADDING = {"Addmm", "Baddbmm"}
_FACTORS = {"Mul", "Div"}  # of which one at most is made of such a product
_SUMS = {"Add", "Sub", "IndexAdd", "IndexPut", "IndexCopy", "Cat", "Stack", "Scatter", "ScatterAdd"}
_MOVES = {
    *("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Expand", "Transpose", "T"),
    *("Permute", "Select", "Slice", "Split", "SplitWithSizes", "Unbind", "AsStrided", "Alias"),
    *("Index", "IndexSelect", "Gather", "Repeat", "Sum", "Mean", "ToCopy", "Clone", "Neg"),
    *("MaskedFill", "CopySlices"),
}


def found_beside_sum(output: Any, rows: Collection[int], once: Collection[int]) -> str:
    """Return what makes a result of experts other than the sum of its parts; empty: nothing.

    Args:
        output: node of the graph that made the result.
        rows: identities of parameters that are divided by columns.
        once: identities of those that count once.
    """
    leaves = _leaves(output)
    seen: set[Any] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node in seen or (leaves[node] and leaves[node] <= set(once)):
            continue
        seen.add(node)
        name = _name(node)
        after = [(place, each) for place, (each, _) in enumerate(node.next_functions) if each]
        ours = [(place, each) for place, each in after if leaves[each] & set(rows)]
        if name in _PRODUCTS and any(leaves[each] <= set(rows) for _, each in ours):
            # What the weights are multiplied with may be anything; the first argument is added.
            waiting.extend(each for place, each in after if name in _ADDING and place == 0)
        elif name in _FACTORS and len(ours) == 1:
            waiting.append(ours[0][1])
        elif not ours:
            return "a whole tensor"
        elif name in _SUMS | _MOVES:
            waiting.extend(each for _, each in after)
        else:
            return name.lower()
    return ""


def _name(node: Any) -> str:
    """Return the name of an operation, as torch writes it: `AddBackward0` gives `Add`."""
    name: str = node.name()
    return name.rpartition("Backward")[0] or name


def _leaves(output: Any) -> dict[Any, frozenset[int]]:
    """Return the identities of the tensors that each node of a graph was made of."""
    leaves: dict[Any, frozenset[int]] = {}
    waiting = [output]
    while waiting:
        node = waiting[-1]
        after = [each for each, _ in node.next_functions if each is not None]
        missing = [each for each in after if each not in leaves]
        if missing:
            waiting.extend(missing)
            continue
        own = {id(node.variable)} if hasattr(node, "variable") else set()
        leaves[node] = frozenset(own).union(*(leaves[each] for each in after))
        waiting.pop()
    return leaves
