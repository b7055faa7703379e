"""What a formula says of a part of a model, as far off as it is for the whole, which was traced.

A search compares parts of a model by formula with the whole model by its trace: without this the
parts would lack the operators that the formula leaves out, and look faster than they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from zrun_core.plan.timing.micro_batch_cost import MicroBatchCost, SegmentCost


class _Seconds(NamedTuple):
    """Seconds of an average segment."""

    forward: float
    backward: float
    forward_launches: float
    backward_launches: float

    @classmethod
    def of(cls, segments: Sequence[SegmentCost]) -> _Seconds:
        count = max(1, len(segments))
        sums = (sum(getattr(each, name) for each in segments) for name in cls._fields)
        return cls(*(total / count for total in sums))


def corrected(
    part: MicroBatchCost, told: MicroBatchCost, traced: MicroBatchCost, tp: int
) -> MicroBatchCost:
    """Return the cost of a part of a model, by the ratio of trace and formula of the whole.

    Args:
        part: of one of `tp` ranks, by formula.
        told: of the whole model, by formula.
        traced: of the whole model.
        tp: ranks that have a part each.
    """
    before, blocks, after = (
        (_Seconds.of(real), _Seconds.of(said))
        for real, said in (
            ([traced.before], [told.before]),
            (traced.blocks, told.blocks),
            ([traced.after], [told.after]),
        )
    )
    ends = {id(part.before): before, id(part.after): after}
    return part.map(lambda each: _correct(each, *ends.get(id(each), blocks), tp))


def _correct(segment: SegmentCost, traced: _Seconds, told: _Seconds, tp: int) -> SegmentCost:
    ahead = traced.forward / told.forward if told.forward else 1.0
    back = traced.backward / told.backward if told.backward else 1.0
    # Each rank launches all operators, however small its part of them is.
    more = 1 - 1 / tp
    backward = segment.backward * back + more * traced.backward_launches
    return replace(
        segment,
        forward=segment.forward * ahead + more * traced.forward_launches,
        backward=backward,
        forward_launches=traced.forward_launches,
        backward_launches=traced.backward_launches,
        recompute=segment.recompute * ahead,
        weights=min(backward, segment.weights * back),
    )
