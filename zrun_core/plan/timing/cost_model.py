"""What one micro-batch takes on one rank, part by part: before the blocks, each block, after them.

Seconds of an operation follow a roofline: the larger of its FLOPs at what the device reaches for its size and format,
and its bytes at what the memory gives, and a launch. The operations are those of a traced `Profile`, or follow from a
`TransformerShape` (Korthikanti et al. 2022, section 4): its matrix products by their sizes, attention, and what lies
between them by the bytes that it reads and writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zrun_core.hardware.hardware import Device, Hardware
from zrun_core.hardware.operators import Operators
from zrun_core.plan.question.candidate import CandidateKey
from zrun_core.plan.question.transformer import TransformerShape
from zrun_core.plan.timing.collectives import NOTHING, LinkedGroup, TransferCost
from zrun_core.plan.trace.profile import PHASES, Affine, Profile, Trace, TracePhase

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FLASH_BACKWARD = (
    2.5 / 0.85
)  # of flash attention, against its forward: five products for two, a little slower
_SHOWN_BACKWARD = (
    0.7  # of tensor-parallel traffic in backward: the rest hides under weight gradients
)

_UNFUSED = 2.0  # bytes of operations between products, one by one, against fused ones


@dataclass(frozen=True)
class TimingSettings:
    """What of a job decides its time besides the candidate.

    Attributes:
        reduce_bytes: of a gradient's element, from accumulation to the update.
        moments, moment_bytes: values that the optimizer keeps per parameter, and bytes of each.
        prefetch: units gathered ahead.
        every_n: of `checkpoint: every_n`.
        fused_accumulation: products of weight gradients add to the reduced format themselves.
        fused: what lies between products is fused, by a compiler or by hand; else each operation passes memory.
        causal: fused attention skips what a position must not see.
    """

    reduce_bytes: int = 4
    moments: int = 2
    moment_bytes: int = 4
    prefetch: int = 1
    every_n: int = 2
    fused_accumulation: bool = False
    fused: bool = False
    causal: bool = True


@dataclass(frozen=True)
class SegmentCost:
    """A block, or what comes before or after all of them, on one rank.

    Attributes:
        forward, backward: seconds in kernels for one micro-batch; `backward` has `recompute` in it.
        again: seconds of recomputation.
        tp_forward, tp_backward: tensor-parallel traffic that shows.
        params, trainable: elements of this rank, before they are sharded.
        flops: of forward and backward, without recomputation.
        flops_again: of recomputation.
        num_params: parameters that are trained; 0 where only their elements are known.
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    tp_forward: TransferCost = NOTHING
    tp_backward: TransferCost = NOTHING
    params: float = 0.0
    trainable: float = 0.0
    flops: float = 0.0
    recompute_flops: float = 0.0
    num_params: int = 0


@dataclass(frozen=True)
class MicroBatchCost:
    """All of a model. `boundary_bytes` is what one block hands to the next: a micro-batch's, of one rank."""

    before: SegmentCost
    blocks: tuple[SegmentCost, ...]
    after: SegmentCost
    boundary_bytes: float

    def __iter__(self) -> Iterator[SegmentCost]:
        yield from (self.before, *self.blocks, self.after)


# One operation


def product_seconds(
    device: Device,
    precision: str,
    m: float,
    n: float,
    k: float,
    count: float = 1,
    extra_bytes: float = 0,
) -> float:
    """Seconds of `count` products [m, k] x [k, n] in one launch, and of `extra_bytes` more that they read or write."""
    area = m * n * count
    reached = device.gemm * area / (area + device.gemm_area) * k / (k + device.gemm_depth)
    moved = BYTES[precision] * count * (m * k + k * n + m * n) + extra_bytes
    return (
        max(2 * area * k / (reached * device.flops(precision)), stream_seconds(device, moved))
        + device.launch_s
    )


def stream_seconds(device: Device, num_bytes: float) -> float:
    """Seconds of reading and writing `num_bytes` in all."""
    speedup = device.cache_speedup if num_bytes <= device.cache_bytes else 1.0
    return num_bytes / (device.bandwidth * device.streaming * speedup)


# A transformer of this shape


class _BlockCost(NamedTuple):
    forward: float
    backward: float
    core: float  # of forward: the inside of attention
    cheap: float  # of forward: all that is neither a product nor attention
    flops: float  # of forward
    core_flops: float


def shape_parts(
    shape: TransformerShape, key: CandidateKey, hardware: Hardware, settings: TimingSettings
) -> MicroBatchCost:
    """The parts of one tensor-parallel rank of a transformer."""
    device, tp, size = hardware.device, key.tp, BYTES[key.precision]
    tokens = float(key.micro * shape.seq)
    block = _block_seconds(shape, key, device, settings)
    recompute, again_flops = {
        "none": (0.0, 0.0),
        "full": (block.forward, block.flops),
        "every_n": (block.forward, block.flops),
        "selective": (block.cheap, 0.0),
        "attention": (block.core, block.core_flops),
    }[key.checkpoint]
    group = LinkedGroup(hardware, tp)
    per_pass = group.all_reduce(size * tokens * shape.hidden).times(2)
    params = shape.layer_params * shape.params / shape.num_params / tp
    accumulate = _accumulation_seconds(device, key.precision, params, settings)

    def part(recomputes: bool) -> SegmentCost:
        repeats = recomputes and key.checkpoint in ("full", "every_n")
        return SegmentCost(
            block.forward,
            block.backward + recompute * recomputes + accumulate,
            recompute * recomputes,
            per_pass,
            per_pass._replace(seconds=per_pass.seconds * _SHOWN_BACKWARD) + per_pass.times(repeats),
            params,
            params,
            3 * block.flops,
            again_flops * recomputes,
        )

    kept, recomputed = part(False), part(key.checkpoint != "none")
    skips = settings.every_n if key.checkpoint == "every_n" else 1
    blocks = tuple(recomputed if number % skips == 0 else kept for number in range(shape.layers))
    before, after = _ends(shape, key, hardware, settings)
    divided = tp if key.sequence_parallel else 1
    return MicroBatchCost(before, blocks, after, size * tokens * shape.hidden / divided)


def _block_seconds(
    shape: TransformerShape, key: CandidateKey, device: Device, settings: TimingSettings
) -> _BlockCost:
    """One block of one rank, without communication."""
    tp, size, hidden = key.tp, BYTES[key.precision], float(shape.hidden)
    tokens = float(key.micro * shape.seq)
    queries, all_heads, inner = shape.attention_width / tp, shape.qkv_width / tp, shape.ffn / tp
    up = (shape.num_ffn_matrices - 1) * inner
    products = (
        (tokens, all_heads, hidden),
        (tokens, hidden, queries),
        (tokens, up, hidden),
        (tokens, hidden, inner),
    )
    forward = backward = 0.0
    for m, n, k in products:
        forward += product_seconds(device, key.precision, m, n, k)
        adds = 2 * settings.reduce_bytes * n * k if settings.fused_accumulation else 0.0
        backward += product_seconds(device, key.precision, m, k, n)
        backward += product_seconds(device, key.precision, k, n, m, extra_bytes=adds)
    # Norms, residuals and dropout, which sequence parallelism divides; then what lies inside of it.
    outside = tokens * hidden * size / (tp if key.sequence_parallel else 1)
    activation, rotated = tokens * inner * size, tokens * all_heads * size
    between = (10 + shape.dropout) * outside + (3 if shape.gated else 2) * activation + 4 * rotated
    between_back = (
        (14 + shape.dropout) * outside + (5 if shape.gated else 3) * activation + 5 * rotated
    )
    passes = 1.0 if settings.fused else _UNFUSED
    cheap = passes * stream_seconds(device, between) + 10 * device.launch_s
    backward += passes * stream_seconds(device, between_back) + 16 * device.launch_s
    core, core_back = _attention_seconds(shape, key, device, settings)
    flops = shape.product_flops(tokens) / tp
    core_flops = shape.attention_flops(tokens) / tp
    return _BlockCost(
        forward + cheap + core, backward + core_back, core, cheap, flops + core_flops, core_flops
    )


def _attention_seconds(
    shape: TransformerShape, key: CandidateKey, device: Device, settings: TimingSettings
) -> tuple[float, float]:
    """(forward, backward) of the inside of attention. The full square counts, as it does in papers and profilers."""
    size, count = BYTES[key.precision], key.micro * shape.heads / key.tp
    if shape.flash:
        flops = 4 * count * float(shape.seq) ** 2 * shape.head_dim / (2 if settings.causal else 1)
        seconds = flops / (device.attention * device.flops(key.precision)) + device.launch_s
        return seconds, seconds * _FLASH_BACKWARD
    one = product_seconds(device, key.precision, shape.seq, shape.seq, shape.head_dim, count)
    other = product_seconds(device, key.precision, shape.seq, shape.head_dim, shape.seq, count)
    square = count * float(shape.seq) ** 2
    drops = (2 * size + 1) * shape.dropout  # read, written, and the mask
    forward = (
        one + other + stream_seconds(device, (2 * size + drops) * square) + 2 * device.launch_s
    )
    return forward, 2 * (one + other) + stream_seconds(
        device, (3 * size + drops) * square
    ) + 2 * device.launch_s


def _accumulation_seconds(
    device: Device, precision: str, params: float, settings: TimingSettings, num_params: int = 0
) -> float:
    """Seconds of moving gradients of this many elements to the flat ones, where they add up."""
    if settings.fused_accumulation:
        return 0.0
    if device.operators is not None and num_params:
        wide, num_bytes = (
            precision == "fp32",
            params * (BYTES[precision] + (8 if precision == "fp32" else 4)),
        )
        name = "copy" if wide else "_to_copy"
        return num_params * float(
            device.operators.stream_seconds(name, "float32", np.array(num_bytes / num_params))
        )
    return stream_seconds(device, params * (BYTES[precision] + 2 * settings.reduce_bytes))


def _ends(
    shape: TransformerShape, key: CandidateKey, hardware: Hardware, settings: TimingSettings
) -> tuple[SegmentCost, SegmentCost]:
    """The embedding; the last norm, the head and the loss."""
    device, size, tokens = hardware.device, BYTES[key.precision], float(key.micro * shape.seq)
    hidden, vocab = float(shape.hidden), shape.vocab / key.tp
    group, scale = LinkedGroup(hardware, key.tp), shape.params / shape.num_params / key.tp
    looked_up = tokens * hidden * size
    params = shape.embedding_params * scale
    before = SegmentCost(
        stream_seconds(device, 3 * looked_up),
        stream_seconds(device, 4 * looked_up)
        + _accumulation_seconds(device, key.precision, params, settings),
        tp_forward=group.all_reduce(looked_up),
        params=params,
        trainable=params,
    )
    params = shape.head_params * scale
    logits = tokens * vocab
    adds = 2 * settings.reduce_bytes * vocab * hidden if settings.fused_accumulation else 0.0
    forward = product_seconds(device, key.precision, tokens, vocab, hidden)
    backward = product_seconds(device, key.precision, tokens, hidden, vocab)
    backward += product_seconds(device, key.precision, hidden, vocab, tokens, extra_bytes=adds)
    scored = group.all_reduce(looked_up)
    after = SegmentCost(
        forward
        + stream_seconds(device, logits * (size + 16))
        + stream_seconds(device, 2 * looked_up),
        backward
        + stream_seconds(device, logits * (size + 8))
        + stream_seconds(device, 3 * looked_up)
        + _accumulation_seconds(device, key.precision, params, settings),
        tp_forward=group.all_reduce(12 * tokens),
        tp_backward=scored._replace(seconds=scored.seconds * _SHOWN_BACKWARD),
        params=params,
        trainable=params,
        flops=6 * logits * hidden,
    )
    return before, after


# A model that was traced


class OpColumns(NamedTuple):
    """The operations of a timeline as arrays."""

    flops: NDArray[np.float64]  # base, per sample
    moved: NDArray[np.float64]
    family: NDArray[np.int64]
    dims: NDArray[np.float64]  # m, n, k of products for the smallest micro-batch; 0 elsewhere
    size: NDArray[
        np.float64
    ]  # elements of a convolution's kernel, length of attention; 0 elsewhere
    keys: tuple[tuple[str, str], ...]  # names and dtypes that occur
    key: NDArray[np.int64]  # of them, each operation's
    owner: NDArray[np.int64]  # of the part: 0 before, 1 ... blocks, last after
    is_backward: NDArray[np.bool_]
    wide: NDArray[np.bool_]  # computed in fp32 whatever the job's format


_PRODUCT, _ATTENTION, _STREAM = 0, 1, 2
# What touches no element: questions about a tensor, and other looks at the same memory.
_FREE = {
    "device",
    "view",
    "_unsafe_view",
    "reshape",
    "alias",
    "detach",
    "t",
    "transpose",
    "permute",
    "expand",
    "slice",
    "select",
    "split",
    "unsqueeze",
    "squeeze",
    "as_strided",
    "unbind",
    "chunk",
    "empty",
    "empty_like",
}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_FAMILIES = {"gemm": _PRODUCT, "conv": _PRODUCT, "attention": _ATTENTION}


def _columns(trace: Trace, num_blocks: int) -> OpColumns:
    table, words = trace.op_table, trace.op_table.words
    names = np.array([word not in _FREE for word in words], dtype=bool)
    keep = np.flatnonzero(names[table.name])
    family, shape = table.family[keep], table.shape[keep]
    families = np.array([_FAMILIES.get(word, _STREAM) for word in words], dtype=np.int64)
    is_gemm, is_conv, is_attention = (
        np.array([word == name for word in words], dtype=bool)[family]
        for name in ("gemm", "conv", "attention")
    )
    shapes = np.array(
        [each if len(each) == 3 else (0, 0, 0) for each in table.shapes], dtype=float
    ).reshape(-1, 3)
    elements = np.array([math.prod(each) for each in table.shapes], dtype=float)
    positions = np.array([each[-2] if len(each) > 1 else 0 for each in table.shapes], dtype=float)
    keys, key = np.unique(table.name[keep] * len(words) + table.dtype[keep], return_inverse=True)
    wide = np.array([word in ("float32", "fp32", "torch.float32") for word in words], dtype=bool)
    back = table.phase[keep] == PHASES.index(TracePhase.BACKWARD)
    return OpColumns(
        table.sizes[table.flops[keep]],
        table.sizes[table.bytes_moved[keep]],
        families[family],
        np.where(is_gemm[:, None], shapes[shape], 0.0),
        np.where(is_conv, elements[shape], np.where(is_attention, positions[shape], 0.0)),
        tuple((words[each // len(words)], words[each % len(words)]) for each in keys.tolist()),
        key,
        _owners(table.block[keep], back, num_blocks),
        back,
        wide[table.dtype[keep]],
    )


def _owners(
    block: NDArray[np.int64], back: NDArray[np.bool_], num_blocks: int
) -> NDArray[np.int64]:
    """The part of each operation. What runs between blocks belongs to the one that ran last."""
    found = np.zeros(len(block), dtype=np.int64)
    for where, before, after in (
        (~back, 0, num_blocks + 1),
        (back, num_blocks + 1, 0 if num_blocks else 1),
    ):
        blocks = block[where]
        inside = np.where(blocks >= 0, np.arange(len(blocks)), -1)
        last = np.maximum.accumulate(inside) if len(blocks) else inside
        owners = np.where(last >= 0, blocks[np.maximum(last, 0)] + 1, before)
        owners[int(inside.max(initial=-1)) + 1 :] = after
        found[where] = owners
    return found


def trace_seconds(
    columns: OpColumns, micro: int, device: Device, precision: str
) -> NDArray[np.float64]:
    """Seconds of each operation for `micro` samples."""
    flops = np.maximum(0.0, columns.flops[:, 0] + columns.flops[:, 1] * micro)
    moved = np.maximum(0.0, columns.moved[:, 0] + columns.moved[:, 1] * micro)
    if device.operators is not None:
        return _measured_seconds(columns, flops, moved, device.operators) + device.launch_s
    near = np.where(moved <= device.cache_bytes, device.cache_speedup, 1.0)
    near *= np.where(columns.wide, 1.0, device.narrow)
    streaming = moved / (device.bandwidth * device.streaming * near)
    peak = np.where(columns.wide, device.flops("fp32"), device.flops(precision))
    m, n, k = columns.dims.T
    shaped = (m * n * k > 0) & (columns.family == _PRODUCT)
    # A batch of small products has the FLOPs of all of them; the micro-batch makes it longer where tokens lie.
    growth = np.divide(flops, 2 * m * n * k, out=np.ones_like(flops), where=shaped)
    sums_tokens = columns.is_backward & (k > m)
    area = np.where(shaped, m * n * np.where(sums_tokens, 1.0, growth), 1e12)
    depth = np.where(shaped, k * np.where(sums_tokens, growth, 1.0), 1e12)
    reached = device.gemm * area / (area + device.gemm_area) * depth / (depth + device.gemm_depth)
    share = np.where(columns.family == _ATTENTION, device.attention, np.maximum(reached, 1e-6))
    return (
        np.maximum(np.where(columns.family == _STREAM, 0.0, flops / (share * peak)), streaming)
        + device.launch_s
    )


def _measured_seconds(
    columns: OpColumns, flops: NDArray[np.float64], moved: NDArray[np.float64], operators: Operators
) -> NDArray[np.float64]:
    """Seconds of each operation, as such operations were measured by themselves."""
    seconds = np.zeros_like(flops)
    way = _ways(columns)
    for number, (name, dtype) in enumerate(columns.keys):
        chosen = columns.key == number
        m, n, k = columns.dims[chosen].T
        rate: NDArray[np.float64] | None = None
        if len(m) and m[0]:
            growth = flops[chosen] / (2 * m * n * k)
            sums = way[chosen] == _WEIGHT
            tall = m * np.where(sums | (way[chosen] == _BATCH), 1.0, growth)
            long = k * np.where(sums, growth, 1.0)
            rate = np.zeros_like(growth)
            for each in np.unique(way[chosen]):
                found = operators.product_rate(_WAYS[each], dtype, tall, n, long)
                if found is not None:
                    rate = np.where(way[chosen] == each, found, rate)
        elif columns.size[chosen].any():
            rate = operators.flop_rate(name, dtype, columns.size[chosen])
        streamed = operators.stream_seconds(name, dtype, moved[chosen])
        if rate is None:
            seconds[chosen] = streamed
        else:
            seconds[chosen] = np.where(rate > 0, flops[chosen] / np.maximum(rate, 1.0), streamed)
    return seconds


_OUTPUT, _INPUT, _WEIGHT, _BATCH = range(4)
_WAYS = ("output", "input", "weight", "batch")


def _ways(columns: OpColumns) -> NDArray[np.int64]:
    """What each product is: a layer's output, its input's gradient, its weight's gradient, or many at once.

    What does not grow with the micro-batch tells: of the second, the weight; of the third, the result.
    """
    m, n, k = columns.dims.T
    if not columns.keys:
        return np.zeros(0, dtype=np.int64)
    names = np.array([name for name, _ in columns.keys])[columns.key]
    size = np.array([_ITEM_BYTES.get(dtype, 4) for _, dtype in columns.keys])[columns.key]
    fixed = columns.moved[:, 0] / size
    backward = np.where(np.abs(fixed - m * n) < np.abs(fixed - k * n), _WEIGHT, _INPUT)
    plain = np.where(columns.is_backward & (names == "mm"), backward, _OUTPUT)
    return np.where((names == "bmm") | (names == "baddbmm"), _BATCH, plain).astype(np.int64)


def profile_parts(
    profile: Profile,
    key: CandidateKey,
    hardware: Hardware,
    settings: TimingSettings,
    columns: Mapping[str, OpColumns],
) -> MicroBatchCost:
    """The parts of a traced model.

    Args:
        columns: of each of its timelines.

    Raises:
        KeyError: it was not traced with this kind of checkpointing.
    """
    device, count = hardware.device, profile.num_blocks + 2
    trace = profile.traces[key.checkpoint].of(key.micro)
    table = _columns_of(profile, key.checkpoint, key.micro, columns)
    seconds = trace_seconds(table, key.micro, device, key.precision)
    flops = np.maximum(0.0, table.flops[:, 0] + table.flops[:, 1] * key.micro)
    back = table.is_backward

    def by_part(values: NDArray[np.float64], where: NDArray[np.bool_]) -> NDArray[np.float64]:
        return _sums(table.owner[where], values[where], count)

    forward, backward = by_part(seconds, ~back), by_part(seconds, back)
    work = by_part(flops, np.ones_like(back))
    plain_work, plain_backward = work, backward
    if key.checkpoint != "none" and "none" in columns:
        plain = _columns_of(profile, "none", key.micro, columns)
        plain_flops = np.maximum(0.0, plain.flops[:, 0] + plain.flops[:, 1] * key.micro)
        plain_seconds = trace_seconds(plain, key.micro, device, key.precision)
        plain_work = _sums(plain.owner, plain_flops, count)
        plain_backward = _sums(
            plain.owner[plain.is_backward], plain_seconds[plain.is_backward], count
        )
    params, trainable, num_params = _params_by_part(profile, trace)
    choosing = (
        _choosing_seconds(table, count, device)
        if key.checkpoint == "selective"
        else np.zeros(count)
    )
    parts = [
        SegmentCost(
            float(forward[number] + choosing[number] / 2),
            float(backward[number] + choosing[number] / 2)
            + _accumulation_seconds(
                device, key.precision, trainable[number], settings, num_params[number]
            )
            + device.param_s * num_params[number],
            max(0.0, float(backward[number] - plain_backward[number] + choosing[number] / 2)),
            params=params[number],
            trainable=trainable[number],
            num_params=num_params[number],
            flops=float(min(plain_work[number], work[number])),
            recompute_flops=max(0.0, float(work[number] - plain_work[number])),
        )
        for number in range(count)
    ]
    return MicroBatchCost(
        parts[0],
        tuple(parts[1:-1]),
        parts[-1],
        _boundary_bytes(trace, profile.num_blocks, key.micro),
    )


def _choosing_seconds(columns: OpColumns, count: int, device: Device) -> NDArray[np.float64]:
    """Seconds by part in which selective checkpointing looks at the operations of blocks, once and once more."""
    seen = columns.owner[~columns.is_backward]
    seconds = _sums(seen, np.full(len(seen), device.selective_s), count)
    seconds[[0, -1]] = 0.0
    return seconds


def _columns_of(
    profile: Profile, policy: str, micro: int, columns: Mapping[str, OpColumns]
) -> OpColumns:
    """The operations of the timeline that holds for `micro` samples."""
    trace = profile.traces[policy].of(micro)
    return (
        columns[policy] if trace is profile.traces[policy] else _columns(trace, profile.num_blocks)
    )


def _sums(owner: NDArray[np.int64], values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Sums of `values` by owner."""
    return np.asarray(np.bincount(owner, weights=values, minlength=count), dtype=np.float64)


def _params_by_part(profile: Profile, trace: Trace) -> tuple[list[float], list[float], list[int]]:
    """Elements of each part, all and trainable, and how many parameters are trained.

    Those outside of blocks belong where their module first runs.
    """
    table = trace.op_table
    inside = table.block >= 0
    first_block = int(inside.argmax()) if inside.any() else len(inside)
    early = {table.words[module] for module in np.unique(table.module[:first_block])}
    params, trainable = [0.0] * (profile.num_blocks + 2), [0.0] * (profile.num_blocks + 2)
    counts = [0] * (profile.num_blocks + 2)
    for param in profile.params:
        if param.block >= 0:
            part = param.block + 1
        else:
            part = 0 if param.name.rpartition(".")[0] in early else profile.num_blocks + 1
        params[part] += param.numel
        trainable[part] += param.numel * param.trainable
        counts[part] += param.trainable
    return params, trainable, counts


def _boundary_bytes(trace: Trace, num_blocks: int, micro: int) -> float:
    """Bytes of the last tensor that the middle block makes in forward: what it hands on."""
    table = trace.event_table
    kept = np.array([word == "activation" for word in table.words], dtype=bool)[table.kind]
    made = (
        kept
        & (table.alloc == 1)
        & (table.block == num_blocks // 2)
        & (table.phase == PHASES.index(TracePhase.FORWARD))
    )
    last = np.flatnonzero(made)[-1:]
    sizes = [Affine(*each).at(micro) for each in table.sizes[table.size[last]].tolist()]
    return sizes[-1] if sizes else 0.0


class CostModel:
    """The parts of a model on some hardware, each computed once.

    Attributes:
        subject: a traced model, or a shape.
        formula: the shape that stands for a traced model where it is divided by tensor parallelism; None: it is not.
    """

    def __init__(
        self,
        subject: Profile | TransformerShape,
        hardware: Hardware,
        settings: TimingSettings,
        formula: TransformerShape | None = None,
    ) -> None:
        self.subject, self.hardware, self.settings = subject, hardware, settings
        self.formula = subject if isinstance(subject, TransformerShape) else formula
        self._columns: dict[str, OpColumns] = {}
        if isinstance(subject, Profile):
            self._columns = {
                name: _columns(trace, subject.num_blocks) for name, trace in subject.traces.items()
            }
        self._parts: dict[CandidateKey, MicroBatchCost] = {}

    def uses_formula(self, key: CandidateKey) -> bool:
        """Whether a shape's formulas answer for this candidate."""
        if isinstance(self.subject, TransformerShape):
            return True
        return self.formula is not None and (
            key.tp > 1 or key.checkpoint not in self.subject.traces
        )

    def parts(self, key: CandidateKey) -> MicroBatchCost:
        """What a micro-batch takes on one rank.

        Raises:
            KeyError: neither a timeline nor a formula covers it.
        """
        found = self._parts.get(key)
        if found is None:
            if self.uses_formula(key):
                assert self.formula is not None
                found = shape_parts(self.formula, key, self.hardware, self.settings)
            else:
                assert isinstance(self.subject, Profile)
                found = profile_parts(
                    self.subject, key, self.hardware, self.settings, self._columns
                )
            self._parts[key] = found
        return found
