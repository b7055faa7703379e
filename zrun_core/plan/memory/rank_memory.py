"""What one rank's micro-batch takes beyond the states: of a traced model event by event, of a shape by formula."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from zrun_core.pipeline.schedule import max_in_flight, stage_order
from zrun_core.plan.memory.allocator import heap_bytes, simulate
from zrun_core.plan.question.candidate import Candidate, stage_blocks
from zrun_core.plan.question.transformer import TransformerShape
from zrun_core.plan.timing.micro_batch_cost import BYTES
from zrun_core.plan.trace.peak import Peak, peak_of
from zrun_core.plan.trace.profile import Profile
from zrun_core.plan.trace.rows import TracePhase
from zrun_core.spine.parallel_dims import ParallelDims

ALIGN = 512  # bytes to which CUDA's allocator rounds
# Of a CPU's heap beyond its simulation, in which no small thing that lasts lies between tensors; measured.
_HEAP_SLACK = 0.1
# The code for one shape of a product, and how many of them workers keep (ONEDNN_PRIMITIVE_CACHE_CAPACITY); measured.
_KERNEL_BYTES, _MOST_KERNELS = 800 << 10, 256
# Modules of torch that a CPU rank imports by building on meta, as all do but the first one of a host; measured.
BUILDS_ON_META = 80 << 20
_FORMULA_SLACK = 0.03  # reserved beyond allocated, where no timeline tells


@lru_cache(maxsize=1024)
def _held(stage: int, stages: int, virtual: int, micro_batches: int) -> float:
    return max_in_flight(stage_order(stage, stages, virtual, micro_batches)) / virtual


@dataclass(frozen=True)
class PipelineStage:
    """A pipeline stage as its activations see it.

    Attributes:
        blocks: how many of the model's.
        held: micro-batches whose activations it holds at most, in units of all its blocks.
    """

    index: int
    blocks: int
    held: float
    first: bool
    last: bool

    @classmethod
    def of(
        cls, dims: ParallelDims, index: int, num_blocks: int, accumulation: int
    ) -> PipelineStage:
        """Return stage `index` of 1F1B, or of its interleaved form."""
        if dims.pp == 1:
            return cls(0, num_blocks, 1.0, True, True)
        blocks = sum(map(len, stage_blocks(num_blocks, dims, index)))
        # No stage runs ahead by more than two rounds of micro-batches.
        held = _held(index, dims.pp, dims.virtual, min(accumulation, 2 * dims.pp))
        return cls(index, blocks, held, index == 0, index == dims.pp - 1)

    def range(self, num_blocks: int) -> range | None:
        """As many neighbouring blocks of the model, with its ends where the stage has them; None: all."""
        if self.first and self.last:
            return None
        if self.last:
            return range(num_blocks - self.blocks, num_blocks)
        start = 0 if self.first else min(1, num_blocks - self.blocks)
        return range(start, start + self.blocks)


def adds_gradients(candidate: Candidate) -> bool:
    """Whether gradients of a micro-batch are added to earlier ones before they are reduced."""
    reduces_each = candidate.stage >= 2 and candidate.dims.shard_size > 1
    return candidate.accumulation > 1 and not reduces_each


def traced(
    profile: Profile,
    candidate: Candidate,
    stage: PipelineStage,
    steady: Mapping[TracePhase, int],
    *,
    cuda: bool,
) -> Peak:
    """The peak of a stage of a traced model.

    Raises:
        KeyError: it was not traced with this kind of checkpointing.
    """
    return peak_of(
        profile.traces[candidate.checkpoint],
        candidate.micro,
        blocks=stage.range(profile.num_blocks),
        in_flight=math.ceil(stage.held),
        steady=steady,
        accumulating=adds_gradients(candidate),
        align=ALIGN if cuda else 1,
    )


def reserved_beyond(profile: Profile, candidate: Candidate) -> int:
    """Bytes that the caching allocator takes from the device for a micro-batch beyond those in use at the peak."""
    found = simulate(
        profile.traces[candidate.checkpoint],
        candidate.micro,
        (),
        accumulation=candidate.accumulation,
        expandable=True,
    )
    return max(0, found.reserved - found.allocated)


def heap_beyond(profile: Profile, candidate: Candidate, peak: Peak, late: Sequence[int]) -> int:
    """Bytes of a CPU's heap beyond those in use at `peak`: what of it is holes.

    Args:
        late: bytes of what the first update makes.
    """
    built = [4 * param.numel for param in profile.params]
    found = heap_bytes(
        profile.traces[candidate.checkpoint], candidate.micro, built, late, candidate.accumulation
    )
    return max(0, round((1 + _HEAP_SLACK) * found) - peak.dynamic - sum(late))


def kernel_bytes(profile: Profile, candidate: Candidate) -> int:
    """Bytes of the code that oneDNN makes for a CPU, for each shape of a product in half precision."""
    if profile.follows_values and candidate.precision != "fp32":
        return _MOST_KERNELS * _KERNEL_BYTES
    trace = profile.traces[candidate.checkpoint].of(candidate.micro)
    kernels = {
        (operator.name, operator.shape)
        for operator in trace.operators
        if operator.family == "gemm" and operator.dtype in ("bfloat16", "float16")
    }
    return min(len(kernels), _MOST_KERNELS) * _KERNEL_BYTES


def by_formula(
    shape: TransformerShape,
    candidate: Candidate,
    stage: PipelineStage,
    steady: Mapping[TracePhase, int],
    every: int,
) -> Peak:
    """The peak of a stage of a transformer of this shape.

    At the end of forward there are the kept activations of all blocks, and the logits; in backward there are, beside
    those, what one block is recomputed to, the gradients of its largest activations, and of its largest matrix.
    """
    tp, element = candidate.dims.tp, BYTES[candidate.precision]
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
    again = (
        max(0.0, of_block("none") - of_block("full" if policy == "every_n" else policy))
        if policy != "none"
        else 0.0
    )
    widest = max(shape.hidden, shape.qkv_width / tp, (shape.num_ffn_matrices - 1) * shape.ffn / tp)
    grads = 2 * element * tokens * widest
    matrix = element * shape.hidden * max(shape.qkv_width, shape.ffn) / tp
    logits = shape.logit_bytes(candidate.micro, tp=tp, element=element) if stage.last else 0.0
    loss = kept + logits + element * tokens * shape.hidden
    back = kept + again + grads + matrix
    sizes = {TracePhase.LOSS: loss if stage.last else kept, TracePhase.BACKWARD: back}
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
    """What the allocator is taken to reserve beyond `dynamic` bytes of activations and temporaries."""
    return round(_FORMULA_SLACK * dynamic)
