"""A rough cost model, never above an estimate: bounds on a candidate's seconds and bytes.

They cost next to nothing: a search computes them for all candidates, and estimates only those that
they do not rule out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from zrun_core.memory.buffers import ON_DEVICE, Placement, Tier
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.memory.rank_memory import PipelineStage
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.timing.link_cost import LinkedGroup
from zrun_core.plan.timing.micro_batch_cost import BYTES, SegmentCost
from zrun_core.plan.timing.timing import doubt_of
from zrun_core.plan.timing.update_time import device_update_seconds, host_seconds_per_element
from zrun_core.plan.trace.rows import TracePhase

_NO_STATES = dict.fromkeys(TracePhase, 0)


class BoundedCandidate(NamedTuple):
    """A candidate, and what no estimate of it can be below. Ordered by seconds, `cautious` ones."""

    seconds: float
    number: int  # in the order of enumeration
    variant: int  # of the placement of states: with the number, no two are equal
    num_bytes: float
    candidate: Candidate


class _LowerBounds(NamedTuple):
    """The terms of a candidate's bounds, which hold wherever its states live."""

    seconds: float  # without the update
    update: float  # on the device
    forward: float  # behind which an update on the host may hide
    owned: float  # elements that a rank updates
    states: tuple[float, float, float]  # bytes of parameters, gradients, optimizer
    largest: float  # unit, as a share of the stage's parameters
    dynamic: tuple[int, int]  # bytes of activations; and where checkpointed inputs leave the device


class _ModelSums(NamedTuple):
    """A micro-batch on one tensor-parallel rank that has all of the model."""

    forward: float
    backward: float
    params: float
    trainable: float
    largest: float  # segment, as a share of the model's parameters
    block_params: float  # of an average block
    block_s: float  # seconds of the block that takes least
    block_forward_s: float  # and of its forward
    before_s: float  # and of the segments before and after all blocks
    after_s: float


class Bounds:
    """Bounds of the candidates of one search.

    Attributes:
        placements: of states, that on the device first.
    """

    def __init__(self, planner: Planner, placements: Sequence[Placement]) -> None:
        self.placements = [ON_DEVICE, *placements]
        self._planner = planner
        self._hardware = planner.hardware
        self._settings = planner.cost_model.settings
        self._variants = {place: number for number, place in enumerate(self.placements)}
        self._sums: dict[object, _ModelSums] = {}  # by what a rank computes in a micro-batch
        self._known: dict[int, _LowerBounds] = {}  # by number of the candidate
        self._moves_inputs = any(place.activation is not Tier.DEVICE for place in self.placements)
        self._host_seconds = {
            place: host_seconds_per_element(self._hardware, self._settings, place)
            for place in self.placements
            if place.optimizer is not Tier.DEVICE
        }

    def bound(self, number: int, candidate: Candidate) -> BoundedCandidate:
        """Return the bounds of a candidate with everything on the device.

        Args:
            number: of the candidate, in the order of enumeration.

        Raises:
            KeyError: nothing tells what its micro-batches take.
            JobError: it is impossible.
        """
        self._known[number] = self._lower_bounds(candidate)
        return self.at(number, candidate, ON_DEVICE)

    def at(self, number: int, candidate: Candidate, placement: Placement) -> BoundedCandidate:
        """Return the bounds of a candidate that is known, but with states at `placement`."""
        if placement is not candidate.placement:
            candidate = replace(candidate, placement=placement)
        return BoundedCandidate(
            self._least_seconds(number, placement) * doubt_of(candidate),
            number,
            self._variants[placement],
            self.least_bytes(number, candidate, placement),
            candidate,
        )

    def least_bytes(self, number: int, candidate: Candidate, placement: Placement) -> float:
        """Return the bound on the bytes of a device, with states at `placement`."""
        known = self._known[number]
        # Whole units leave the device, the last one too.
        left = max(0.0, 1 - placement.fraction - known.largest)
        total = 0.0
        tiers = (placement.param, placement.grad, placement.optimizer)
        for num_bytes, tier in zip(known.states, tiers, strict=True):
            if tier is Tier.DEVICE:
                total += num_bytes
            else:
                total += num_bytes * left
        at_home, away = known.dynamic
        dynamic = at_home if placement.activation is Tier.DEVICE else away
        workspace = self._hardware.device.workspace_bytes
        stages = candidate.dims.pp
        kinds = {0, stages // 2, stages - 1}  # of all stages between the two ends one is enough
        outside = min(self._planner.outside(candidate, index) for index in kinds)
        return total + dynamic + workspace + outside

    def _least_seconds(self, number: int, placement: Placement) -> float:
        known = self._known[number]
        if placement.optimizer is Tier.DEVICE:
            return known.seconds + known.update
        on_host = known.owned * placement.fraction * self._host_seconds[placement]
        behind = known.seconds + max(0.0, on_host - known.forward)
        # Cores that train compute the update as well: only what it waits for lies behind.
        return behind + known.update if self._hardware.shares_memory else behind

    def _lower_bounds(self, candidate: Candidate) -> _LowerBounds:
        dims = candidate.dims
        sums = self._model_sums(candidate)
        shard_ranks = dims.shard_size if candidate.stage else 1
        computing = self._computing_seconds(candidate, sums)
        transfers = self._transfer_seconds(candidate, sums, shard_ranks)
        owned = sums.trainable / dims.pp / shard_ranks
        update = device_update_seconds(
            self._hardware.device, owned, self._settings, candidate.precision
        )
        first = self._planner.stage(candidate, 0)
        # Of the model's parameters the first stage has at least those of its blocks.
        share = 1.0
        if dims.pp > 1:
            share = min(1.0, first.blocks * sums.block_params / sums.params)
        return _LowerBounds(
            seconds=max(computing, transfers),
            update=update,
            forward=sums.forward / dims.pp,
            owned=owned,
            states=self._state_bytes(candidate, sums, share),
            largest=sums.largest / share,
            dynamic=self._dynamic_bytes(candidate, first),
        )

    def _model_sums(self, candidate: Candidate) -> _ModelSums:
        key = candidate.key
        found = self._sums.get(key)
        if found is not None:
            return found
        micro_batch = self._planner.cost_model.micro_batch(key)
        params = [segment.params for segment in micro_batch]
        blocks = micro_batch.blocks
        found = self._sums[key] = _ModelSums(
            forward=sum(each.forward + each.tp_forward.seconds for each in micro_batch),
            backward=sum(each.backward + each.tp_backward.seconds for each in micro_batch),
            params=sum(params),
            trainable=sum(segment.trainable for segment in micro_batch),
            largest=max(params) / sum(params),
            block_params=sum(block.params for block in blocks) / max(1, len(blocks)),
            block_s=min(map(_seconds, blocks), default=0.0),
            block_forward_s=min((each.forward for each in blocks), default=0.0),
            before_s=_seconds(micro_batch.before),
            after_s=_seconds(micro_batch.after),
        )
        return found

    def _computing_seconds(self, candidate: Candidate, sums: _ModelSums) -> float:
        """Return the seconds of kernels on the fullest stage, and of an even pipeline's bubble."""
        if candidate.dims.pp == 1:
            return candidate.accumulation * (sums.forward + sums.backward)
        split = self._planner.split(candidate)
        # What stage s waits for: the first micro-batch on its way to it, and the gradients of the
        # last one on their way from it, beside which zero bubble still has weights' to make.
        passing = sums.block_s
        if candidate.order.splits_backward:
            passing = sums.block_forward_s
        most = 0.0
        for stage in range(split.pp):
            busy = sum(map(len, split.stage_blocks(stage))) * sums.block_s
            if stage == 0:
                busy += sums.before_s
            if stage == split.pp - 1:
                busy += sums.after_s
            waits = split.starts[stage] * passing * candidate.accumulation / candidate.flowing
            most = max(most, candidate.accumulation * busy + waits)
        return most

    def _transfer_seconds(self, candidate: Candidate, sums: _ModelSums, shard_ranks: int) -> float:
        """Return the seconds of all gathers and reductions of an average stage."""
        dims = candidate.dims
        count = candidate.accumulation
        times = 1 if candidate.layer_major else 2 * count  # at least
        by_stage = {0: (0, 1), 1: (1, 1), 2: (1, count), 3: (times, count)}
        gathers, reductions = by_stage[candidate.stage]
        shard_group = LinkedGroup(self._hardware, shard_ranks, dims.tp)
        replicas = dims.dp // shard_ranks
        replica_group = LinkedGroup(self._hardware, replicas, dims.tp * shard_ranks)
        gathered = sums.params / dims.pp * BYTES[candidate.precision]
        reduced = sums.trainable / dims.pp * self._settings.reduce_bytes
        seconds = gathers * shard_group.gather(gathered).seconds
        seconds += reductions * shard_group.gather(reduced).seconds
        seconds += replica_group.all_reduce(reduced / shard_ranks).seconds
        return seconds

    def _state_bytes(
        self, candidate: Candidate, sums: _ModelSums, share: float
    ) -> tuple[float, float, float]:
        """Return the bytes of parameters, gradients and optimizer, without padding and scratch.

        `share` is that of the first pipeline stage in the model's parameters.
        """
        size = BYTES[candidate.precision]
        master_bytes = 4 if size < 4 else 0
        settings = self._settings
        optim_bytes = settings.moments * settings.moment_bytes + master_bytes
        ranks = candidate.dims.shard_size
        return (
            size * sums.params * share / (ranks if candidate.stage >= 3 else 1),
            settings.reduce_bytes * sums.trainable * share / (ranks if candidate.stage >= 2 else 1),
            optim_bytes * sums.trainable * share / (ranks if candidate.stage >= 1 else 1),
        )

    def _dynamic_bytes(self, candidate: Candidate, first: PipelineStage) -> tuple[int, int]:
        """Return the bytes of activations on the first stage, with its inputs there and away."""
        at_home = self._activation_bytes(candidate, first)
        if candidate.checkpoint == "none" or not self._moves_inputs:
            return at_home, at_home
        away = replace(candidate, placement=Placement(activation=Tier.HOST))
        return at_home, self._activation_bytes(away, first)

    def _activation_bytes(self, candidate: Candidate, first: PipelineStage) -> int:
        return self._planner.activations.peak(candidate, first, _NO_STATES).num_bytes


def _seconds(segment: SegmentCost) -> float:
    computing = segment.forward + segment.backward
    return computing + segment.tp_forward.seconds + segment.tp_backward.seconds
