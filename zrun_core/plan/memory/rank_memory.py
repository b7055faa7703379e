"""Bytes of a micro-batch beyond the states: of a traced model by events, else by formula."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from zrun_core.memory.buffers import Tier
from zrun_core.pipeline.schedule import max_in_flight, stage_actions
from zrun_core.pipeline.split import equal
from zrun_core.plan.memory.allocator import heap_bytes, simulate
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.question.transformer import TransformerShape
from zrun_core.plan.timing.micro_batch_cost import BYTES
from zrun_core.plan.trace import waiting_inputs
from zrun_core.plan.trace.peak import Peak, peak_of
from zrun_core.plan.trace.profile import Profile, Trace
from zrun_core.plan.trace.rows import TracePhase

ALIGN = 512  # bytes to which CUDA's allocator rounds
# Of a CPU's heap beyond its simulation, in which no small thing that lasts lies between tensors;
# measured.
_HEAP_SLACK = 0.1
# The code for one shape of a product, measured; and how many of them workers keep
# (ONEDNN_PRIMITIVE_CACHE_CAPACITY).
_KERNEL_BYTES = 800 << 10
_MAX_KERNELS = 256
# Modules of torch that a CPU rank imports by building on meta, as all do with init: meta, and all
# but the first one of a host without it; measured.
BUILDS_ON_META = 80 << 20
_INPUTS_HERE = 2  # of recomputed blocks, where the others wait elsewhere
_FORMULA_SLACK = 0.03  # reserved beyond allocated, where no timeline tells


@lru_cache(maxsize=1024)
def _held(stage: int, stages: int, virtual: int, micro_batches: int) -> float:
    """Return the micro-batches whose activations a stage holds at most."""
    schedule = "interleaved" if virtual > 1 else "1f1b"
    return max_in_flight(stage_actions(schedule, stage, stages, virtual, micro_batches)) / virtual


@dataclass(frozen=True)
class PipelineStage:
    """A pipeline stage as its activations see it.

    Attributes:
        index: its number.
        blocks: how many of the model's it has.
        held: micro-batches whose activations it holds at most, in units of all its blocks.
        waiting: blocks of which the others wait, in layer-major order, while one of them turns
            round in the last block; None: none waits before others.
        first: whether it is the first stage.
        last: whether it is the last one.
    """

    index: int
    blocks: int
    held: float
    first: bool
    last: bool
    waiting: range | None = None

    @classmethod
    def of(cls, candidate: Candidate, index: int, num_blocks: int) -> PipelineStage:
        """Return a stage of 1F1B, or of its interleaved form; or the model in layer-major order.

        Args:
            candidate: of which the pipeline, the order, and the micro-batches of a step count.
            index: number of the stage.
            num_blocks: of the model.
        """
        dims = candidate.dims
        accumulation = candidate.accumulation
        if candidate.layer_major and num_blocks > 1:
            waiting = range(num_blocks - 1)
            return cls(0, num_blocks, accumulation, True, True, waiting)
        if dims.pp == 1:
            return cls(0, num_blocks, 1.0, True, True)
        blocks = sum(map(len, equal(num_blocks, dims.pp, dims.virtual).stage_blocks(index)))
        # No stage runs ahead by more than two rounds of micro-batches.
        held = _held(index, dims.pp, dims.virtual, min(accumulation, 2 * dims.pp))
        return cls(index, blocks, held, index == 0, index == dims.pp - 1)

    def range(self, num_blocks: int) -> range | None:
        """Return neighbouring blocks of the model that stand for the stage's; None: all.

        With the model's ends where the stage has them: a stage that is neither the first nor the
        last one does not begin with block 0.
        """
        if self.first and self.last:
            return None
        if self.last:
            return range(num_blocks - self.blocks, num_blocks)
        start = 0 if self.first else min(1, num_blocks - self.blocks)
        return range(start, start + self.blocks)


def adds_gradients(candidate: Candidate) -> bool:
    """Return whether gradients of micro-batches are added up before they are reduced."""
    reduces_each = candidate.stage >= 2 and candidate.dims.shard_size > 1
    return candidate.accumulation > 1 and not reduces_each


def moves_inputs(candidate: Candidate) -> bool:
    """Return whether the inputs of recomputed blocks wait elsewhere than on the device."""
    return candidate.placement.activation is not Tier.DEVICE


def input_bytes(
    profile: Profile | None, shape: TransformerShape | None, candidate: Candidate, every: int
) -> list[int]:
    """Return the bytes of each input of a recomputed block of the model, on one rank.

    Args:
        profile: of the model; None: `shape` answers.
        shape: of the model.
        candidate: how it is trained.
        every: one block in so many is recomputed.
    """
    if profile is not None:
        events = profile.traces[candidate.checkpoint].of(candidate.micro).events
        return [round(size) for size in waiting_inputs.input_bytes(events, every, candidate.micro)]
    assert shape is not None
    return [_block_input(shape, candidate)] * -(-shape.layers // every)


def _block_input(shape: TransformerShape, candidate: Candidate) -> int:
    """Return the bytes of what one block of a transformer hands to the next."""
    divided = candidate.dims.tp if candidate.sequence_parallel else 1
    tokens = candidate.micro * shape.seq
    return BYTES[candidate.precision] * tokens * shape.hidden // divided


def _trace_of(profile: Profile, candidate: Candidate, every: int) -> Trace:
    trace = profile.traces[candidate.checkpoint]
    return trace.with_inputs_away(every) if moves_inputs(candidate) else trace


def traced(
    profile: Profile,
    candidate: Candidate,
    stage: PipelineStage,
    steady: Mapping[TracePhase, int],
    *,
    every: int,
    cuda: bool,
) -> Peak:
    """Return the peak of a stage of a traced model.

    Args:
        profile: of the model.
        candidate: how it is trained.
        stage: of the pipeline.
        steady: bytes that are in use anyway, by phase.
        every: one block in so many is recomputed.
        cuda: whether the device is a GPU.

    Raises:
        KeyError: it was not traced with this kind of checkpointing.
    """
    return peak_of(
        _trace_of(profile, candidate, every),
        candidate.micro,
        blocks=stage.range(profile.num_blocks),
        waiting=stage.waiting,
        in_flight=_in_flight(stage),
        steady=steady,
        accumulating=adds_gradients(candidate),
        align=ALIGN if cuda else 1,
    )


def _in_flight(stage: PipelineStage) -> float:
    """Return the micro-batches whose activations are held, as `peak_of` counts them."""
    if stage.waiting is None:
        return math.ceil(stage.held)
    # What waits has the last block's input too, which is counted like a block of them.
    return 1 + (stage.held - 1) * stage.blocks / len(stage.waiting)


def reserved_beyond(profile: Profile, candidate: Candidate, every: int) -> int:
    """Return what the caching allocator takes from the device beyond the peak's bytes in use.

    Args:
        profile: of the model.
        candidate: how it is trained.
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
    profile: Profile, candidate: Candidate, peak: Peak, late: Sequence[int], every: int
) -> int:
    """Return the bytes of a CPU's heap beyond those in use at `peak`: what of it is holes.

    Args:
        profile: of the model.
        candidate: how it is trained.
        peak: of its micro-batches.
        late: bytes of what the first update makes.
        every: one block in so many is recomputed.
    """
    built = [4 * param.numel for param in profile.params]
    if candidate.init == "meta":  # parameters are made one after the other
        built = [max(built, default=0)]
    trace = _trace_of(profile, candidate, every)
    found = heap_bytes(trace, candidate.micro, built, late, candidate.accumulation)
    return max(0, round((1 + _HEAP_SLACK) * found) - peak.dynamic - sum(late))


def kernel_bytes(profile: Profile, candidate: Candidate) -> int:
    """Return the bytes of code that oneDNN makes for shapes of products in half precision."""
    if profile.follows_values and candidate.precision != "fp32":
        return _MAX_KERNELS * _KERNEL_BYTES
    trace = profile.traces[candidate.checkpoint].of(candidate.micro)
    kernels = {
        (operator.name, operator.shape)
        for operator in trace.operators
        if operator.family == "gemm" and operator.dtype in ("bfloat16", "float16")
    }
    return min(len(kernels), _MAX_KERNELS) * _KERNEL_BYTES


def by_formula(
    shape: TransformerShape,
    candidate: Candidate,
    stage: PipelineStage,
    steady: Mapping[TracePhase, int],
    every: int,
) -> Peak:
    """Return the peak of a stage of a transformer of this shape.

    At the end of forward there are the kept activations of all blocks, and the logits; in backward
    there are, with those, what one block is recomputed to, the gradients of its largest
    activations, and that of its largest matrix.

    Args:
        shape: of the transformer.
        candidate: how it is trained.
        stage: of the pipeline.
        steady: bytes that are in use anyway, by phase.
        every: blocks of which one is recomputed, with "every_n".
    """
    tp = candidate.dims.tp
    element = BYTES[candidate.precision]
    tokens = candidate.micro * shape.seq
    policy = candidate.checkpoint

    def of_block(recompute: str) -> float:
        return shape.block_activations(
            candidate.micro,
            tp=tp,
            sequence_parallel=candidate.sequence_parallel,
            recompute=recompute,  # type: ignore[arg-type]
            every=every,
            element=element,
        )

    kept = stage.held * stage.blocks * of_block(policy)
    if moves_inputs(candidate):
        recomputed = -(-stage.blocks // every) if policy == "every_n" else stage.blocks
        gone = max(0.0, stage.held * recomputed - _INPUTS_HERE)
        kept = max(0.0, kept - gone * _block_input(shape, candidate))
    again = 0.0
    if policy != "none":
        of_recomputed = "full" if policy == "every_n" else policy
        again = max(0.0, of_block("none") - of_block(of_recomputed))
    widest = max(shape.hidden, shape.qkv_width / tp, (shape.num_ffn_matrices - 1) * shape.ffn / tp)
    grads = 2 * element * tokens * widest
    matrix = element * shape.hidden * max(shape.qkv_width, shape.ffn) / tp
    logits = 0.0
    end_of_forward = kept
    if stage.last:
        logits = shape.logit_bytes(candidate.micro, tp=tp, element=element)
        end_of_forward = kept + logits + element * tokens * shape.hidden
    backward = kept + again + grads + matrix
    sizes = {TracePhase.LOSS: end_of_forward, TracePhase.BACKWARD: backward}
    live = {
        TracePhase.LOSS: {"activations of blocks": kept, "logits": logits},
        TracePhase.BACKWARD: {
            "activations of blocks": kept,
            "a recomputed block": again,
            "gradients of a block": grads + matrix,
        },
    }
    totals = {phase: size + steady.get(phase, 0) for phase, size in sizes.items()}
    totals |= {phase: float(size) for phase, size in steady.items() if phase not in totals}
    phase = max(totals, key=lambda each: totals[each])
    holders = sorted(live.get(phase, {}).items(), key=lambda item: -item[1])
    return Peak(
        round(totals[phase]),
        phase,
        "",
        tuple((name, round(size)) for name, size in holders if size > 0),
        round(sizes.get(phase, 0.0)),
    )


def formula_slack(dynamic: int) -> int:
    """Return what the allocator reserves beyond `dynamic` bytes of activations and temporaries."""
    return round(_FORMULA_SLACK * dynamic)
