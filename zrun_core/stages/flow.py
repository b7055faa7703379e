"""The flow through a model, as one followed forward shows it: where it can be cut into stages.

Calls of nodes hand out tensors, the leaves, and use those of others:

    call 0  embed      hands out  leaf (0, 0)                            segment 0
    call 1  blocks.0   uses (0, 0), hands out (1, 0)                     segment 0
    call 2  blocks.1   uses (1, 0), hands out (2, 0)                     segment 1
    call 3  norm       uses (2, 0), ...                                  segment 2: after the blocks

A border between two stages is crossed by the leaves that were made before it and are used after it.
`follow.py` finds all this out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from zrun_core.errors import JobError


@dataclass(frozen=True)
class Leaf:
    """A tensor that a call of a node hands out.

    Attributes:
        call: number of the call in a forward.
        number: of the tensor among those that it hands out; -1: other than as its result.
        segment: in which the call is made.
        last_use: last segment that uses the tensor.
        shape: for the batch that was followed.
        dtype: such as "float32".
        requires_grad: a gradient comes back for it.
        written: first segment that writes to it once it is handed out; None: none does.
    """

    call: int
    number: int
    segment: int
    last_use: int
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    written: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of it, for the batch that was followed."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.Size(self.shape).numel() * dtype.itemsize


@dataclass(frozen=True)
class OutsideUse:
    """A parameter that is used outside of nodes, and where what is made of it is used.

    Attributes:
        param: its name.
        segment: in which it is used.
        used_in: segments that use what it was made part of.
    """

    param: str
    segment: int
    used_in: tuple[int, ...]


@dataclass(frozen=True)
class ParamWrite:
    """A parameter that a forward writes to.

    Attributes:
        line: that does, as file and line.
        is_in_node: it is that of a node, which one stage runs once.
    """

    line: str
    is_in_node: bool


@dataclass(frozen=True)
class NodeCall:
    """A call of a node in a forward.

    Attributes:
        name: of the node.
        segment: in which it is called.
        hands_on: its result is one tensor, like the first that it is given in shape and dtype.
    """

    name: str
    segment: int
    hands_on: bool = False


@dataclass(frozen=True)
class ModelFlow:
    """The flow through a model with n blocks, in n + 1 segments.

    Segment k is what runs after block k - 1 up to the end of block k; segment n follows the last
    block.

    Attributes:
        blocks: their names, in the order in which they are called.
        flops: of the forward, by segment, for the batch that was followed.
        uses: by the first name of a parameter, the segments that use it.
        calls: of nodes, in order.
        leaves: what they hand out and others use.
        outside: uses of parameters outside of nodes.
        uncounted: why some operators are not among the FLOPs; empty: all are.
        collecting: setting by which the model collects what its blocks make inside; "": none.
        differentiates: file and line at which the forward asks for gradients; "": nowhere.
        written: by name of a parameter, the first write to it.
        changed: names of buffers that nodes change.
    """

    blocks: tuple[str, ...]
    flops: tuple[float, ...]
    uses: Mapping[str, tuple[int, ...]]
    calls: tuple[NodeCall, ...]
    leaves: tuple[Leaf, ...]
    outside: tuple[OutsideUse, ...] = ()
    uncounted: str = ""
    collecting: str = ""
    differentiates: str = ""
    written: Mapping[str, ParamWrite] = field(default_factory=dict)
    changed: tuple[str, ...] = ()

    def crossing(self, block: int) -> tuple[Leaf, ...]:
        """Return what crosses the border before block `block`.

        Raises:
            JobError: a tensor does that cannot be followed.
        """
        found = tuple(leaf for leaf in self.leaves if leaf.segment < block <= leaf.last_use)
        for leaf in found:
            name = self.calls[leaf.call].name
            used = self._segment_in_words(leaf.last_use)
            if leaf.number < 0 and self.differentiates:
                raise JobError(
                    "parallel.pp: gradients that the forward itself asks for, as of a gradient "
                    f"penalty, do not pass from one stage to another ({self.differentiates}): "
                    f"they pass {name}; write pp: 1, with zero: 3 where the model is large, or "
                    "leave the penalty out"
                )
            if leaf.number < 0:
                way = "through an attribute, a list or in place"
                advice = f"return it from {name}, or name other blocks in parallel.split"
                if self.collecting:
                    way = f"collected by {self.collecting}"
                    advice = f"write {self.collecting} = False where the model is made, or pp: 1"
                raise JobError(
                    f"parallel.pp: {name} hands a tensor to {used} other than as its result "
                    f"({way}), so no stage can end between them: {advice}"
                )
            if leaf.written is not None and leaf.written < block:
                raise JobError(
                    f"parallel.pp: what {name} returns is written to in place before it comes to "
                    f"{used}, so each stage between them would write to it once more: write "
                    "x = x + y in place of x += y, or name other blocks in parallel.split"
                )
        return found

    def _segment_in_words(self, segment: int) -> str:
        if segment < len(self.blocks):
            return self.blocks[segment]
        return "what follows the blocks"
