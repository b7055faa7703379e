"""The cost of a traced model's micro-batch: its operations one by one, added up by segment.

All operations of a timeline are computed at once, as columns of numbers: a trace of a large model
has some ten thousand of them, and a search asks for many micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zrun_core.hardware.hardware import Device, Hardware
from zrun_core.plan.question.candidate import CandidateKey
from zrun_core.plan.timing.link_cost import NOTHING, LinkedGroup, TransferCost
from zrun_core.plan.timing.micro_batch_cost import MicroBatchCost, SegmentCost, TimingSettings
from zrun_core.plan.timing.roofline import accumulation_seconds
from zrun_core.plan.trace.profile import Profile, Trace
from zrun_core.plan.trace.rows import (
    KIND_NUMBER,
    PHASE_NUMBER,
    Operator,
    TracePhase,
    values_at,
)

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

# families of operations
_PRODUCT = 0
_ATTENTION = 1
_STREAM = 2
_SUM = 3  # over the ranks that have slices of the same layers
_GATHER = 4  # or a reduce-scatter, among them
_FAMILIES = {"gemm": _PRODUCT, "conv": _PRODUCT, "attention": _ATTENTION}
# Operations that touch no element: questions about a tensor, and other views of its memory.
_VIEWS = (
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
)
_FREE = {"device", "empty", "empty_like", *_VIEWS}


def takes_time(name: str) -> bool:
    """Return whether an operator of this name, without its namespace, has a price."""
    return name not in _FREE


_WIDE_DTYPES = ("float32", "fp32", "torch.float32")
_SATURATED = 1e12  # in place of an area or a depth that is not known: the device is kept busy


class OpColumns(NamedTuple):
    """The operations of a timeline as arrays, one row each.

    Attributes:
        flops: [ops, 2], floating-point operations: a constant, and those of each sample.
        moved: [ops, 2], bytes read and written, in the same way.
        family: [ops], `_PRODUCT`, `_ATTENTION`, `_STREAM`, `_SUM` or `_GATHER`.
        dims: [ops, 3], m, n and k of matrix products for the smallest micro-batch; 0 elsewhere.
        owner: [ops], the segment: 0 before the blocks, 1 ... the blocks, last after them.
        is_backward: [ops], runs in backward.
        is_wide: [ops], computed in fp32 whatever the job's format.
        is_single: [ops], no batch of products: one with a weight.
        is_inner: [ops], one of many that a kernel calls, the more the longer samples are.
    """

    flops: Floats
    moved: Floats
    family: Indices
    dims: Floats
    owner: Indices
    is_backward: Flags
    is_wide: Flags
    is_single: Flags
    is_inner: Flags

    def flops_of(self, micro: int) -> Floats:
        """Return the floating-point operations of each operation for `micro` samples."""
        return np.maximum(0.0, self.flops[:, 0] + self.flops[:, 1] * micro)

    def bytes_of(self, micro: int) -> Floats:
        """Return the bytes that each operation moves for `micro` samples."""
        return np.maximum(0.0, self.moved[:, 0] + self.moved[:, 1] * micro)


def columns_of(trace: Trace, num_blocks: int) -> OpColumns:
    """Return the operations of a timeline that take time."""
    operators = trace.operators
    is_priced = np.array([takes_time(each.name) for each in operators], dtype=bool)
    family = np.array([_family_of(each) for each in operators], dtype=np.int64)
    is_wide = np.array([each.dtype in _WIDE_DTYPES for each in operators], dtype=bool)
    is_single = np.array(["bmm" not in each.name for each in operators], dtype=bool)
    is_inner = np.array([each.is_inner for each in operators], dtype=bool)
    no_product = (0, 0, 0)
    shapes = [
        each.shape if each.family == "gemm" and len(each.shape) == 3 else no_product
        for each in operators
    ]
    dims = np.array(shapes, dtype=float).reshape(-1, 3)
    ops = trace.ops[is_priced[trace.ops["operator"]]]
    operator = ops["operator"]
    is_backward = ops["phase"] == PHASE_NUMBER[TracePhase.BACKWARD]
    return OpColumns(
        flops=np.ascontiguousarray(ops["flops"]),
        moved=np.ascontiguousarray(ops["size"]),
        family=family[operator],
        dims=dims[operator],
        owner=owners(ops["block"].astype(np.int64), is_backward, num_blocks),
        is_backward=is_backward,
        is_wide=is_wide[operator],
        is_single=is_single[operator],
        is_inner=is_inner[operator],
    )


def _family_of(operator: Operator) -> int:
    if operator.family == "collective":
        return _SUM if operator.name == "summed" else _GATHER
    return _FAMILIES.get(operator.family, _STREAM)


def owners(block: Indices, is_backward: Flags, num_blocks: int) -> Indices:
    """Return the segment of each operation.

    Operations between two blocks belong to the block that ran last. With two blocks, in forward:

        block   -1 -1  0  0 -1  1 -1 -1
        owner    0  0  1  1  1  2  3  3
    """
    owner = np.zeros(len(block), dtype=np.int64)
    first = 0
    last = num_blocks + 1
    first_in_backward = last
    last_in_backward = 0 if num_blocks else 1
    owner[~is_backward] = _owners_of_phase(block[~is_backward], first, last)
    owner[is_backward] = _owners_of_phase(block[is_backward], first_in_backward, last_in_backward)
    return owner


def _owners_of_phase(block: Indices, before: int, after: int) -> Indices:
    """Return the segment of each operation of forward or backward, in the order of execution."""
    if not len(block):
        return block
    place = np.where(block >= 0, np.arange(len(block)), -1)  # of operations inside of blocks
    last_inside = np.maximum.accumulate(place)
    owner = np.where(last_inside >= 0, block[np.maximum(last_inside, 0)] + 1, before)
    owner[int(place.max()) + 1 :] = after
    return owner


def trace_seconds(
    columns: OpColumns, micro: int, device: Device, precision: str, share: float = 1.0
) -> Floats:
    """Return the seconds of each operation for `micro` samples, by the roofline of `roofline.py`.

    Args:
        share: of the work of these samples that usual ones have.
    """
    flops = columns.flops_of(micro)
    moved = columns.bytes_of(micro)
    speedup = np.where(moved <= device.cache_bytes, device.cache_speedup, 1.0)
    speedup *= np.where(columns.is_wide, 1.0, device.narrow)
    streaming = moved / (device.bandwidth * device.streaming * speedup)

    area, depth = _product_sizes(columns, flops)
    reached = device.gemm * area / (area + device.gemm_area) * depth / (depth + device.gemm_depth)
    is_attention = columns.family == _ATTENTION
    peak = np.where(columns.is_wide, device.flops("fp32"), device.flops(precision))
    fused = np.where(
        columns.is_wide, device.attention_flops("fp32"), device.attention_flops(precision)
    )
    rate = np.where(is_attention, fused, np.maximum(reached, 1e-6) * peak)
    computing = np.where(columns.family == _STREAM, 0.0, flops / rate)
    both = computing + streaming if device.kind == "cpu" else np.maximum(computing, streaming)
    seconds = share * both + launch_seconds(columns, device, share)
    return np.where(columns.family >= _SUM, 0.0, seconds)  # see `_transfers`


def launch_seconds(columns: OpColumns, device: Device, share: float = 1.0) -> Floats:
    """Return the seconds that each operation takes however small it is; `share` as above."""
    inner_s = device.launch_s if device.inner_s is None else device.inner_s
    return np.where(columns.is_inner, share * inner_s, device.launch_s)


def _transfers(
    columns: OpColumns, micro: int, group: LinkedGroup, count: int, share: float
) -> tuple[list[TransferCost], list[TransferCost]]:
    """Return what each segment exchanges with the ranks that have slices of the same layers.

    Everyone waits for it: nothing hides it. The micro-batch is of `micro` samples; usual ones have
    `share` of their bytes. There are `count` segments.

    Returns:
        In forward; in backward, with recomputation.
    """
    found = [NOTHING] * count, [NOTHING] * count
    moved = share * columns.bytes_of(micro)
    for place in np.flatnonzero(columns.family >= _SUM).tolist():
        times = 2 if columns.family[place] == _SUM else 1
        cost = group.gather(float(moved[place])).times(times)
        segments = found[int(columns.is_backward[place])]
        segments[int(columns.owner[place])] += cost
    return found


def _product_sizes(columns: OpColumns, flops: Floats) -> tuple[Floats, Floats]:
    """Return the elements of each product's result, and the length of its sum.

    The dimensions are those of the smallest micro-batch. A larger one has more rows of the result;
    the gradient of a weight sums over tokens, so that there the sum is longer. A batch of small
    products has the FLOPs of all of them, and counts as one with so many more rows.
    """
    m, n, k = columns.dims.T
    is_product = (m * n * k > 0) & (columns.family == _PRODUCT)
    growth = np.divide(flops, 2 * m * n * k, out=np.ones_like(flops), where=is_product)
    sums_over_tokens = columns.is_backward & (k > m)
    area = m * n * np.where(sums_over_tokens, 1.0, growth)
    depth = k * np.where(sums_over_tokens, growth, 1.0)
    return np.where(is_product, area, _SATURATED), np.where(is_product, depth, _SATURATED)


def cost_of_trace(
    profile: Profile,
    key: CandidateKey,
    hardware: Hardware,
    settings: TimingSettings,
    columns: Mapping[str, OpColumns],
) -> MicroBatchCost:
    """Return the cost of a micro-batch of a traced model.

    Recomputation is what the timeline with checkpointing has beyond the one without.

    Args:
        columns: the operations of each of its timelines, by policy of checkpointing.

    Raises:
        KeyError: it was not traced with this policy.
    """
    count = profile.num_blocks + 2
    device = hardware.device
    share = profile.usual_share
    trace = profile.traces[key.checkpoint].of(key.micro)
    ops = _columns_for(profile, key.checkpoint, key.micro, columns)
    seconds = trace_seconds(ops, key.micro, device, key.precision, share)
    is_forward = ~ops.is_backward
    forward = _sums(ops.owner[is_forward], seconds[is_forward], count)
    backward = _sums(ops.owner[ops.is_backward], seconds[ops.is_backward], count)
    flops = _sums(ops.owner, share * ops.flops_of(key.micro), count)
    plain_flops = flops
    plain_backward = backward
    if key.checkpoint != "none" and "none" in columns:
        plain = _columns_for(profile, "none", key.micro, columns)
        plain_seconds = trace_seconds(plain, key.micro, device, key.precision, profile.usual_share)
        in_backward = plain.is_backward
        plain_flops = _sums(plain.owner, share * plain.flops_of(key.micro), count)
        plain_backward = _sums(plain.owner[in_backward], plain_seconds[in_backward], count)

    # The gradient of a weight takes as long as the forward's product with it. Those outside of
    # blocks are made at once.
    products = is_forward & (ops.family == _PRODUCT) & ops.is_single
    weights = _sums(ops.owner[products], seconds[products], count)
    params, trainable = _params_by_segment(profile, trace)
    is_launched = ops.family < _SUM
    launching = launch_seconds(ops, device, share)
    launched = [
        _sums(ops.owner[rows], launching[rows], count)
        for rows in (is_launched & is_forward, is_launched & ops.is_backward)
    ]
    group = LinkedGroup(hardware, key.tp, is_waited_for=True)
    tp_forward, tp_backward = _transfers(ops, key.micro, group, count, share)
    segments = []
    for number in range(count):
        accumulate = accumulation_seconds(device, key.precision, trainable[number], settings)
        is_block = 0 < number < count - 1
        segment = SegmentCost(
            forward=float(forward[number]),
            backward=float(backward[number]) + accumulate,
            recompute=max(0.0, float(backward[number] - plain_backward[number])),
            weights=min(float(weights[number]), float(backward[number])) if is_block else 0.0,
            tp_forward=tp_forward[number],
            tp_backward=tp_backward[number],
            forward_launches=float(launched[0][number]),
            backward_launches=float(launched[1][number]),
            params=params[number],
            trainable=trainable[number],
            flops=float(min(plain_flops[number], flops[number])),
            recompute_flops=max(0.0, float(flops[number] - plain_flops[number])),
        )
        segments.append(segment)
    boundary_bytes = _boundary_bytes(trace, profile.num_blocks, key.micro)
    return MicroBatchCost(segments[0], tuple(segments[1:-1]), segments[-1], boundary_bytes)


def _columns_for(
    profile: Profile, policy: str, micro: int, columns: Mapping[str, OpColumns]
) -> OpColumns:
    """Return the operations of the timeline that holds for `micro` samples."""
    trace = profile.traces[policy].of(micro)
    if trace is profile.traces[policy]:
        return columns[policy]
    return columns_of(trace, profile.num_blocks)  # a size that was traced by itself


def _sums(owner: Indices, values: Floats, count: int) -> Floats:
    """Return the sums of `values` by owner."""
    return np.asarray(np.bincount(owner, weights=values, minlength=count), dtype=np.float64)


def _params_by_segment(profile: Profile, trace: Trace) -> tuple[list[float], list[float]]:
    """Return the elements of each segment's parameters, and of those that are trained.

    Parameters outside of blocks belong to the segment in which their module first runs.
    """
    inside = trace.ops["block"] >= 0
    first_block = int(inside.argmax()) if inside.any() else len(inside)
    early = {trace.modules[module] for module in np.unique(trace.ops["module"][:first_block])}
    before = 0
    after = profile.num_blocks + 1
    params = [0.0] * (profile.num_blocks + 2)
    trainable = [0.0] * (profile.num_blocks + 2)
    for param in profile.params:
        if param.block >= 0:
            segment = param.block + 1
        elif param.name.rpartition(".")[0] in early:
            segment = before
        else:
            segment = after
        params[segment] += param.numel
        if param.trainable:
            trainable[segment] += param.numel
    return params, trainable


def _boundary_bytes(trace: Trace, num_blocks: int, micro: int) -> float:
    """Return the bytes of the last tensor that the middle block makes in forward: its output."""
    events = trace.events
    is_made = (events["kind"] == KIND_NUMBER["activation"]) & events["alloc"]
    is_of_block = events["block"] == num_blocks // 2
    is_forward = events["phase"] == PHASE_NUMBER[TracePhase.FORWARD]
    outputs = events[is_made & is_of_block & is_forward]
    if not len(outputs):
        return 0.0
    return float(values_at(outputs["size"], micro)[-1])
