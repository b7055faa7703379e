"""How long a step takes: passes over streams, pipelines replayed, the update; and what crosses which link.

A step is the passes of its micro-batches, then the update. On each rank a pass computes the parts of the model in order
while another stream gathers and reduces (`stream_replay.run_pass`); with a pipeline the micro-batches go through its stages
as 1F1B issues them (`stream_replay.replay`). An update on the host runs behind the next forward pass, unit after unit, each
of which waits for its own parameters only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zrun_core.hardware.hardware import Hardware
from zrun_core.memory.buffers import Tier
from zrun_core.plan.question.candidate import Candidate, stage_blocks
from zrun_core.plan.timing.collectives import LinkedGroup, TransferCost
from zrun_core.plan.timing.cost_model import (
    BYTES,
    CostModel,
    SegmentCost,
    TimingSettings,
    stream_seconds,
)
from zrun_core.plan.timing.stream_replay import PassTime, Stream, replay, run_pass

_HOST_UPDATE_SHARE = 0.75  # of the memory bandwidth of a host that a fused update reaches
_COPY_CONTENTION = 0.03  # of a copy engine, which takes nothing from computation but its bandwidth
_SECONDS_PER_DAY = 86400.0
_BETWEEN_S = 0.05  # that lie between the operators of a step on a CPU that nobody has measured


@dataclass(frozen=True)
class StepTime:
    """An optimizer step, and what follows from its length.

    Attributes:
        low, high: between which it should be.
        parts: seconds of it by name, of the rank that has most to do; their sum is `seconds`.
        model_flops, hardware_flops: of all ranks; the second with recomputation.
        mfu, hfu: their shares of the peak; None where there is no data sheet.
        link_bytes: sent by the rank that sends most, by class of link: node, network, host, disk.
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


def days_of(time: StepTime, tokens: float) -> float:
    """Days that so many tokens take.

    Raises:
        ValueError: samples of this model are no tokens.
    """
    if time.tokens_per_s is None:
        raise ValueError("the model's samples are no tokens: give steps instead")
    return tokens / time.tokens_per_s / _SECONDS_PER_DAY


def money_of(days: float, hardware: Hardware, devices: int) -> float | None:
    """What so many devices cost for so long; None without a price."""
    return None if hardware.price is None else days * 24 * devices * hardware.price


def step_time(
    cost_model: CostModel, candidate: Candidate, tokens_per_sample: int | None
) -> StepTime:
    """The time of a step of `candidate`.

    Raises:
        KeyError: nothing tells what its micro-batches take.
        ValueError: the blocks do not fill its pipeline.
    """
    return _StepModel(cost_model, candidate).time(tokens_per_sample)


def host_seconds_per_element(cost_model: CostModel, tier: Tier, precision: str = "bf16") -> float:
    """Seconds per element that a rank's update takes on the host, with states in its memory or on its disks.

    The memory's bandwidth, and that of the disks, is shared by all ranks of a node.
    """
    hardware, settings = cost_model.hardware, cost_model.settings
    share = hardware.host_bandwidth * _HOST_UPDATE_SHARE / hardware.devices_per_node
    seconds = update_bytes(settings, precision) / share
    if tier is Tier.DISK:
        slower = max(min(hardware.disk_read, hardware.disk_write), 1.0) / hardware.devices_per_node
        seconds = max(seconds, _state_bytes(settings) / slower)
    return max(seconds, BYTES[precision] / hardware.host.bandwidth)


def _state_bytes(settings: TimingSettings) -> int:
    """Of an element: the fp32 parameter and its moments."""
    return 4 + settings.moments * settings.moment_bytes


def update_bytes(settings: TimingSettings, precision: str) -> int:
    """Read and written per element: states both ways, the gradient in fp32, the parameter in compute format."""
    size = BYTES[precision]
    return 2 * _state_bytes(settings) + 4 + (size if size < 4 else 0)


class _StepModel:
    """One candidate's step, taken apart."""

    def __init__(self, cost_model: CostModel, candidate: Candidate) -> None:
        self.candidate, self.cost_model, self.settings, self.hardware = (
            candidate,
            cost_model,
            cost_model.settings,
            cost_model.hardware,
        )
        self.device, self.dims = cost_model.hardware.device, candidate.dims
        self.parts = cost_model.parts(candidate.key)
        dims = self.dims
        self.shard = LinkedGroup(self.hardware, dims.shard_size if candidate.stage else 1, dims.tp)
        copies = dims.dp // self.shard.ranks
        self.copies = LinkedGroup(self.hardware, copies, dims.tp * self.shard.ranks)
        self._passes: dict[tuple[object, ...], PassTime] = {}
        self._gathers: dict[int, TransferCost] = {}
        self._reductions: dict[tuple[int, bool], TransferCost] = {}
        place = candidate.placement
        self.away = (
            place.fraction if place.optimizer is not Tier.DEVICE else 0.0
        )  # share of the update on the host

    # The model on the stages

    @cached_property
    def chunks(self) -> list[list[SegmentCost]]:
        """The parts of each chunk of the model, in the model's order; stage s has every pp-th chunk from s."""
        dims, parts = self.dims, self.parts
        if dims.pp == 1:
            return [list(parts)]
        runs = [stage_blocks(len(parts.blocks), dims, stage) for stage in range(dims.pp)]
        chunks = [
            [parts.blocks[number] for number in runs[chunk % dims.pp][chunk // dims.pp]]
            for chunk in range(dims.pp * dims.virtual)
        ]
        chunks[0].insert(0, parts.before)
        chunks[-1].append(parts.after)
        return chunks

    def stage_parts(self, stage: int) -> list[SegmentCost]:
        """All parts of a stage."""
        return [part for chunk in self.chunks[stage :: self.dims.pp] for part in chunk]

    # Communication between data-parallel ranks

    def gather(self, part: SegmentCost) -> TransferCost:
        """What it costs to make a part whole."""
        found = self._gathers.get(id(part))
        if found is None:
            found = self._gathers[id(part)] = self.shard.gather(
                part.params * BYTES[self.candidate.precision]
            )
        return found

    def reduce(self, part: SegmentCost, *, boundary: bool) -> TransferCost:
        """What a micro-batch's gradients of a part cost."""
        key = (id(part), boundary)
        if key not in self._reductions:
            self._reductions[key] = self._reduce(part, boundary=boundary)
        return self._reductions[key]

    def _reduce(self, part: SegmentCost, *, boundary: bool) -> TransferCost:
        num_bytes = part.trainable * self.settings.reduce_bytes
        stage = self.candidate.stage
        cost = TransferCost()
        if boundary or stage >= 2:
            cost = self.shard.gather(num_bytes)
        if boundary:
            cost += self.copies.all_reduce(num_bytes / self.shard.ranks)
        return cost

    # Passes

    def forward(self, parts: Sequence[SegmentCost], *, first: bool) -> PassTime:
        key = ("forward", first, *map(id, parts))
        if key not in self._passes:
            self._passes[key] = self._forward(parts, first=first)
        return self._passes[key]

    def _forward(self, parts: Sequence[SegmentCost], *, first: bool) -> PassTime:
        stage = self.candidate.stage
        gathers = stage == 3 or (first and stage > 0)
        comm = Stream(
            before=[self.gather(part).seconds for part in parts] if gathers else (),
            contention=self.device.contention,
        )
        streams = [comm, Stream(before=self._fetches(parts), contention=_COPY_CONTENTION)]
        if self.candidate.placement.activation is not Tier.DEVICE:
            down = self.parts.boundary_bytes / self._activation_rate
            streams.append(
                Stream(
                    after=[down if self._is_block(p) else 0.0 for p in parts],
                    contention=_COPY_CONTENTION,
                )
            )
        ready = self._ready(parts) if first else None
        ahead = self.settings.prefetch if stage == 3 else len(parts)
        return run_pass(
            [p.forward + p.tp_forward.seconds for p in parts], streams, ahead=ahead, ready=ready
        )

    def backward(self, parts: Sequence[SegmentCost], *, boundary: bool) -> PassTime:
        key = ("backward", boundary, *map(id, parts))
        if key not in self._passes:
            self._passes[key] = self._backward(parts[::-1], boundary=boundary)
        return self._passes[key]

    def _backward(self, parts: Sequence[SegmentCost], *, boundary: bool) -> PassTime:
        stage, place = self.candidate.stage, self.candidate.placement
        comm = Stream(
            before=[self.gather(part).seconds for part in parts] if stage == 3 else (),
            after=[self.reduce(part, boundary=boundary).seconds for part in parts],
            contention=self.device.contention,
        )
        fetches = list(self._fetches(parts)) or [0.0] * len(parts)
        if place.activation is not Tier.DEVICE:
            up = self.parts.boundary_bytes / self._activation_rate
            fetches = [
                seconds + up * self._is_block(part)
                for seconds, part in zip(fetches, parts, strict=True)
            ]
        leaves: list[float] = []
        if self.away and (boundary or (place.grad is not Tier.DEVICE and stage >= 2)):
            size = (
                BYTES[self.candidate.precision]
                if place.grad is not Tier.DEVICE
                else self.settings.reduce_bytes
            )
            leaves = [
                self.away * self.owned([part]) * size / self.hardware.host.bandwidth
                for part in parts
            ]
        copies = Stream(before=fetches, contention=_COPY_CONTENTION)
        streams = [comm, copies, Stream(after=leaves, contention=_COPY_CONTENTION)]
        ahead = self.settings.prefetch if stage == 3 else len(parts)
        return run_pass([p.backward + p.tp_backward.seconds for p in parts], streams, ahead=ahead)

    def _is_block(self, part: SegmentCost) -> bool:
        return part is not self.parts.before and part is not self.parts.after

    @property
    def _activation_rate(self) -> float:
        if self.candidate.placement.activation is Tier.DISK:
            return min(self.hardware.host.bandwidth, self._disk(write=True))
        return self.hardware.host.bandwidth

    def _disk(self, *, write: bool) -> float:
        """One rank's part of the disks of its node."""
        rate = self.hardware.disk_write if write else self.hardware.disk_read
        return max(rate, 1.0) / self.hardware.devices_per_node

    def _fetches(self, parts: Sequence[SegmentCost]) -> Sequence[float]:
        """Seconds in which the parameters of each part come up from another tier, if they live there."""
        place = self.candidate.placement
        if place.param is Tier.DEVICE:
            return ()
        rate = self.hardware.host.bandwidth
        if place.param is Tier.DISK:
            rate = min(rate, self._disk(write=False))
        divided = self.shard.ranks if self.candidate.stage == 3 else 1
        size = BYTES[self.candidate.precision] * place.fraction / divided
        return [part.params * size / rate for part in parts]

    # The update

    def owned(self, parts: Sequence[SegmentCost]) -> float:
        """Elements that one rank updates."""
        return sum(part.trainable for part in parts) / (
            self.shard.ranks if self.candidate.stage else 1
        )

    def device_update(self, parts: Sequence[SegmentCost]) -> float:
        """Seconds of the norm, and of what is updated on the device."""
        owned = self.owned(parts)
        world = (
            LinkedGroup(self.hardware, self.dims.world_size).all_reduce(64.0).seconds
            + self.device.step_s
        )
        norm = stream_seconds(self.device, owned * self.settings.reduce_bytes)
        here = owned * (1 - self.away)
        if (measured := self.device.update.get(self.candidate.precision)) is not None:
            return world + here / measured
        num_bytes = update_bytes(self.settings, self.candidate.precision)
        if self.device.optimizer is not None:
            rate = self.device.optimizer * 28 / num_bytes
            return world + norm + here / rate
        return world + norm + stream_seconds(self.device, here * num_bytes)

    def _ready(self, parts: Sequence[SegmentCost]) -> list[float] | None:
        """When the update on the host has made each part's parameters, in forward order, and sent them up."""
        if not self.away:
            return None
        per_element = host_seconds_per_element(
            self.cost_model, self.candidate.placement.optimizer, self.candidate.precision
        )
        done, moments = 0.0, []
        for part in parts:
            done += self.away * self.owned([part]) * per_element
            moments.append(done)
        return moments

    # All of it

    def time(self, tokens_per_sample: int | None) -> StepTime:
        candidate, dims = self.candidate, self.dims
        count = candidate.accumulation
        updates = [self.device_update(self.stage_parts(stage)) for stage in self._distinct_stages]
        seconds, bubble, busiest = self._passes_seconds(count)
        seconds += max(updates)
        parts = self.stage_parts(busiest)
        recompute = count * sum(part.recompute for part in parts)
        found = {
            "compute": count * sum(part.forward + part.backward for part in parts) - recompute,
            "recompute": recompute,
            "tensor parallel": count
            * sum(p.tp_forward.seconds + p.tp_backward.seconds for p in parts),
            "bubble": bubble,
            "update": max(updates),
        }
        found["exposed transfers"] = max(0.0, seconds - sum(found.values()))
        ranks = count * dims.dp * dims.tp
        flops = ranks * sum(part.flops for part in self.parts)
        executed = flops + ranks * sum(part.recompute_flops for part in self.parts)
        peak = self.device.flops(candidate.precision) * dims.world_size * seconds
        known = self.device.kind == "cuda"
        spread = self.hardware.spread
        samples = candidate.global_batch / seconds
        # What lies between operators is on no data sheet, and nearly all of a tiny model's step.
        is_known = known or self.hardware.measured
        unknown = 0.0 if is_known else _BETWEEN_S
        return StepTime(
            seconds,
            seconds * (1 - spread),
            seconds * (1 + spread) + unknown,
            {name: value for name, value in found.items() if value > 0},
            flops,
            executed,
            flops / peak if known else None,
            executed / peak if known else None,
            None if tokens_per_sample is None else samples * tokens_per_sample,
            samples,
            self.link_bytes(busiest),
        )

    @cached_property
    def _distinct_stages(self) -> list[int]:
        return sorted({0, self.dims.pp // 2, self.dims.pp - 1})

    def _passes_seconds(self, count: int) -> tuple[float, float, int]:
        """(seconds of all passes, of them the pipeline's bubble, the stage that has most to do)."""
        plain = [
            (self.forward(c, first=False), self.backward(c, boundary=False)) for c in self.chunks
        ]
        forward = [ahead.seconds for ahead, _ in plain]
        backward = [back.seconds + back.tail for _, back in plain]
        extra = [
            self.forward(chunk, first=True).seconds
            - forward[number]
            + self.backward(chunk, boundary=True).seconds
            + self.backward(chunk, boundary=True).tail
            - backward[number]
            for number, chunk in enumerate(self.chunks)
        ]
        stages = self.dims.pp
        if stages == 1:
            return count * (forward[0] + backward[0]) + extra[0], 0.0, 0
        send = (
            LinkedGroup(self.hardware, 2, self.dims.tp * self.dims.dp)
            .send(self.parts.boundary_bytes)
            .seconds
        )
        ends = replay(forward, backward, stages, count, send)
        busy = [
            count * sum((forward[c] + backward[c]) for c in range(s, len(forward), stages))
            for s in range(stages)
        ]
        last = max(
            range(stages), key=lambda stage: (ends[stage] + sum(extra[stage::stages]), -stage)
        )
        busiest = max(range(stages), key=lambda stage: (busy[stage], -stage))
        seconds = ends[last] + sum(extra[last::stages])
        return seconds, max(0.0, max(ends) - busy[busiest]), busiest

    def link_bytes(self, stage: int) -> dict[str, int]:
        """Bytes that a rank of a stage sends in a step, by class of link."""
        candidate, count, parts = (
            self.candidate,
            self.candidate.accumulation,
            self.stage_parts(stage),
        )
        node = network = 0.0
        gathers = {0: 0, 1: 1, 2: 1, 3: 2 * count}[candidate.stage]
        for part, number in Counter(parts).items():
            total = self.gather(part).times(gathers)
            total += self.reduce(part, boundary=False).times(count - 1)
            total += self.reduce(part, boundary=True)
            total += part.tp_forward.times(count) + part.tp_backward.times(count)
            node, network = node + number * total.node, network + number * total.network
        if self.dims.pp > 1:
            sends = 2 * count * self.dims.virtual - (count if stage in (0, self.dims.pp - 1) else 0)
            cost = (
                LinkedGroup(self.hardware, 2, self.dims.tp * self.dims.dp)
                .send(self.parts.boundary_bytes)
                .times(sends)
            )
            node, network = node + cost.node, network + cost.network
        found = {"node": node, "network": network, **self._tier_bytes(parts)}
        return {name: math.ceil(value) for name, value in found.items() if value}

    def _tier_bytes(self, parts: Sequence[SegmentCost]) -> dict[str, float]:
        """What goes between the device and its host, and between the host and its disks, both ways together."""
        candidate, place, count = (
            self.candidate,
            self.candidate.placement,
            self.candidate.accumulation,
        )
        size = BYTES[candidate.precision]
        owned = self.away * self.owned(parts)
        down = size if place.grad is not Tier.DEVICE else self.settings.reduce_bytes
        times = count if place.grad is not Tier.DEVICE and candidate.stage >= 2 else 1
        host = owned * (down * times + size)
        disk = owned * 2 * _state_bytes(self.settings) if place.optimizer is Tier.DISK else 0.0
        if place.param is not Tier.DEVICE:
            divided = self.shard.ranks if candidate.stage == 3 else 1
            fetched = (
                2 * count * sum(part.params for part in parts) * size * place.fraction / divided
            )
            host += fetched
            disk += fetched if place.param is Tier.DISK else 0.0
        if place.activation is not Tier.DEVICE:
            kept = (
                2 * count * self.parts.boundary_bytes * sum(self._is_block(part) for part in parts)
            )
            host += kept
            disk += kept if place.activation is Tier.DISK else 0.0
        return {"host": host, "disk": disk}
