"""The cost of one micro-batch on one rank, segment by segment. Plain data.

A segment is a repeated block of the model, or all that comes before or after the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zrun_core.plan.timing.link_cost import NOTHING, TransferCost

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of an element in a compute format


@dataclass(frozen=True)
class TimingSettings:
    """The settings of a job, besides the candidate, on which its time depends.

    Attributes:
        reduce_bytes: of a gradient's element, from accumulation to the update.
        moments, moment_bytes: values that the optimizer keeps per parameter, and bytes of each.
        prefetch: units gathered ahead.
        every_n: of `checkpoint: every_n`.
        fused: operations between products are fused, by a compiler or by hand; else each of them
            reads and writes memory.
        through_first: gradients go to the first rank, and parameters come from there: it is a
            parameter server.
        updates_apart: that rank updates by each one's gradient, instead of by their sum.
    """

    reduce_bytes: int = 4
    moments: int = 2
    moment_bytes: int = 4
    prefetch: int = 1
    every_n: int = 2
    fused: bool = False
    through_first: bool = False
    updates_apart: bool = False


@dataclass(frozen=True)
class SegmentCost:
    """The cost of a segment on one rank.

    Attributes:
        forward, backward: seconds in kernels; `backward` includes `recompute`.
        recompute: seconds of recomputation.
        weights: seconds of `backward` for gradients of weights that zero bubble makes later.
        forward_launches, backward_launches: seconds of these that operators take however small
            they are, where they were traced.
        tp_forward, tp_backward: tensor-parallel traffic that computation does not hide.
        params, trainable: elements on this rank, before they are sharded.
        flops: of forward and backward, without recomputation.
        recompute_flops: of recomputation.
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    weights: float = 0.0
    forward_launches: float = 0.0
    backward_launches: float = 0.0
    tp_forward: TransferCost = NOTHING
    tp_backward: TransferCost = NOTHING
    params: float = 0.0
    trainable: float = 0.0
    flops: float = 0.0
    recompute_flops: float = 0.0


@dataclass(frozen=True)
class MicroBatchCost:
    """The segments of a model, in order.

    Attributes:
        boundary_bytes: of the tensor that one block hands to the next, on one rank.
    """

    before: SegmentCost
    blocks: tuple[SegmentCost, ...]
    after: SegmentCost
    boundary_bytes: float

    def __iter__(self) -> Iterator[SegmentCost]:
        yield from (self.before, *self.blocks, self.after)

    def map(self, change: Callable[[SegmentCost], SegmentCost]) -> MicroBatchCost:
        """Return it with each segment changed; one that is there many times stays one object."""
        changed = {id(segment): change(segment) for segment in self}
        return replace(
            self,
            before=changed[id(self.before)],
            blocks=tuple(changed[id(block)] for block in self.blocks),
            after=changed[id(self.after)],
        )
