"""What ranks with slices of the same layers send each other for a micro-batch, message by message.

    of a block               forward                      backward                     recomputed
    whole sequences          2 sums                       2 sums                       1 sum
    slices of sequences      2 gathers, 2 scattered sums  2 gathers, 2 scattered sums  2 and 1
    inputs of blocks divided                                                           1 gather

Each has b * s * h elements. A recomputation stops before its last sum, of which backward needs
nothing. A sum of an embedding's rows, one of the gradient of the head's input, and three numbers of
each token for the cross-entropy come to it. That is of a GPT; a trace tells those of any model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from zrun_core.plan.question.candidate import Candidate, CandidateKey
from zrun_core.plan.timing.cost_model import CostModel
from zrun_core.plan.timing.micro_batch_cost import BYTES
from zrun_core.plan.timing.traced_cost import owners
from zrun_core.plan.trace.profile import Trace
from zrun_core.plan.trace.rows import PHASE_NUMBER, TracePhase, values_at
from zrun_core.plan.trace.waiting_inputs import inputs_of_blocks
from zrun_core.zero.unit.exchange import all_reduce_numel

_KINDS = {"summed": "all_reduce", "gathered": "all_gather", "scattered": "reduce_scatter"}


class LayerMessage(NamedTuple):
    """A collective among the ranks that have slices of the same layers.

    Attributes:
        kind: as `Comm` counts it.
        is_backward: it is part of backward, as recomputation is.
        numel: elements of all slices together.
        itemsize: bytes of one.
    """

    kind: str
    is_backward: bool
    numel: int
    itemsize: int

    def sent_bytes(self, ranks: int) -> int:
        """Return the bytes that the first of so many ranks sends."""
        if self.kind == "all_reduce":
            return self.itemsize * all_reduce_numel(self.numel, ranks, 0)
        return self.itemsize * (self.numel // ranks) * (ranks - 1)


Messages: TypeAlias = Counter[LayerMessage]


def stage_messages(cost_model: CostModel, candidate: Candidate, stage: int) -> Messages:
    """Return what a rank of a pipeline stage exchanges for a micro-batch.

    Raises:
        KeyError: nothing tells what its micro-batches do.
        JobError: the model cannot be divided so.
    """
    dims = candidate.dims
    if dims.tp == 1:
        return Counter()
    of_segment = _by_segment(cost_model, candidate)
    split = cost_model.pipeline.split(dims, candidate.split)
    if split.pp == 1:
        return sum(of_segment, Messages())
    found = Messages()
    borders = cost_model.border_bytes(candidate, split)
    last = split.num_chunks - 1
    for chunk in split.chunks(stage):
        found += of_segment[0] if chunk == 0 else Messages()
        for segment in split.segments(chunk):
            found += of_segment[segment + 1]
        if not candidate.sequence_parallel:
            continue
        # Sequences are whole where they go from stage to stage.
        if chunk > 0:
            found[_gather(borders[chunk], candidate.key, is_backward=True)] += 1
        if chunk < last:
            found[_gather(borders[chunk + 1], candidate.key, is_backward=False)] += 1
    return found


def _gather(num_bytes: float, key: CandidateKey, *, is_backward: bool) -> LayerMessage:
    """Return a gather of so many bytes of activations, padded to equal slices."""
    itemsize = BYTES[key.precision]
    numel = key.tp * -(-round(num_bytes / itemsize) // key.tp)
    return LayerMessage("all_gather", is_backward, numel, itemsize)


def _by_segment(cost_model: CostModel, candidate: Candidate) -> Sequence[Messages]:
    """Return the messages before the blocks, of each of them, and after them."""
    key = candidate.key
    every = cost_model.settings.every_n if key.checkpoint == "every_n" else 1
    profile = cost_model.subject.traced(key.tp, sequence=key.sequence_parallel)
    trace = profile.traces[key.checkpoint].of(key.micro)
    found = messages_of_trace(trace, key.micro, profile.num_blocks)
    if candidate.input_ranks > 1:
        for block, num_bytes in _inputs_of_trace(trace, key, every).items():
            found[block + 1][_gather(num_bytes, key, is_backward=True)] += 1
    return found


def messages_of_trace(trace: Trace, micro: int, num_blocks: int) -> list[Messages]:
    """Return the messages of each segment: before the blocks, of each of them, and after them."""
    found = [Messages() for _ in range(num_blocks + 2)]
    ops = trace.ops
    is_backward = ops["phase"] == PHASE_NUMBER[TracePhase.BACKWARD]
    segments = owners(ops["block"].astype(np.int64), is_backward, num_blocks)
    is_message = np.array([each.family == "collective" for each in trace.operators], dtype=bool)
    num_bytes = values_at(ops["size"], micro)
    for row in np.flatnonzero(is_message[ops["operator"]]).tolist():
        operator = trace.operators[int(ops["operator"][row])]
        itemsize: int = getattr(torch, operator.dtype).itemsize
        message = LayerMessage(
            _KINDS[operator.name],
            bool(is_backward[row]),
            round(float(num_bytes[row]) / itemsize),
            itemsize,
        )
        found[int(segments[row])][message] += 1
    return found


def _inputs_of_trace(trace: Trace, key: CandidateKey, every: int) -> dict[int, float]:
    """Return the bytes of the inputs of recomputed blocks, by number."""
    events = trace.events
    rows = {block: each.comes for block, each in inputs_of_blocks(events, every).items()}
    sizes = values_at(events["size"][list(rows.values())], key.micro)
    return dict(zip(rows, sizes.tolist(), strict=True))
