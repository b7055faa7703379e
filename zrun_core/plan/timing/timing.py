"""The time of a step, from its passes, pipelines and updates, and the bytes on each link.

A step is the passes of its micro-batches, then the update. On each rank a pass computes the
segments of the model in order while another stream gathers and reduces (`stream_replay.run_pass`);
with a pipeline the micro-batches go through its stages as 1F1B issues them
(`stream_replay.replay`). An update on the host runs behind the next forward pass, unit after unit,
each of which waits for its own parameters only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zrun_core.memory.buffers import Tier
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.timing.cost_model import CostModel
from zrun_core.plan.timing.link_cost import NOTHING, LinkedGroup, TransferCost
from zrun_core.plan.timing.micro_batch_cost import BYTES, SegmentCost
from zrun_core.plan.timing.roofline import stream_seconds
from zrun_core.plan.timing.stream_replay import ChunkTime, PassTime, Stream, replay, run_pass
from zrun_core.plan.timing.update_time import (
    device_update_seconds,
    host_seconds_per_element,
)

_COPY_CONTENTION = 0.03  # of a copy engine, which takes nothing from computation but its bandwidth
# Of a step on cores, that may lie between its operators: the runtime's Python, and the user's.
_BETWEEN_S = 0.006
_BETWEEN_UNMEASURED_S = 0.05  # on cores that nobody has measured
# ZeRO-3 was compared on up to 128 ranks. Narayanan et al. 2021 give its time on 384, 768 and 1,536
# GPUs, of an early DeepSpeed: 1.6, 2.4 and 4.5 times as long as is said here.
MOST_COMPARED = 128
_RANKS_OF_DOUBT = 400.0
# A step and a micro-batch beside the model's own operators, as so many of these: the loop, hooks of
# modules, the message of the step, the decision about it. Of tiny models on one and two ranks.
_OPERATORS_OF_STEP = 120
_OPERATORS_OF_MICRO = 60
# What a rank on a core waits for the others in an exchange that it cannot hide, beyond the message:
# one that finds nothing looks again after pauses of 20 us, then twice as long each time, so that
# another that is a third of a millisecond behind is noticed after a half.
_WAIT_FOR_OTHERS_S = 500e-6
_NORM_BYTES = 64.0  # of the exchange before the update: the norm, and what else all ranks agree on


@dataclass(frozen=True)
class StepTime:
    """An optimizer step, and what follows from its length.

    Attributes:
        low, high: between which it should be.
        parts: seconds of it by name, of the rank that has most to do; their sum is `seconds`. Host:
            for which a GPU has nothing to do, as its host is behind.
        model_flops, hardware_flops: of all ranks; the second with recomputation.
        mfu, hfu: their shares of the peak; None where there is no data sheet.
        update_behind: seconds of the update of states elsewhere, beside the next forward.
        first_forward: seconds of that forward's kernels, which hide as much of it.
        busy: seconds in which each stage of a pipeline computes.
        link_bytes: sent by the rank that sends most to others, by class of link: node, network.
        doubt: how many times as long it may take where nobody has compared it; `high` has it.
    """

    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    model_flops: float
    hardware_flops: float
    mfu: float | None
    hfu: float | None
    tokens_per_s: float | None
    samples_per_s: float
    link_bytes: dict[str, int]
    update_behind: float = 0.0
    first_forward: float = 0.0
    busy: tuple[float, ...] = ()
    doubt: float = 1.0

    @property
    def cautious(self) -> float:
        """Seconds by which a search compares it with others."""
        return self.seconds * self.doubt


def doubt_of(candidate: Candidate) -> float:
    """Return how many times as long a step may take than is said, where nobody has compared it."""
    ranks = candidate.dims.shard_size
    if candidate.stage < 3 or ranks <= MOST_COMPARED:
        return 1.0
    return 1.0 + (ranks - MOST_COMPARED) / _RANKS_OF_DOUBT


def step_time(
    cost_model: CostModel,
    candidate: Candidate,
    tokens_per_sample: int | None,
    sample_s: float = 0.0,
) -> StepTime:
    """Return the time of a step.

    Args:
        tokens_per_sample: None where samples are no tokens.
        sample_s: seconds that a rank waits for each of its samples.

    Raises:
        KeyError: nothing tells what its micro-batches take.
        JobError: the blocks do not fill its pipeline.
    """
    return _StepModel(cost_model, candidate).time(tokens_per_sample, sample_s)


class _StepModel:
    """One candidate's step, taken apart."""

    def __init__(self, cost_model: CostModel, candidate: Candidate) -> None:
        self.candidate = candidate
        self.settings = cost_model.settings
        self.hardware = cost_model.hardware
        self.device = cost_model.hardware.device
        self.dims = dims = candidate.dims
        self.split = cost_model.pipeline.split(dims, candidate.split)
        self.micro_batch = cost_model.micro_batch(candidate.key)
        shard_ranks = dims.shard_size if candidate.stage else 1
        replicas = dims.dp // shard_ranks
        self.shard_group = LinkedGroup(self.hardware, shard_ranks, dims.tp)
        self.replica_group = LinkedGroup(self.hardware, replicas, dims.tp * shard_ranks)
        placement = candidate.placement
        # In layer-major order all micro-batches of a step use what was unsharded for the first.
        self._share_of_unshard = 1.0
        if candidate.layer_major and candidate.stage == 3:
            self._share_of_unshard /= candidate.accumulation
        self.host_share = 0.0  # of the update that runs on the host
        if placement.optimizer is not Tier.DEVICE:
            self.host_share = placement.fraction
        self.border_bytes = cost_model.border_bytes(candidate, self.split)
        self.tied_stages, tied = cost_model.pipeline.tied(self.split)
        self.tied_bytes = tied * self.settings.reduce_bytes
        # By the ids of segments: most blocks are one object.
        self._passes: dict[tuple[object, ...], PassTime] = {}
        self._gathers: dict[int, TransferCost] = {}
        self._reductions: dict[tuple[int, bool], TransferCost] = {}

    # The model on the stages

    @cached_property
    def chunks(self) -> list[list[SegmentCost]]:
        """The segments of each chunk of the model, in the model's order.

        Stage s has every pp-th chunk from s on.
        """
        dims = self.dims
        if dims.pp == 1:
            return [list(self.micro_batch)]
        blocks = self.micro_batch.blocks
        split = self.split
        chunks = [
            [blocks[number] for number in split.blocks(chunk)] for chunk in range(split.num_chunks)
        ]
        chunks[0].insert(0, self.micro_batch.before)
        chunks[-1].append(self.micro_batch.after)
        return chunks

    def segments_of_stage(self, stage: int) -> list[SegmentCost]:
        """Return all segments of a pipeline stage."""
        return [segment for chunk in self.chunks[stage :: self.dims.pp] for segment in chunk]

    # Communication between data-parallel ranks

    def gather(self, segment: SegmentCost) -> TransferCost:
        """Return the cost of unsharding a segment."""
        found = self._gathers.get(id(segment))
        if found is None:
            num_bytes = segment.params * BYTES[self.candidate.precision]
            found = self._gathers[id(segment)] = self.shard_group.gather(num_bytes)
        return found

    def reduce(self, segment: SegmentCost, *, boundary: bool) -> TransferCost:
        """Return the cost of reducing a micro-batch's gradients of a segment.

        At a `boundary` it is the last micro-batch of the step.
        """
        key = (id(segment), boundary)
        found = self._reductions.get(key)
        if found is None:
            found = self._reductions[key] = self._reduce(segment, boundary=boundary)
        return found

    def _reduce(self, segment: SegmentCost, *, boundary: bool) -> TransferCost:
        num_bytes = segment.trainable * self.settings.reduce_bytes
        cost = TransferCost()
        if self.settings.through_first:  # at stage 0, which reduces at the boundary only
            if boundary:
                pulled = segment.trainable * BYTES[self.candidate.precision]
                cost = self.replica_group.through_first(num_bytes, pulled)
            return cost
        if boundary or self.candidate.stage >= 2:
            cost = self.shard_group.gather(num_bytes)
        if boundary:
            cost += self.replica_group.all_reduce(num_bytes / self.shard_group.ranks)
        return cost

    def _seconds_to_unshard(self, segment: SegmentCost) -> float:
        """Return the seconds of unsharding a segment, as the share of a micro-batch."""
        return self._share_of_unshard * self.gather(segment).seconds

    # Passes

    def forward(self, segments: Sequence[SegmentCost], *, first: bool) -> PassTime:
        """Return the time of a forward pass; the first of a step unshards what stays unsharded."""
        key = ("forward", first, *map(id, segments))
        if key not in self._passes:
            self._passes[key] = self._forward(segments, first=first)
        return self._passes[key]

    def _forward(self, segments: Sequence[SegmentCost], *, first: bool) -> PassTime:
        stage = self.candidate.stage
        gathers: list[float] = []
        if stage == 3 or (first and stage > 0):
            gathers = [self._seconds_to_unshard(segment) for segment in segments]
        streams = [
            Stream(before=gathers, contention=self.device.contention),
            Stream(before=self._fetches(segments), contention=_COPY_CONTENTION),
        ]
        if self.candidate.placement.activation is not Tier.DEVICE:
            leaving = self._activation_transfers(segments, self.hardware.disk_write)
            streams.append(Stream(after=leaving, contention=_COPY_CONTENTION))
        return run_pass(
            [segment.forward + segment.tp_forward.seconds for segment in segments],
            streams,
            ahead=self._prefetched(segments),
            ready=self._ready(segments) if first else None,
        )

    def backward(self, segments: Sequence[SegmentCost], *, boundary: bool) -> PassTime:
        """Return the time of a backward pass; at the boundary of a step gradients are reduced."""
        key = ("backward", boundary, *map(id, segments))
        if key not in self._passes:
            self._passes[key] = self._backward(segments[::-1], boundary=boundary)
        return self._passes[key]

    def _backward(self, segments: Sequence[SegmentCost], *, boundary: bool) -> PassTime:
        gathers: list[float] = []
        if self.candidate.stage == 3:
            gathers = [self._seconds_to_unshard(segment) for segment in segments]
        reductions = [self.reduce(segment, boundary=boundary).seconds for segment in segments]
        fetches = self._fetches(segments) or [0.0] * len(segments)
        if self.candidate.placement.activation is not Tier.DEVICE:
            returning = self._activation_transfers(segments, self.hardware.disk_read)
            fetches = [fetch + up for fetch, up in zip(fetches, returning, strict=True)]
        leaving = self._gradient_transfers(segments, boundary=boundary)
        streams = [
            Stream(before=gathers, after=reductions, contention=self.device.contention),
            Stream(before=fetches, contention=_COPY_CONTENTION),
            Stream(after=leaving, contention=_COPY_CONTENTION),
        ]
        return run_pass(
            [segment.backward + segment.tp_backward.seconds for segment in segments],
            streams,
            ahead=self._prefetched(segments),
        )

    def _prefetched(self, segments: Sequence[SegmentCost]) -> int:
        """Return how many segments may be unsharded before they are needed."""
        return self.settings.prefetch if self.candidate.stage == 3 else len(segments)

    def _is_block(self, segment: SegmentCost) -> bool:
        return segment is not self.micro_batch.before and segment is not self.micro_batch.after

    def _activation_transfers(
        self, segments: Sequence[SegmentCost], disk_rate: float
    ) -> list[float]:
        """Return the seconds in which the input of each block leaves the device, or returns.

        `disk_rate` is that of a node's disks, in the direction that is asked for.
        """
        rate = self.hardware.host.bandwidth
        if self.candidate.placement.activation is Tier.DISK:
            rate = min(rate, self._disk_share(disk_rate))
        seconds = self.micro_batch.boundary_bytes / rate
        return [seconds if self._is_block(segment) else 0.0 for segment in segments]

    def _gradient_transfers(
        self, segments: Sequence[SegmentCost], *, boundary: bool
    ) -> Sequence[float]:
        """Return the seconds in which the gradients of each segment leave for the host."""
        candidate = self.candidate
        home = candidate.placement.grad
        leaves_each_time = home is not Tier.DEVICE and candidate.stage >= 2
        if not self.host_share or not (boundary or leaves_each_time):
            return ()
        if home is not Tier.DISK and self.hardware.shares_memory:
            return ()
        rate = self.hardware.host.bandwidth
        if home is Tier.DISK:
            rate = min(rate, self._disk_share(self.hardware.disk_write))
        size = self.settings.reduce_bytes
        return [self.host_share * self.owned([each]) * size / rate for each in segments]

    def _disk_share(self, rate: float) -> float:
        """Return one rank's part of the bandwidth of its node's disks."""
        return max(rate, 1.0) / self.hardware.devices_per_node

    def _fetches(self, segments: Sequence[SegmentCost]) -> Sequence[float]:
        """Return the seconds in which parameters that live on another tier come to the device."""
        placement = self.candidate.placement
        if placement.param is Tier.DEVICE:
            return ()
        rate = self.hardware.host.bandwidth
        if placement.param is Tier.DISK:
            rate = min(rate, self._disk_share(self.hardware.disk_read))
        divided = self.shard_group.ranks if self.candidate.stage == 3 else 1
        size = BYTES[self.candidate.precision] * placement.fraction / divided
        share = self._share_of_unshard
        return [share * segment.params * size / rate for segment in segments]

    # The update

    def owned(self, segments: Sequence[SegmentCost]) -> float:
        """Return the elements that one rank updates."""
        trainable = sum(segment.trainable for segment in segments)
        return trainable / (self.shard_group.ranks if self.candidate.stage else 1)

    def device_update(self, segments: Sequence[SegmentCost]) -> float:
        """Return the seconds of the norm, and of the part of the update that runs on the device."""
        owned = self.owned(segments)
        world = LinkedGroup(self.hardware, self.dims.world_size)
        agree = world.all_reduce(_NORM_BYTES).seconds
        norm = stream_seconds(self.device, owned * self.settings.reduce_bytes)
        here = owned * (1 - self.host_share)
        if self.hardware.shares_memory:  # the cores of the host compute all of it
            here = owned
        precision = self.candidate.precision
        update = device_update_seconds(self.device, here, self.settings, precision)
        if self.settings.updates_apart:
            return self.dims.dp * (norm + update)
        return agree + norm + update

    def _ready(self, segments: Sequence[SegmentCost]) -> list[float] | None:
        """Return when the update on the host has made each segment's parameters, in forward order.

        None: nothing is updated there.
        """
        if not self.host_share:
            return None
        candidate = self.candidate
        per_element = host_seconds_per_element(
            self.hardware, self.settings, candidate.placement, candidate.precision
        )
        now = 0.0
        moments = []
        for segment in segments:
            now += self.host_share * self.owned([segment]) * per_element
            moments.append(now)
        return moments

    # All of it

    def time(self, tokens_per_sample: int | None, sample_s: float) -> StepTime:
        """Put the step together."""
        candidate = self.candidate
        dims = self.dims
        count = candidate.accumulation
        distinct_stages = sorted({0, dims.pp // 2, dims.pp - 1})
        update = max(self.device_update(self.segments_of_stage(stage)) for stage in distinct_stages)
        seconds, bubble, busy = self._all_passes(count)
        busiest = max(range(len(busy)), key=lambda stage: (busy[stage], -stage))  # first of equals
        update += self._sum_tied().seconds
        data = sample_s * candidate.micro * count
        runtime = self._runtime_seconds(count)
        waits = self._num_waits(count) * _WAIT_FOR_OTHERS_S
        late = max(0.0, self._host_seconds(count) - seconds - update)
        seconds += update + data + runtime + waits + late

        ranks = count * dims.dp * dims.tp
        flops = ranks * sum(segment.flops for segment in self.micro_batch)
        executed = flops + ranks * sum(segment.recompute_flops for segment in self.micro_batch)
        mfu = hfu = None
        if self.device.kind == "cuda":
            peak = self.device.flops(candidate.precision) * dims.world_size * seconds
            mfu = flops / peak
            hfu = executed / peak
        samples_per_s = candidate.global_batch / seconds
        tokens_per_s = None
        if tokens_per_sample is not None:
            tokens_per_s = samples_per_s * tokens_per_sample
        segments = self.segments_of_stage(busiest)
        # The time between operators is on no data sheet, and nearly all of a tiny model's step.
        between = 0.0
        if self.device.kind == "cpu":
            between = _BETWEEN_S if self.hardware.measured else _BETWEEN_UNMEASURED_S
        spread = self.hardware.spread
        doubt = doubt_of(candidate)
        named = (("data", data), ("runtime", runtime), ("waits", waits), ("host", late))
        beside = {name: value for name, value in named if value}
        return StepTime(
            seconds=seconds,
            low=seconds * (1 - spread),
            high=doubt * seconds * (1 + spread) + between,
            parts=self._parts(seconds - sum(beside.values()), bubble, update, busiest) | beside,
            model_flops=flops,
            hardware_flops=executed,
            mfu=mfu,
            hfu=hfu,
            tokens_per_s=tokens_per_s,
            samples_per_s=samples_per_s,
            link_bytes=self.link_bytes(busiest),
            update_behind=max(self._ready(segments) or [0.0]),
            first_forward=sum(each.forward + each.tp_forward.seconds for each in segments),
            busy=busy if dims.pp > 1 else (),
            doubt=doubt,
        )

    def _runtime_seconds(self, count: int) -> float:
        """Return what a step takes whatever the model is: on cores, where nothing hides it."""
        if self.device.kind == "cuda":
            return 0.0
        return (_OPERATORS_OF_STEP + _OPERATORS_OF_MICRO * count) * self.device.launch_s

    def _num_waits(self, count: int) -> int:
        """Return how often in a step a rank on a core waits for the others and has nothing to do.

        It does for the last gradients and for the norm, for those of each micro-batch where they
        are reduced at once, and for the first parameters of a micro-batch where they are gathered.
        Ranks with slices of the same layers wait for each other there, and stages in the bubble.
        """
        dims = self.dims
        if self.device.kind == "cuda" or dims.dp == 1:
            return 0
        stage = self.candidate.stage
        return 2 + (count - 1 if stage >= 2 else 0) + (count if stage == 3 else 0)

    def _host_seconds(self, count: int) -> float:
        """Return what the host of a GPU takes to give it a step, as far as operators are known.

        It runs ahead, unless operators are over before it has given the next one. What a compiler
        makes of blocks it gives much faster.
        """
        device = self.device
        if device.kind != "cuda" or self.settings.fused or not device.launch_s:
            return 0.0
        stages = map(self.segments_of_stage, range(self.dims.pp))
        launches = max(
            sum(each.forward_launches + each.backward_launches for each in stage)
            for stage in stages
        )
        if not launches:
            return 0.0
        operators = _OPERATORS_OF_STEP + count * (_OPERATORS_OF_MICRO + launches / device.launch_s)
        return operators * device.host_s

    def _parts(self, seconds: float, bubble: float, update: float, stage: int) -> dict[str, float]:
        """Return the seconds of a step by what a rank of `stage` spends them on."""
        count = self.candidate.accumulation
        segments = self.segments_of_stage(stage)
        recompute = count * sum(segment.recompute for segment in segments)
        compute = count * sum(segment.forward + segment.backward for segment in segments)
        traffic = sum(
            segment.tp_forward.seconds + segment.tp_backward.seconds for segment in segments
        )
        parts = {
            "compute": compute - recompute,
            "recompute": recompute,
            "tensor parallel": count * traffic,
            "bubble": bubble,
            "update": update,
        }
        parts["exposed transfers"] = max(0.0, seconds - sum(parts.values()))
        return {name: value for name, value in parts.items() if value > 0}

    def _all_passes(self, count: int) -> tuple[float, float, tuple[float, ...]]:
        """Return the seconds of all passes, of the busiest stage's bubble, and of each stage."""
        forward = []
        backward = []
        extra = []
        for chunk in self.chunks:
            ahead = self.forward(chunk, first=False)
            back = self.backward(chunk, boundary=False)
            first = self.forward(chunk, first=True)
            last = self.backward(chunk, boundary=True)
            forward.append(ahead.seconds)
            backward.append(back.seconds + back.tail)
            # A step's first forward unshards, and its last backward reduces, what others need not.
            extra.append(first.seconds - forward[-1] + last.seconds + last.tail - backward[-1])
        stages = self.dims.pp
        if stages == 1:
            seconds = count * (forward[0] + backward[0]) + extra[0]
            return seconds, 0.0, (seconds,)
        times = []
        for number, chunk in enumerate(self.chunks):
            weights = min(backward[number], sum(segment.weights for segment in chunk))
            times.append(ChunkTime(forward[number], backward[number] - weights, weights))
        send = self._send(max(self.border_bytes)).seconds
        flowing = self.candidate.flowing
        steps = flowing / count  # that go through the pipeline together: several of PipeDream
        found = replay(self.candidate.schedule, times, stages, flowing, send)
        ends = [end / steps for end in found]
        busy = []
        for stage in range(stages):
            chunks = range(stage, len(forward), stages)
            busy.append(count * sum((forward[chunk] + backward[chunk]) for chunk in chunks))
        totals = [ends[stage] + sum(extra[stage::stages]) for stage in range(stages)]
        return max(totals), max(0.0, max(ends) - max(busy)), tuple(busy)

    def _send(self, num_bytes: float) -> TransferCost:
        """Return the cost of handing what crosses a border to the next stage."""
        neighbours = LinkedGroup(self.hardware, 2, self.dims.tp * self.dims.dp)
        return neighbours.send(num_bytes)

    def _sum_tied(self) -> TransferCost:
        """Return the cost of adding up the gradients of parameters that several stages have."""
        stages = self.tied_stages
        if len(stages) < 2:
            return NOTHING
        apart = self.dims.tp * self.dims.dp * (stages[-1] - stages[0])
        group = LinkedGroup(self.hardware, len(stages), apart)
        shards = self.shard_group.ranks if self.candidate.stage else 1
        return group.all_reduce(self.tied_bytes / self.dims.tp / shards)

    # Bytes on the links

    def link_bytes(self, stage: int) -> dict[str, int]:
        """Return the bytes that a rank of a stage sends in a step, by class of link."""
        count = self.candidate.accumulation
        segments = self.segments_of_stage(stage)
        passes = 1 if self.candidate.layer_major else count
        gathers = {0: 0, 1: 1, 2: 1, 3: 2 * passes}[self.candidate.stage]
        node = network = 0.0
        for segment, number in Counter(segments).items():
            total = self.gather(segment).times(gathers)
            total += self.reduce(segment, boundary=False).times(count - 1)
            total += self.reduce(segment, boundary=True)
            total += segment.tp_forward.times(count) + segment.tp_backward.times(count)
            node += number * total.node
            network += number * total.network
        if self.dims.pp > 1:
            borders = [*self.border_bytes, 0.0]
            sent = sum(borders[chunk] + borders[chunk + 1] for chunk in self.split.chunks(stage))
            cost = self._send(sent).times(count)
            if stage in self.tied_stages:
                cost += self._sum_tied()
            node += cost.node
            network += cost.network
        found = {"node": node, "network": network}
        return {name: math.ceil(value) for name, value in found.items() if value}
