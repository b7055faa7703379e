"""Which configuration is best, and which is the cheapest change of a job that makes it fit.

Every configuration that the constraints allow is considered. Two bounds that cost next to nothing, on its memory (the
states without padding or scratch) and on its time (kernels and the bubble of an even pipeline), decide which of them
must be estimated; the result is that of estimating all of them. States leave the device only where they do not fit on
it, and no more of them than is needed. The order is fixed, so that the answer is, too.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from zrun_core.errors import JobError
from zrun_core.hardware.hardware import Hardware
from zrun_core.memory.buffers import ON_DEVICE, Placement, Tier
from zrun_core.plan.answer.outcome import Estimate, SearchResult
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.memory.rank_memory import PipelineStage, formula_slack
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.question.transformer import TransformerShape
from zrun_core.plan.timing.collectives import LinkedGroup
from zrun_core.plan.timing.micro_batch_cost import BYTES, SegmentCost
from zrun_core.plan.timing.update_time import device_update_seconds, host_seconds_per_element
from zrun_core.plan.trace.profile import Profile
from zrun_core.plan.trace.rows import TracePhase
from zrun_core.spine.parallel_dims import ParallelDims

SearchGoal = Literal["fit", "best"]
SHOWN = 10
_MOST_VIRTUAL = 8
_OFFLOADS = (
    Placement(optimizer=Tier.HOST),
    Placement(grad=Tier.HOST, optimizer=Tier.HOST),
    Placement(param=Tier.HOST, grad=Tier.HOST, optimizer=Tier.HOST),
    Placement(grad=Tier.HOST, optimizer=Tier.DISK),
    Placement(param=Tier.DISK, grad=Tier.DISK, optimizer=Tier.DISK),
)
_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
_SAME_ROOM = 0.01  # of the capacity: headroom that differs by less is the same
_SAME_TIME = 1.01  # and so are seconds, where both matter
_NO_STATES = dict.fromkeys(TracePhase, 0)


@dataclass(frozen=True)
class SearchSpace:
    """What a search may choose from. None: all that is possible.

    Attributes:
        global_batch: samples per step, which stays what it is.
        base: the candidate that the job asks for; what a change is counted from.
        devices: numbers of devices that may be used; None: as many as the base, and all that the hardware has.
        trainable: only what zrun can train now.
        offloads: whether states may live in the memory of hosts, and on disks where there are any.
        virtual: parts of a pipeline stage at most.
        most_micro: samples of a micro-batch at most, or as many as the base has.
        shard_in_node: consider also copies of the states within each node.
    """

    global_batch: int
    base: Candidate | None = None
    devices: Sequence[int] | None = None
    stages: Sequence[int] = (0, 1, 2, 3)
    tp: Sequence[int] | None = None
    pp: Sequence[int] | None = None
    micro: Sequence[int] | None = None
    checkpoints: Sequence[str] | None = None
    precisions: Sequence[str] | None = None
    trainable: bool = False
    offloads: bool = True
    virtual: int = _MOST_VIRTUAL
    most_micro: int = 64
    shard_in_node: bool = True

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise JobError(
                f"a global batch of {self.global_batch} samples trains nothing: it must be at least 1"
            )
        for name in ("devices", "stages", "tp", "pp", "micro", "checkpoints", "precisions"):
            if (given := getattr(self, name)) is not None and not given:
                raise JobError(f"the constraints leave nothing to choose {name} from")
        if self.trainable and not {1} & set(self.tp or (1,)) & set(self.pp or (1,)):
            raise JobError(
                "the constraints contradict each other: zrun does not train with tp or pp above 1 yet"
            )


def search(
    subject: Profile | TransformerShape | Planner,
    hardware: Hardware,
    constraints: SearchSpace,
    goal: SearchGoal,
) -> SearchResult:
    """Search for what `goal` asks: "best", the fastest that fits; "fit", the cheapest change that does.

    The cheapest change of `constraints.base` is one that zrun can train with, then the one with the fewest keys
    changed, then the one that slows a step least.

    Raises:
        JobError: the constraints contradict each other, or leave nothing.
    """
    planner = subject if isinstance(subject, Planner) else Planner(subject, hardware)
    return _Search(planner, constraints).run(goal)


class _BoundedCandidate(NamedTuple):
    """A candidate, and what no estimate of it can be below."""

    seconds: float
    number: int  # in the order of enumeration
    variant: int  # of where states live: with the number, no two are equal
    num_bytes: float
    candidate: Candidate


class _LowerBounds(NamedTuple):
    """What the bounds of a candidate are made of, wherever its states live."""

    seconds: float  # without the update
    update: float  # on the device
    forward: float  # behind which an update on the host may hide
    owned: float  # elements that a rank updates
    states: tuple[float, float, float]  # bytes of parameters, gradients, optimizer
    largest: float  # unit, as a share of the stage's parameters
    dynamic: float


class _ModelSums(NamedTuple):
    """What a micro-batch takes on one tensor-parallel rank that has all of the model."""

    forward: float
    backward: float
    params: float
    trainable: float
    largest: float  # part of the model, as a share of its parameters
    block: float  # parameters of an average block
    of_block: float  # seconds of the block that takes least
    before: float  # and of what comes before all of them
    after: float


class _Search:
    def __init__(self, planner: Planner, constraints: SearchSpace) -> None:
        self.planner, self.constraints, self.hardware = planner, constraints, planner.hardware
        self.capacity = self.hardware.device.memory_bytes
        self._sums: dict[object, _ModelSums] = {}
        self._floors: dict[int, _LowerBounds] = {}  # by number of the candidate
        self._done: dict[Candidate, Estimate | None] = {}
        self._considered = 0
        self._offloads = self._placements()
        self._places = {
            place: number
            for number, place in enumerate([ON_DEVICE, *itertools.chain(*self._offloads)])
        }
        self._host_seconds = {
            tier: host_seconds_per_element(planner.hardware, planner.cost_model.settings, tier)
            for tier in (Tier.HOST, Tier.DISK)
        }

    def run(self, goal: SearchGoal) -> SearchResult:
        if goal == "fit":
            return self._fit()
        bounds = list(self._bounds())
        if not bounds:
            raise JobError(self._nothing())
        return self._best(bounds)

    def _nothing(self) -> str:
        return (
            f"no configuration has {self.constraints.global_batch} samples per step on {self.hardware.name}: the batch "
            "must be a multiple of the data-parallel ranks; give another batch or other devices"
        )

    # The fastest

    def _best(self, bounds: Sequence[_BoundedCandidate]) -> SearchResult:
        """Estimate in the order of the bound on time, until nothing that is left can be among the best or undominated.

        States leave the device only where they do not fit on it: elsewhere that costs time and buys nothing.
        """
        heap: list[_BoundedCandidate] = []
        fitting: list[
            tuple[float, int, int, Estimate]
        ] = []  # by time, headroom, and order of enumeration
        front: list[
            tuple[float, int]
        ] = []  # (seconds, headroom) of what nothing beats, fastest first
        missed: list[
            tuple[float, _BoundedCandidate]
        ] = []  # what does not fit, with the bytes that it lacks
        self._considered = len(bounds)
        for bound in bounds:
            if bound.num_bytes <= self.capacity:
                heapq.heappush(heap, bound)
            else:
                missed.append((bound.num_bytes - self.capacity, bound))
                self._push_offloads(heap, bound)
        while heap:
            bound = heapq.heappop(heap)
            if self._is_beaten(bound, fitting, front):
                continue
            lacks = self._overshoot(bound.candidate)
            if lacks is None:
                continue
            found = self._estimate(bound.candidate) if lacks <= 0 else None
            if found is None or not found.fits:
                missed.append((lacks if found is None else _overshoot(found, self.hardware), bound))
                self._push_offloads(heap, bound)
                continue
            bisect.insort(fitting, (found.time.seconds, -found.headroom, bound.number, found))
            if not any(
                seconds <= found.time.seconds and room >= found.headroom for seconds, room in front
            ):
                front = [
                    each
                    for each in front
                    if each[0] < found.time.seconds or each[1] > found.headroom
                ]
                bisect.insort(front, (found.time.seconds, found.headroom))
        rejected = self._nearest(missed)
        ordered = [found for *_, found in fitting]
        return self._result(ordered, ordered, rejected, self._considered)

    def _nearest(self, missed: Sequence[tuple[float, _BoundedCandidate]]) -> list[Estimate]:
        """Estimates of what lacks least; where only a bound is known, it may lack more."""
        near = (self._estimate(bound.candidate) for _, bound in heapq.nsmallest(2 * SHOWN, missed))
        return [found for found in near if found is not None]

    def _overshoot(self, candidate: Candidate) -> int | None:
        """Bytes that a device lacks; None where the candidate is impossible after all."""
        try:
            return self.planner.overshoot(candidate)
        except JobError:
            self._done[candidate] = None
            return None

    def _push_offloads(self, heap: list[_BoundedCandidate], bound: _BoundedCandidate) -> None:
        """Consider the same with states elsewhere, or with more of them there: the least that may fit of each kind."""
        away = bound.candidate.placement
        for chain in self._offloads:
            if bound.candidate.offloads and replace(away, fraction=1.0) != chain[-1]:
                continue
            for placement in chain:
                if bound.candidate.offloads and placement.fraction <= away.fraction:
                    continue
                self._considered += 1
                if self._least_bytes(bound.number, bound.candidate, placement) <= self.capacity:
                    heapq.heappush(heap, self._at(bound.number, bound.candidate, placement))
                    break

    def _is_beaten(
        self,
        bound: _BoundedCandidate,
        fitting: Sequence[tuple[float, int, int, Estimate]],
        front: Sequence[tuple[float, int]],
    ) -> bool:
        """Whether ten are faster for sure, and one of those that fit is about as fast with about as much room."""
        if len(fitting) < SHOWN or fitting[SHOWN - 1][0] > bound.seconds:
            return False
        room = self.capacity - bound.num_bytes - _SAME_ROOM * self.capacity
        return any(
            headroom >= room
            for _, headroom in itertools.takewhile(
                lambda each: each[0] <= bound.seconds * _SAME_TIME, front
            )
        )

    # The cheapest change

    def _fit(self) -> SearchResult:
        base = self.constraints.base
        if base is None:
            raise JobError(
                "the cheapest change is one of something: give the configuration that the job asks for"
            )
        groups = self._by_changes(base)
        if not groups:
            raise JobError(self._nothing())
        fitting: list[Estimate] = []
        missed: list[tuple[float, _BoundedCandidate]] = []
        for key in sorted(groups):
            for bound in sorted(groups[key]):
                if bound.num_bytes > self.capacity:
                    missed.append((bound.num_bytes - self.capacity, bound))
                elif (
                    not _is_slower(bound, fitting)
                    and (lacks := self._overshoot(bound.candidate)) is not None
                ):
                    found = self._estimate(bound.candidate) if lacks <= 0 else None
                    if found is not None and found.fits:
                        fitting.append(found)
                    else:
                        missed.append(
                            (lacks if found is None else _overshoot(found, self.hardware), bound)
                        )
            if len(fitting) >= SHOWN:
                break
        ordered = sorted(fitting, key=lambda each: self._cost(base, each))
        return self._result(ordered, fitting, self._nearest(missed), self._considered)

    def _by_changes(self, base: Candidate) -> dict[tuple[int, int], list[_BoundedCandidate]]:
        """All candidates, by what zrun lacks for them, and by the keys that differ from `base`."""
        groups: dict[tuple[int, int], list[_BoundedCandidate]] = {}
        for first in self._bounds():
            others = (
                self._at(first.number, first.candidate, place) for place in list(self._places)[1:]
            )
            for bound in (first, *others):
                self._considered += 1
                key = len(bound.candidate.lacking()), changes(base, bound.candidate)
                groups.setdefault(key, []).append(bound)
        return groups

    @staticmethod
    def _cost(base: Candidate, found: Estimate) -> tuple[int, int, float, str]:
        candidate = found.candidate
        return (
            len(candidate.lacking()),
            changes(base, candidate),
            found.time.seconds,
            str(candidate),
        )

    def _result(
        self,
        ordered: Sequence[Estimate],
        fitting: Sequence[Estimate],
        rejected: Iterable[Estimate],
        considered: int,
    ) -> SearchResult:
        worst = sorted(
            rejected,
            key=lambda each: (
                _overshoot(each, self.hardware),
                each.time.seconds,
                str(each.candidate),
            ),
        )
        tried = sum(found is not None for found in self._done.values())

        def told(found: Iterable[Estimate]) -> tuple[Estimate, ...]:
            return tuple(
                replace(each, traffic=self.planner.traffic(each.candidate)) for each in found
            )

        return SearchResult(
            told(ordered[:SHOWN]),
            told(_pareto(fitting)),
            told(worst[:SHOWN]),
            tried,
            considered - len(self._done),
        )

    # Candidates and their bounds

    def _estimate(self, candidate: Candidate) -> Estimate | None:
        """The estimate; None where it is impossible after all."""
        if candidate not in self._done:
            try:
                self._done[candidate] = self.planner.estimate(candidate, traffic=False)
            except JobError:
                self._done[candidate] = None
        return self._done[candidate]

    def _bounds(self) -> Iterator[_BoundedCandidate]:
        """Bounds of all candidates with everything on the device; none of those of which nothing tells what they do."""
        for number, candidate in enumerate(self._all()):
            try:
                self._floors[number] = self._floor(candidate)
            except (KeyError, JobError):
                continue
            yield self._at(number, candidate, ON_DEVICE)

    def _at(self, number: int, candidate: Candidate, placement: Placement) -> _BoundedCandidate:
        """Bounds of a candidate, but with states at `placement`."""
        return _BoundedCandidate(
            self._least_seconds(number, placement),
            number,
            self._places[placement],
            self._least_bytes(number, candidate, placement),
            candidate
            if placement is candidate.placement
            else replace(candidate, placement=placement),
        )

    def _sum(self, candidate: Candidate) -> _ModelSums:
        key = candidate.key
        found = self._sums.get(key)
        if found is None:
            parts = self.planner.cost_model.micro_batch(key)
            params = [part.params for part in parts]
            found = self._sums[key] = _ModelSums(
                sum(part.forward + part.tp_forward.seconds for part in parts),
                sum(part.backward + part.tp_backward.seconds for part in parts),
                sum(params),
                sum(part.trainable for part in parts),
                max(params) / sum(params),
                sum(part.params for part in parts.blocks) / max(1, len(parts.blocks)),
                min(map(_seconds, parts.blocks), default=0.0),
                _seconds(parts.before),
                _seconds(parts.after),
            )
        return found

    def _floor(self, candidate: Candidate) -> _LowerBounds:
        """Time: kernels of an average stage and an even pipeline's bubble, or all transfers; then the update.

        Memory: the first stage's states without padding and scratch, and its activations.
        """
        sums, dims, stage = self._sum(candidate), candidate.dims, candidate.stage
        count, device, terms = (
            candidate.accumulation,
            self.hardware.device,
            self.planner.cost_model.settings,
        )
        forward = sums.forward / dims.pp
        share = dims.shard_size if stage else 1
        shard = LinkedGroup(self.hardware, share, dims.tp)
        gathers, reductions = {0: (0, 1), 1: (1, 1), 2: (1, count), 3: (2 * count, count)}[stage]
        moved = gathers * shard.gather(sums.params / dims.pp * BYTES[candidate.precision]).seconds
        reduced = sums.trainable / dims.pp * terms.reduce_bytes
        moved += reductions * shard.gather(reduced).seconds
        moved += (
            LinkedGroup(self.hardware, dims.dp // share, dims.tp * share)
            .all_reduce(reduced / share)
            .seconds
        )
        total, blocks = sums.forward + sums.backward, self.planner.num_blocks // dims.pp
        largest = total if dims.pp == 1 else blocks * sums.of_block + max(sums.before, sums.after)
        seconds = max(
            count * largest + (dims.pp - 1) / dims.virtual * blocks * sums.of_block, moved
        )
        owned = sums.trainable / dims.pp / share
        update = device_update_seconds(device, owned, terms, candidate.precision)
        first = PipelineStage.of(dims, 0, self.planner.num_blocks, count)
        size, sharded = BYTES[candidate.precision], dims.shard_size
        part = min(
            1.0, first.blocks * sums.block / sums.params
        )  # of the model's parameters: at least its blocks'
        if dims.pp == 1:
            part = 1.0
        optim = terms.moments * terms.moment_bytes + (4 if size < 4 else 0)
        states = (
            size * sums.params * part / (sharded if stage >= 3 else 1),
            terms.reduce_bytes * sums.trainable * part / (sharded if stage >= 2 else 1),
            optim * sums.trainable * part / (sharded if stage >= 1 else 1),
        )
        dynamic = self.planner.peak(candidate, first, _NO_STATES).num_bytes
        if device.kind == "cuda" and self.planner.cost_model.uses_formula(candidate.key):
            dynamic += formula_slack(dynamic)
        return _LowerBounds(seconds, update, forward, owned, states, sums.largest / part, dynamic)

    def _least_seconds(self, number: int, place: Placement) -> float:
        floor = self._floors[number]
        if place.optimizer is Tier.DEVICE:
            return floor.seconds + floor.update
        on_host = floor.owned * place.fraction * self._host_seconds[place.optimizer]
        return floor.seconds + max(0.0, on_host - floor.forward)

    def _least_bytes(self, number: int, candidate: Candidate, place: Placement) -> float:
        floor = self._floors[number]
        left = max(0.0, 1 - place.fraction - floor.largest)  # whole units leave, the last one too
        total = 0.0
        for here, tier in zip(
            floor.states, (place.param, place.grad, place.optimizer), strict=True
        ):
            total += here * (left if tier is not Tier.DEVICE else 1.0)
        return (
            total
            + floor.dynamic
            + self.hardware.device.workspace_bytes
            + self.planner.outside(candidate.dims)
        )

    def _all(self) -> Iterator[Candidate]:
        """Every candidate that the constraints allow, in a fixed order."""
        limits, seen = self.constraints, set[Candidate]()
        for world, precision in itertools.product(self._worlds(), self._precisions()):
            for dims in self._dims(world):
                for candidate in self._of_dims(dims, precision):
                    if candidate not in seen and (not limits.trainable or not candidate.lacking()):
                        seen.add(candidate)
                        yield candidate

    def _of_dims(self, dims: ParallelDims, precision: str) -> Iterator[Candidate]:
        per_rank, rest = divmod(self.constraints.global_batch, dims.dp)
        if rest:
            return
        asked = self.constraints.base.init if self.constraints.base is not None else "factory"
        init = asked if self.planner.can_build(dims.world_size) else "meta"
        for micro, checkpoint in itertools.product(self._micros(per_rank), self._checkpoints()):
            count = per_rank // micro
            if dims.virtual > 1 and count % dims.pp:
                continue
            for stage in self.constraints.stages:
                for shard in self._shards(dims, stage):
                    whole = replace(dims, shard=shard)
                    yield Candidate(
                        stage,
                        whole,
                        micro,
                        count,
                        checkpoint,
                        precision,
                        sequence_parallel=dims.tp > 1,
                        init=init,
                    )

    def _worlds(self) -> list[int]:
        if self.constraints.devices is not None:
            return sorted(set(self.constraints.devices))
        asked = (
            {self.constraints.base.dims.world_size} if self.constraints.base is not None else set()
        )
        return sorted(asked | {self.hardware.num_devices})

    def _precisions(self) -> Sequence[str]:
        if self.constraints.precisions is not None:
            return self.constraints.precisions
        asked = (
            self.constraints.base.precision
            if self.constraints.base
            else self.planner.job.precision.compute
        )
        return (asked,)

    def _checkpoints(self) -> Sequence[str]:
        if self.constraints.checkpoints is not None:
            return self.constraints.checkpoints
        if isinstance(self.planner.subject, Profile) and self.planner.cost_model.formula is None:
            subject = self.planner.subject
            known = tuple(each for each in subject.traces if each not in subject.guessed)
            return known or tuple(subject.traces)
        return ("none", "selective", "every_n", "full")

    def _dims(self, world: int) -> Iterator[ParallelDims]:
        limits = self.constraints
        order = ParallelDims.order if limits.base is None else limits.base.dims.order
        for tp in self._tps():
            if world % tp:
                continue
            for pp in _divisors(world // tp):
                if pp > max(1, self.planner.num_blocks) or (
                    limits.pp is not None and pp not in limits.pp
                ):
                    continue
                if limits.trainable and tp * pp > 1:
                    continue
                parts = min(limits.virtual, self.planner.num_blocks // pp) if pp > 1 else 1
                for virtual in range(1, parts + 1):
                    if virtual == 1 or self.planner.num_blocks % (pp * virtual) == 0:
                        yield ParallelDims(world // tp // pp, tp, pp, virtual, order=order)

    def _tps(self) -> list[int]:
        """Sizes of tensor-parallel groups: within a node, and such that heads and widths divide."""
        shape = self.planner.cost_model.formula
        if shape is None or self.constraints.trainable:
            possible = [1]
        else:
            possible = [
                tp
                for tp in _divisors(self.hardware.devices_per_node)
                if shape.heads % tp == 0 and shape.kv_heads % tp == 0 and shape.ffn % tp == 0
            ]
        wanted = self.constraints.tp
        return possible if wanted is None else [tp for tp in possible if tp in wanted]

    def _micros(self, per_rank: int) -> list[int]:
        asked = self.constraints.micro
        base = self.constraints.base
        most = max(self.constraints.most_micro, base.micro if base is not None else 1)
        possible = [micro for micro in _divisors(per_rank) if micro <= most]
        return possible if asked is None else [micro for micro in possible if micro in asked]

    def _shards(self, dims: ParallelDims, stage: int) -> list[int | None]:
        """Sizes of the groups that share the states: all replicas, or those of a node."""
        local = dims.dp_per_host(self.hardware.devices_per_node)
        base = self.constraints.base
        sizes: list[int | None] = [None]
        if (
            stage
            and self.constraints.shard_in_node
            and dims.pp == 1
            and 1 < local < dims.dp
            and dims.dp % local == 0
        ):
            sizes.append(local)
        if (
            stage
            and base is not None
            and base.dims.shard not in (None, *sizes)
            and dims.dp == base.dims.dp
        ):
            sizes.append(base.dims.shard)
        return sizes

    def _placements(self) -> list[list[Placement]]:
        """Where states may live elsewhere than on the device: for each way, with more and more of them there."""
        if (
            not self.constraints.offloads
            or self.constraints.trainable
            or self.hardware.shares_memory
        ):
            return []
        ways = [
            p
            for p in _OFFLOADS
            if Tier.DISK not in (p.param, p.grad, p.optimizer) or self.hardware.disk_write
        ]
        return [[replace(way, fraction=fraction) for fraction in _FRACTIONS] for way in ways]


def changes(base: Candidate, other: Candidate) -> int:
    """How many keys of a job differ between two candidates; the accumulation follows from the others."""
    pairs: tuple[Callable[[Candidate], object], ...] = (
        lambda c: c.stage,
        lambda c: c.micro,
        lambda c: c.checkpoint,
        lambda c: c.precision,
        lambda c: c.placement,
        lambda c: c.dims.tp,
        lambda c: (c.dims.pp, c.dims.virtual),
        lambda c: c.dims.world_size,
        lambda c: c.dims.shard_size < c.dims.dp if c.stage else False,
        lambda c: c.init,
    )
    return sum(read(base) != read(other) for read in pairs)


def _seconds(part: SegmentCost) -> float:
    return part.forward + part.backward + part.tp_forward.seconds + part.tp_backward.seconds


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _by_time(found: Estimate) -> tuple[float, int, str]:
    return found.time.seconds, -found.headroom, str(found.candidate)


def _is_slower(bound: _BoundedCandidate, fitting: Sequence[Estimate]) -> bool:
    """Whether ten that need no more changes are faster for sure."""
    return (
        len(fitting) >= SHOWN
        and sorted(each.time.seconds for each in fitting)[SHOWN - 1] <= bound.seconds
    )


def _pareto(fitting: Iterable[Estimate]) -> list[Estimate]:
    """What nothing beats in both time and headroom, fastest first."""
    front: list[Estimate] = []
    for found in sorted(fitting, key=_by_time):
        if not front or found.headroom > front[-1].headroom:
            front.append(found)
    return front


def _overshoot(found: Estimate, hardware: Hardware) -> int:
    """Bytes that a device, a node's memory or its disks lack, by most."""
    host = 0 if hardware.shares_memory else found.host_bytes - hardware.host_bytes
    disk = max(rank.disk for rank in found.ranks) * min(
        hardware.devices_per_node, found.candidate.dims.world_size
    )
    return max(-found.headroom, host, disk - hardware.disk_bytes if disk else 0)
