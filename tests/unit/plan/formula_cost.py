"""The cost of a transformer's micro-batch, from its shape alone: an oracle for what is traced.

    FormulaCostModel(TransformerShape.gpt(48, 6144, 64), hardware, FormulaSettings())

Korthikanti et al. 2022, section 4. Matrix products count by their sizes, attention by its own rate,
and what lies between them by the bytes that it reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from formulas import TransformerShape

from zrun_core.hardware.hardware import Device, Hardware
from zrun_core.pipeline.split import Split
from zrun_core.plan.question.candidate import Candidate, CandidateKey
from zrun_core.plan.question.subject import Subject
from zrun_core.plan.timing.cost_model import CostModel
from zrun_core.plan.timing.link_cost import LinkedGroup
from zrun_core.plan.timing.micro_batch_cost import (
    BYTES,
    MicroBatchCost,
    SegmentCost,
    TimingSettings,
)
from zrun_core.plan.timing.roofline import accumulation_seconds, stream_seconds
from zrun_core.plan.trace.profile import ParamInfo, Profile
from zrun_core.plan.trace.rows import Affine
from zrun_core.stages.flow import ModelFlow

# Backward of flash attention against its forward: five products for two, a little slower.
_FLASH_BACKWARD = 2.5 / 0.85
# Tensor-parallel traffic in backward that shows: the rest hides under weight gradients.
_SHOWN_BACKWARD = 0.7
# Bytes of operations between products that run one by one, against fused ones.
_UNFUSED = 2.0


@dataclass(frozen=True)
class FormulaSettings(TimingSettings):
    """Those of a job, and what kernels do that torch has not.

    Attributes:
        fused_accumulation: products of weight gradients add to the reduced format themselves.
    """

    fused_accumulation: bool = False


class FormulaCostModel(CostModel):
    """The costs of a shape in place of those of a trace."""

    def __init__(
        self, shape: TransformerShape, hardware: Hardware, settings: FormulaSettings
    ) -> None:
        super().__init__(Subject(_profile_of(shape)), hardware, settings)
        self._shape = shape
        self._formula_settings = settings

    def _by_trace(self, key: CandidateKey) -> MicroBatchCost:
        return cost_by_formula(self._shape, key, self.hardware, self._formula_settings)

    def border_bytes(self, candidate: Candidate, split: Split) -> list[float]:
        each = self.micro_batch(candidate.key).boundary_bytes
        return [0.0, *[each] * (split.num_chunks - 1)]

    returning_bytes = border_bytes


def _profile_of(shape: TransformerShape) -> Profile:
    """Return what a pipeline is cut by: the operations of each block, and what is tied."""
    flow = ModelFlow(
        blocks=tuple(f"blocks.{number}" for number in range(shape.layers)),
        flops=(
            *[shape.block_flops(shape.seq)] * shape.layers,
            shape.head_flops(shape.seq),
        ),
        uses={"tokens.weight": (0, shape.layers) if shape.tied else (0,)},
        calls=(),
        leaves=(),
    )
    return Profile(
        source="traced",
        why="",
        params=(ParamInfo("tokens.weight", (shape.vocab, shape.hidden), "bfloat16", True),),
        buffer_bytes=0,
        num_blocks=shape.layers,
        batch_bytes=Affine(0.0, 0.0),
        tokens_per_sample=shape.seq,
        traces={},
        flow=flow,
    )


class _BlockCost(NamedTuple):
    """Seconds and operations of one block, without communication."""

    forward: float
    backward: float
    weights: float  # of backward: products that make gradients of weights
    core: float  # of forward: the inside of attention
    cheap: float  # of forward: all that is neither a product nor attention
    flops: float  # of forward
    core_flops: float


def cost_by_formula(
    shape: TransformerShape, key: CandidateKey, hardware: Hardware, settings: FormulaSettings
) -> MicroBatchCost:
    """Return the cost on one tensor-parallel rank."""
    tp = key.tp
    size = BYTES[key.precision]
    tokens = float(key.micro * shape.seq)
    block = _block_cost(shape, key, hardware.device, settings)
    recompute, recompute_flops = _recomputation(block, key.checkpoint)
    group = LinkedGroup(hardware, tp, is_waited_for=True)
    forward_traffic = group.all_reduce(size * tokens * shape.hidden).times(2)
    backward_traffic = forward_traffic._replace(seconds=forward_traffic.seconds * _SHOWN_BACKWARD)
    params = shape.layer_params / tp
    accumulate = _accumulation(hardware.device, key.precision, params, settings)

    kept = SegmentCost(
        forward=block.forward,
        backward=block.backward + accumulate,
        weights=block.weights + accumulate,
        tp_forward=forward_traffic,
        tp_backward=backward_traffic,
        params=params,
        trainable=params,
        flops=3 * block.flops,
    )
    repeated_traffic = backward_traffic
    if key.checkpoint in ("full", "every_n"):
        repeated_traffic = backward_traffic + forward_traffic  # forward runs once more
    elif key.checkpoint == "selective":
        # What lies between products does, up to the last of a forward's messages.
        share = 3 / 4 if key.sequence_parallel else 1 / 2
        repeated_traffic = backward_traffic + forward_traffic.times(share)
    recomputed = SegmentCost(
        forward=block.forward,
        backward=block.backward + recompute + accumulate,
        recompute=recompute,
        weights=block.weights + accumulate,
        tp_forward=forward_traffic,
        tp_backward=repeated_traffic,
        params=params,
        trainable=params,
        flops=3 * block.flops,
        recompute_flops=recompute_flops,
    )
    if key.checkpoint == "none":
        blocks = (kept,) * shape.layers
    elif key.checkpoint == "every_n":
        skips = settings.every_n
        blocks = tuple(kept if number % skips else recomputed for number in range(shape.layers))
    else:
        blocks = (recomputed,) * shape.layers
    before, after = _ends(shape, key, hardware, settings)
    divided = tp if key.sequence_parallel else 1
    return MicroBatchCost(before, blocks, after, size * tokens * shape.hidden / divided)


def _recomputation(block: _BlockCost, checkpoint: str) -> tuple[float, float]:
    """Return the seconds and the FLOPs that backward spends on a block's forward once more."""
    if checkpoint in ("full", "every_n"):
        return block.forward, block.flops
    if checkpoint == "selective":
        return block.cheap, 0.0
    if checkpoint == "attention":
        return block.core, block.core_flops
    return 0.0, 0.0


def _block_cost(
    shape: TransformerShape, key: CandidateKey, device: Device, settings: FormulaSettings
) -> _BlockCost:
    tp = key.tp
    size = BYTES[key.precision]
    hidden = float(shape.hidden)
    tokens = float(key.micro * shape.seq)
    queries = shape.attention_width / tp
    all_heads = shape.qkv_width / tp
    inner = shape.ffn / tp
    up = (shape.num_ffn_matrices - 1) * inner
    products = (  # (m, n, k) of forward
        (tokens, all_heads, hidden),  # queries, keys and values
        (tokens, hidden, queries),  # the output of attention
        (tokens, up, hidden),
        (tokens, hidden, inner),
    )
    forward = 0.0
    backward = 0.0
    weights = 0.0
    for m, n, k in products:
        forward += product_seconds(device, key.precision, m, n, k)
        adds = 2 * settings.reduce_bytes * n * k if settings.fused_accumulation else 0.0
        backward += product_seconds(device, key.precision, m, k, n)
        weights += product_seconds(device, key.precision, k, n, m, extra_bytes=adds)
    backward += weights

    # Norms, residuals and dropout lie outside of the products; sequence parallelism divides them.
    outside = tokens * hidden * size / (tp if key.sequence_parallel else 1)
    activation = tokens * inner * size
    rotated = tokens * all_heads * size
    activation_passes, activation_passes_back = (3, 5) if shape.gated else (2, 3)
    between = (10 + shape.dropout) * outside + activation_passes * activation + 4 * rotated
    between_back = (
        (14 + shape.dropout) * outside + activation_passes_back * activation + 5 * rotated
    )
    passes = 1.0 if settings.fused else _UNFUSED
    cheap = passes * stream_seconds(device, between) + 10 * device.launch_s
    backward += passes * stream_seconds(device, between_back) + 16 * device.launch_s

    core, core_back = _attention_seconds(shape, key, device, settings)
    flops = shape.product_flops(tokens) / tp
    core_flops = shape.attention_flops(tokens) / tp
    return _BlockCost(
        forward=forward + cheap + core,
        backward=backward + core_back,
        weights=weights,
        core=core,
        cheap=cheap,
        flops=flops + core_flops,
        core_flops=core_flops,
    )


def _attention_seconds(
    shape: TransformerShape, key: CandidateKey, device: Device, settings: FormulaSettings
) -> tuple[float, float]:
    """Return the seconds of forward and of backward of the inside of attention.

    The full square counts, as it does in papers and profilers.
    """
    size = BYTES[key.precision]
    count = key.micro * shape.heads / key.tp
    if shape.flash:
        flops = 4 * count * float(shape.seq) ** 2 * shape.head_dim / (2 if shape.causal else 1)
        seconds = flops / (device.attention_flops(key.precision)) + device.launch_s
        return seconds, seconds * _FLASH_BACKWARD
    scores = product_seconds(device, key.precision, shape.seq, shape.seq, shape.head_dim, count)
    values = product_seconds(device, key.precision, shape.seq, shape.head_dim, shape.seq, count)
    square = count * float(shape.seq) ** 2
    drops = (2 * size + 1) * shape.dropout  # read, written, and the mask
    softmax = stream_seconds(device, (2 * size + drops) * square)
    softmax_back = stream_seconds(device, (3 * size + drops) * square)
    forward = scores + values + softmax + 2 * device.launch_s
    backward = 2 * (scores + values) + softmax_back + 2 * device.launch_s
    return forward, backward


def _ends(
    shape: TransformerShape, key: CandidateKey, hardware: Hardware, settings: FormulaSettings
) -> tuple[SegmentCost, SegmentCost]:
    """Return the cost of the embedding; and of the last norm, the head and the loss."""
    device = hardware.device
    size = BYTES[key.precision]
    tokens = float(key.micro * shape.seq)
    hidden = float(shape.hidden)
    vocab = shape.vocab / key.tp
    group = LinkedGroup(hardware, key.tp, is_waited_for=True)

    looked_up = tokens * hidden * size
    params = shape.embedding_params / key.tp
    accumulate = _accumulation(device, key.precision, params, settings)
    before = SegmentCost(
        forward=stream_seconds(device, 3 * looked_up),
        backward=stream_seconds(device, 4 * looked_up) + accumulate,
        tp_forward=group.all_reduce(looked_up),
        params=params,
        trainable=params,
    )

    params = shape.head_params / key.tp
    logits = tokens * vocab
    adds = 2 * settings.reduce_bytes * vocab * hidden if settings.fused_accumulation else 0.0
    forward = product_seconds(device, key.precision, tokens, vocab, hidden)
    forward += stream_seconds(device, logits * (size + 16))
    forward += stream_seconds(device, 2 * looked_up)
    backward = product_seconds(device, key.precision, tokens, hidden, vocab)
    backward += product_seconds(device, key.precision, hidden, vocab, tokens, extra_bytes=adds)
    backward += stream_seconds(device, logits * (size + 8))
    backward += stream_seconds(device, 3 * looked_up)
    backward += _accumulation(device, key.precision, params, settings)
    scored = group.all_reduce(looked_up)
    after = SegmentCost(
        forward=forward,
        backward=backward,
        tp_forward=group.all_reduce(12 * tokens),  # the loss: a maximum, a sum and a logit each
        tp_backward=scored._replace(seconds=scored.seconds * _SHOWN_BACKWARD),
        params=params,
        trainable=params,
        flops=6 * logits * hidden,
    )
    return before, after


def product_seconds(
    device: Device,
    precision: str,
    m: float,
    n: float,
    k: float,
    count: float = 1,
    extra_bytes: float = 0,
) -> float:
    """Return the seconds of `count` products [m, k] x [k, n] in one launch.

    A product reaches half of the device's share of the peak where its result has `gemm_area`
    elements, or where its sum is `gemm_depth` long:

        share of the peak = gemm * m n / (m n + gemm_area) * k / (k + gemm_depth)

    Args:
        m: rows of each result.
        n: columns of each result.
        k: length of the sum.
        count: products in the launch.
        extra_bytes: read and written besides the operands and the results.
    """
    area = m * n * count
    reached = device.gemm * area / (area + device.gemm_area) * k / (k + device.gemm_depth)
    computing = 2 * area * k / (reached * device.flops(precision))
    moved = BYTES[precision] * count * (m * k + k * n + m * n) + extra_bytes
    fetching = stream_seconds(device, moved)
    if device.kind == "cpu":
        return computing + fetching + device.launch_s
    return max(computing, fetching) + device.launch_s


def _accumulation(
    device: Device, precision: str, params: float, settings: FormulaSettings
) -> float:
    if settings.fused_accumulation:
        return 0.0
    return accumulation_seconds(device, precision, params, settings)
