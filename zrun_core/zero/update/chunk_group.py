"""Chunks of a unit that are updated at once, so that they stay in a CPU's cache, by one optimizer.

An update takes a group of chunks at a time: it casts their gradient to fp32, calls their optimizer,
and casts their masters to the parameters. So what one operation writes the next one finds in the
cache. Each group has an optimizer of its own, which knows each chunk as a parameter, with its own
step count. With `CHUNK` of 4 elements and `GROUP` of 8:

    elements    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17
    pieces      |------------ w1 ------------||- b1 -||---- w2 -----|
    chunks      [--------- w1 --------][- w1 -][- b1 -][---- w2 ----]
    groups      [----------------------][-------------][------------]

w1 fills the first group, and its last 3 elements share the second with b1. Of w2 a chunk of 4 does
not fit there, so it begins the third.

A chunk ends with its piece, or a multiple of `CHUNK` from the piece's start. No bit depends on such
a cut: loops compute the last few elements of a tensor otherwise than full vectors, and `CHUNK` is a
multiple of every vector.

[Note: threads and bits]
On chunks of 256 Ki elements every optimizer of torch that zrun takes gives the bits that it gives
on the whole tensor, fused or not, with 1, 2 and 3 threads alike. What must hold is where chunks
end: cut every 777 elements, `torch._fused_adamw_` gives others. How many threads compute may differ
from run to run, and from thread to thread of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zrun_core.memory.layout import ParamSlot, Piece
from zrun_core.optim.resolve import OptimizerSpec, Options


@dataclass(eq=False, slots=True)
class Chunk:
    """Elements [start, stop) of the updated range, all of one piece.

    Attributes:
        param: as the optimizer knows them.
        views: by name, those of its states that are views of the record.
    """

    piece: Piece
    start: int
    stop: int
    param: torch.nn.Parameter
    views: dict[str, torch.Tensor] = field(default_factory=dict)


class ChunkGroup:
    """Chunks one behind the other that are updated at once, and their optimizer.

    Attributes:
        start, stop: of all of them, in the updated range.
        num_in_record: chunks whose states were moved into the record.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        spec: OptimizerSpec,
        groups: Sequence[Options],
        group_of: Callable[[ParamSlot], int],
    ) -> None:
        self.chunks = chunks
        self.start = chunks[0].start
        self.stop = chunks[-1].stop
        self.num_in_record = 0
        self._sizes = [chunk.stop - chunk.start for chunk in chunks]
        self.optimizer = spec.make([chunk.param for chunk in chunks])
        # Only the groups that have a parameter here.
        self.optimizer.param_groups.clear()
        members: dict[int, list[torch.nn.Parameter]] = {}
        for chunk in chunks:
            members.setdefault(group_of(chunk.piece.slot), []).append(chunk.param)
        self._group_numbers = sorted(members)
        for number in self._group_numbers:
            self.optimizer.add_param_group({"params": members[number], **groups[number]})

    def state_of(self, chunk: Chunk) -> dict[str, Any]:
        """Return the optimizer's state of one of the chunks: empty until it is updated."""
        state: dict[str, Any] = self.optimizer.state.get(chunk.param, {})
        return state

    def set_options(self, groups: Sequence[Options]) -> None:
        """Replace the options of each parameter group."""
        for number, group in zip(self._group_numbers, self.optimizer.param_groups, strict=True):
            group.update(groups[number])

    def set_lr(self, lr: float) -> None:
        """Use this learning rate in all parameter groups."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def set_grads(self, grad: torch.Tensor, has_grad: bytes | bytearray) -> None:
        """Give the optimizer its gradients.

        Args:
            grad: [stop - start] fp32.
            has_grad: by parameter of the unit; one without a gradient is left alone by the update.
        """
        parts = grad.split_with_sizes(self._sizes)
        for chunk, part in zip(self.chunks, parts, strict=True):
            chunk.param.grad = part if has_grad[chunk.piece.index] else None

    def clear_grads(self) -> None:
        """Take the gradients away from the optimizer."""
        for chunk in self.chunks:
            chunk.param.grad = None


def cut_into_groups(
    runs: Iterable[tuple[Piece, int, int]], limit: int, every: int
) -> Iterator[list[tuple[Piece, int, int]]]:
    """Cut runs of elements, one behind the other, into groups of chunks.

    Args:
        runs: (piece, first element, last + 1).
        limit: elements of a group, at least `every`.
        every: a run is cut at multiples of it only, counted from its start.
    """
    group: list[tuple[Piece, int, int]] = []
    room = limit
    for piece, start, stop in runs:
        while start < stop:
            size = stop - start
            if size > room:
                size = room // every * every
            if size:
                group.append((piece, start, start + size))
                start += size
                room -= size
            else:
                yield group
                group = []
                room = limit
    if group:
        yield group
