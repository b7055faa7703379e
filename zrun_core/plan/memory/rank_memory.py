"""Bytes of a micro-batch beyond the states, by the events of its trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

import numpy as np

from zrun_core.memory.buffers import Tier
from zrun_core.pipeline.actions import ActionKind
from zrun_core.pipeline.schedule import stage_actions
from zrun_core.pipeline.split import Split
from zrun_core.plan.memory.allocator import heap_bytes, heap_bytes_of_stage, simulate
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.trace import waiting_inputs
from zrun_core.plan.trace.peak import ONE_AT_A_TIME, Moment, Passes, Peak
from zrun_core.plan.trace.profile import Profile, Trace
from zrun_core.plan.trace.rows import PHASE_NUMBER, TracePhase
from zrun_core.spine.sections.schedules import SCHEDULES

ALIGN = 512  # bytes to which CUDA's allocator rounds
# Of a CPU's heap beyond its simulation, in which what is small lies beside tensors only: a share of
# it, and what it grows by from the first steps to the tenth; measured.
HEAP_SLACK = 0.1
_HEAP_GROWTH = 24 << 20  # or a quarter of it
# The code for one product, measured; how many of them workers keep
# (ONEDNN_PRIMITIVE_CACHE_CAPACITY); and how many fused attention needs, whose blocks are products.
_KERNEL_BYTES = 800 << 10
_MAX_KERNELS = 256
_OF_ATTENTION = 16
_STAGE_SLACK = 0.03  # of what a GPU's stage allocates, reserved beyond it


@dataclass(frozen=True)
class PipelineStage:
    """A pipeline stage as its activations see it.

    Attributes:
        chunks: of the model, on the stage: the segments of each; none: it has the whole model.
        moments: of a step, in which some micro-batches wait while another one runs.
        blocks: how many of the model's it has.
        held_blocks: blocks that hold a micro-batch's activations at most, each counted as often as
            it does.
        weight_blocks: blocks that keep what weights' gradients need at most, counted so too.
        first: whether it is the first stage.
        last: whether it is the last one.
        waiting: segments of which other micro-batches wait, in layer-major order, while one of them
            turns round in the last block; None: none waits before others.
        index: among the stages.
        message: bytes of the largest that it sends to another stage.
        num_messages: that others have not read yet.
    """

    chunks: tuple[range, ...]
    moments: tuple[Moment, ...]
    blocks: int
    held_blocks: int
    weight_blocks: int = 0
    first: bool = True
    last: bool = True
    waiting: range | None = None
    index: int = 0
    message: int = 0
    num_messages: int = 0

    @property
    def beside(self) -> int:
        """Bytes of messages to other stages that are under way."""
        return self.num_messages * self.message

    @property
    def held(self) -> int:
        """Passes of micro-batches through chunks that are under way at most, or just running."""
        return max(sum(moment.held) + 1 for moment in self.moments)

    @classmethod
    def whole(cls, candidate: Candidate, num_blocks: int) -> PipelineStage:
        """Return a model that is on one stage.

        Args:
            candidate: of which the order, and the micro-batches of a step count.
        """
        if candidate.layer_major and num_blocks > 1:
            held = candidate.accumulation * num_blocks
            return cls((), ONE_AT_A_TIME, num_blocks, held, waiting=range(num_blocks - 1))
        return cls((), ONE_AT_A_TIME, num_blocks, num_blocks)

    @classmethod
    def of(
        cls,
        candidate: Candidate,
        split: Split,
        index: int,
        border_bytes: Sequence[float],
        costs: Sequence[float],
    ) -> PipelineStage:
        """Return a stage of a pipeline.

        Args:
            candidate: of which the schedule, and the micro-batches of a step count.
            border_bytes: that cross the border in front of each chunk, for a micro-batch.
            costs: FLOPs of each segment.
        """
        moments = moments_of(candidate.schedule, index, split.pp, split.virtual, candidate)
        chunks = split.chunks(index)
        sizes = [len(split.blocks(chunk)) for chunk in chunks]
        here = {(moment.chunk, moment.held) for moment in moments}
        held = [sum(map(mul, counts, sizes)) + sizes[chunk] for chunk, counts in here]
        waiting = [sum(map(mul, moment.weights, sizes)) for moment in moments]
        borders = [*border_bytes, 0.0]
        messages = [size for chunk in chunks for size in borders[chunk : chunk + 2]]
        return cls(
            tuple(split.segments(chunk) for chunk in chunks),
            moments,
            sum(sizes),
            max(held),
            max(waiting),
            first=index == 0,
            last=index == split.pp - 1,
            index=index,
            message=round(max(messages)),
            num_messages=_messages_held(candidate, split, index, costs),
        )


def _messages_held(candidate: Candidate, split: Split, index: int, costs: Sequence[float]) -> int:
    """Return how many messages that a stage has sent others have not read yet.

    One of them, the last, is held until something else is sent. Where a stage has several chunks,
    each has sent both ways; and no stage of GPipe waits for a slower next one.
    """
    if candidate.order.has_chunks:
        return 2 * split.virtual - 1
    stages = split.stage_costs(costs)
    if not candidate.order.forwards_first or index == split.pp - 1 or not stages[index + 1]:
        return 1
    ahead = 1 - stages[index] / stages[index + 1]
    return max(1, math.ceil(candidate.accumulation * ahead))


def moments_of(
    schedule: str, stage: int, stages: int, virtual: int, candidate: Candidate
) -> tuple[Moment, ...]:
    """Return the moments of a stage's step that matter: of the others, one has more that waits.

    Args:
        schedule: by name.
        stage: of `stages`, from 0.
        candidate: of which the micro-batches of a step count.
    """
    micro_batches = candidate.flowing
    if not SCHEDULES[
        schedule
    ].forwards_first:  # no stage runs ahead by more than two rounds of micro-batches
        micro_batches = min(micro_batches, 2 * stages)
    return _moments(schedule, stage, stages, virtual, micro_batches)


@lru_cache(maxsize=4096)
def _moments(
    schedule: str, stage: int, stages: int, virtual: int, micro_batches: int
) -> tuple[Moment, ...]:
    actions = stage_actions(schedule, stage, stages, virtual, micro_batches)
    has_weights = any(action.kind is ActionKind.WEIGHT for action in actions)
    held = [0] * virtual
    weights = [0] * virtual
    found: dict[Moment, None] = {}
    for action in actions:
        chunk = action.chunk // stages
        if action.kind is ActionKind.FORWARD:
            found[Moment(True, chunk, tuple(held), tuple(weights))] = None
            held[chunk] += 1
        elif action.kind is ActionKind.BACKWARD:
            held[chunk] -= 1
            found[Moment(False, chunk, tuple(held), tuple(weights))] = None
            weights[chunk] += has_weights
        elif action.kind is ActionKind.WEIGHT:
            weights[chunk] -= 1
    kept: list[Moment] = []
    # The largest sums first: what nothing before has at least as much of, is not dominated.
    for moment in sorted(found, key=lambda each: -sum(each.held) - sum(each.weights)):
        if not any(_dominates(other, moment) for other in kept):
            kept.append(moment)
    return tuple(kept)


def _dominates(one: Moment, other: Moment) -> bool:
    if (one.is_forward, one.chunk) != (other.is_forward, other.chunk):
        return False
    mine = (*one.held, *one.weights)
    others = (*other.held, *other.weights)
    return all(a >= b for a, b in zip(mine, others, strict=True))


def adds_gradients(candidate: Candidate) -> bool:
    """Return whether gradients of micro-batches are added up before they are reduced."""
    return candidate.accumulation > 1 and not _reduces_each(candidate)


def _reduces_each(candidate: Candidate) -> bool:
    return candidate.stage >= 2 and candidate.dims.shard_size > 1


def makes_weights_late(candidate: Candidate) -> bool:
    """Return whether the gradients of weights are made in a later pass than those of inputs."""
    return candidate.order.splits_backward and candidate.dims.pp > 1


def moves_inputs(candidate: Candidate) -> bool:
    """Return whether the inputs of recomputed blocks wait elsewhere than on the device."""
    return candidate.placement.activation is not Tier.DEVICE


def input_bytes(profile: Profile, candidate: Candidate, every: int) -> list[int]:
    """Return the bytes of each input of a recomputed block of the model that one rank keeps.

    Args:
        every: one block in so many is recomputed.
    """
    events = profile.traces[candidate.checkpoint].of(candidate.micro).events
    sizes = waiting_inputs.input_bytes(events, every, candidate.micro)
    return [-(-round(size) // candidate.input_ranks) for size in sizes]


def _trace_of(profile: Profile, candidate: Candidate, every: int) -> Trace:
    trace = profile.traces[candidate.checkpoint]
    if makes_weights_late(candidate):
        stays = candidate.placement.grad is Tier.DEVICE
        trace = trace.with_late_weights(adds_others=stays and not _reduces_each(candidate))
    if moves_inputs(candidate) or candidate.input_ranks > 1:
        away = moves_inputs(candidate)
        return trace.with_inputs_apart(every, ranks=candidate.input_ranks, away=away)
    return trace


def passes(
    profile: Profile,
    candidate: Candidate,
    stage: PipelineStage,
    steady: Mapping[TracePhase, int],
    *,
    every: int,
    cuda: bool,
) -> Passes:
    """Return the passes of a stage of a traced model, of which one has its peak.

    Args:
        steady: bytes that are in use anyway, by phase.
        every: one block in so many is recomputed.

    Raises:
        KeyError: it was not traced with this kind of checkpointing.
    """
    trace = _trace_of(profile, candidate, every)
    accumulating = adds_gradients(candidate)
    align = ALIGN if cuda else 1
    if stage.chunks:
        return Passes.of_stage(
            trace,
            candidate.micro,
            stage.chunks,
            stage.moments,
            steady=steady,
            beside=stage.beside,
            accumulating=accumulating,
            align=align,
        )
    in_flight = 1.0
    if stage.waiting is not None:
        # What waits has the last block's input too, which is counted like a block of them.
        in_flight += (candidate.accumulation - 1) * stage.blocks / len(stage.waiting)
    return Passes.whole(
        trace,
        candidate.micro,
        waiting=stage.waiting,
        in_flight=in_flight,
        steady=steady,
        accumulating=accumulating,
        align=align,
    )


def reserved_beyond(profile: Profile, candidate: Candidate, every: int) -> int:
    """Return what the caching allocator takes from the device beyond the peak's bytes in use.

    Args:
        every: one block in so many is recomputed.
    """
    found = simulate(
        _trace_of(profile, candidate, every),
        candidate.micro,
        (),
        accumulation=candidate.accumulation,
        expandable=True,
    )
    return max(0, found.reserved - found.allocated)


def heap_beyond(
    profile: Profile, candidate: Candidate, stage: PipelineStage, peak: Peak, every: int
) -> int:
    """Return the bytes of a CPU's heap beyond those in use at `peak`: what of it is holes.

    The states are not there: their memory is mapped, and the first update moves what it makes.

    Args:
        every: one block in so many is recomputed.
    """
    built = [4 * param.numel for param in profile.params]
    if candidate.init == "meta" or stage.chunks:  # parameters are made one after the other
        built = [max(built, default=0)]
    trace = _trace_of(profile, candidate, every)
    if stage.chunks:
        found = heap_bytes_of_stage(
            trace,
            candidate.micro,
            stage.chunks,
            _actions_of(candidate, stage),
            built,
            accumulating=adds_gradients(candidate),
        )
    else:
        found = heap_bytes(trace, candidate.micro, built, candidate.accumulation)
    growth = min(_HEAP_GROWTH, found / 4)
    return max(0, round((1 + HEAP_SLACK) * found + growth) - peak.dynamic)


def _actions_of(candidate: Candidate, stage: PipelineStage) -> list[tuple[ActionKind, int, int]]:
    """Return what a stage computes in a step, chunks counted among its own."""
    dims = candidate.dims
    actions = stage_actions(
        candidate.schedule, stage.index, dims.pp, dims.virtual, candidate.flowing
    )
    return [(each.kind, each.chunk // dims.pp, each.micro) for each in actions]


def kernel_bytes(profile: Profile, candidate: Candidate) -> int:
    """Return the bytes of code that oneDNN makes for products in half precision.

    Products of tokens that are routed to experts have other shapes in each step.
    """
    trace = profile.traces[candidate.checkpoint].of(candidate.micro)
    routes = profile.follows_values or any(
        operator.name == "_grouped_mm" for operator in trace.operators
    )
    if routes and candidate.precision != "fp32":
        return _MAX_KERNELS * _KERNEL_BYTES
    here = np.unique(trace.ops["operator"][trace.ops["phase"] == PHASE_NUMBER[TracePhase.FORWARD]])
    halves = [
        operator
        for operator in map(trace.operators.__getitem__, here.tolist())
        if operator.dtype in ("bfloat16", "float16")
    ]
    products = {(each.name, each.shape) for each in halves if each.family == "gemm"}
    # Backward has two more of each, whose operands lie in memory in other ways.
    count = 3 * len(products)
    if any(each.family == "attention" for each in halves):
        count += _OF_ATTENTION
    return min(count, _MAX_KERNELS) * _KERNEL_BYTES


def slack_of_stage(dynamic: int) -> int:
    """Return what a GPU's allocator reserves beyond a stage's activations and temporaries."""
    return round(_STAGE_SLACK * dynamic)
