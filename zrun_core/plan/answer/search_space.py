"""The configurations that a search chooses from: every candidate that its constraints allow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zrun_core.errors import JobError
from zrun_core.memory.buffers import ON_DEVICE, Placement, Tier
from zrun_core.plan.answer.choice import HEADROOM
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.question.candidate import Candidate
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.spine.sections.schedules import PLAIN

_MOST_VIRTUAL = 8
# States that leave the device: those that a step needs least go first, and to the nearest tier.
_OFFLOADS = (
    Placement(activation=Tier.HOST),
    Placement(optimizer=Tier.HOST),
    Placement(grad=Tier.HOST, optimizer=Tier.HOST),
    Placement(grad=Tier.HOST, optimizer=Tier.HOST, activation=Tier.HOST),
    Placement(param=Tier.HOST, grad=Tier.HOST, optimizer=Tier.HOST),
    Placement(Tier.HOST, Tier.HOST, Tier.HOST, Tier.HOST),
    Placement(grad=Tier.HOST, optimizer=Tier.DISK),
    Placement(grad=Tier.DISK, optimizer=Tier.DISK),
    Placement(param=Tier.DISK, grad=Tier.DISK, optimizer=Tier.DISK),
)
_FRACTIONS = (0.25, 0.5, 0.75, 1.0)  # of the states
_POLICIES = ("none", "selective", "every_n", "full")
# Of pipelines whose stages have one chunk. GPipe takes as long as 1F1B, and more memory.
_SCHEDULES = (PLAIN, "zero_bubble")


@dataclass(frozen=True)
class SearchSpace:
    """The constraints of a search. None: all that is possible.

    Attributes:
        global_batch: samples per step, which stays the same.
        base: the candidate that the job asks for; changes are counted from it.
        devices: numbers of devices that may be used; None: as many as the base, and all that the
            hardware has.
        offloads: states may live in the memory of hosts, and on disks where there are any.
        virtual: parts of a pipeline stage at most.
        most_micro: samples of a micro-batch at most, or as many as the base has.
        shard_in_node: consider also copies of the states within each node.
        headroom: share of a device's memory that what comes first leaves free, if anything does.
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
    offloads: bool = True
    virtual: int = _MOST_VIRTUAL
    most_micro: int = 64
    shard_in_node: bool = True
    headroom: float = HEADROOM

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise JobError(
                f"a global batch of {self.global_batch} samples trains nothing: it must be at "
                "least 1"
            )
        for name in ("devices", "stages", "tp", "pp", "micro", "checkpoints", "precisions"):
            given = getattr(self, name)
            if given is not None and not given:
                raise JobError(f"the constraints leave nothing to choose {name} from")


def candidates(
    planner: Planner,
    space: SearchSpace,
    tracing: Callable[[int, int, int], None] = lambda tp, way, ways: None,
) -> Iterator[Candidate]:
    """Yield every candidate of a space once, in a fixed order, with all states on the device.

    Args:
        tracing: is told before the part of one of `tp` ranks is traced, the how many-th of how many
            such parts.
    """
    enumeration = _Enumeration(planner, space, tracing)
    seen = set[Candidate]()
    for candidate in enumeration.candidates():
        if candidate in seen:
            continue
        seen.add(candidate)
        yield candidate


def offload_chains(planner: Planner, space: SearchSpace) -> list[list[Placement]]:
    """Return placements beside the device: for each way, more and more of the states there.

    The way of the base is among them, with its own share.
    """
    if not space.offloads or planner.job.sync != "ring":
        return []
    hardware = planner.hardware
    base = ON_DEVICE if space.base is None else space.base.placement
    shares: dict[Placement, set[float]] = {}  # by way, whose fraction is 1
    for way in (*_OFFLOADS, base):
        here = way.where_host_is_device() if hardware.shares_memory else way
        if here.uses(Tier.DISK) and not hardware.disk_write:
            continue
        if here.is_on_device:
            shares.setdefault(replace(here, fraction=1.0), set()).add(1.0)
        else:
            shares.setdefault(replace(here, fraction=1.0), set()).update(_FRACTIONS)
    shares.pop(ON_DEVICE, None)
    if not base.is_on_device:
        shares.setdefault(replace(base, fraction=1.0), set()).add(base.fraction)
    return [
        [replace(way, fraction=share) for share in sorted(found)] for way, found in shares.items()
    ]


class _Enumeration:
    """The values of each key of a candidate, and their combinations."""

    def __init__(
        self,
        planner: Planner,
        space: SearchSpace,
        tracing: Callable[[int, int, int], None],
    ) -> None:
        self._tracing = tracing
        self._planner = planner
        self._hardware = planner.hardware
        self._space = space
        self._base = space.base
        # A parameter server has all states on one rank.
        self._stages = space.stages if planner.job.sync == "ring" else (0,)

    def candidates(self) -> Iterator[Candidate]:
        for world, precision in itertools.product(self._worlds(), self._precisions()):
            for dims in self._dims(world):
                yield from self._of_dims(dims, precision)

    def _of_dims(self, dims: ParallelDims, precision: str) -> Iterator[Candidate]:
        samples, rest = divmod(self._space.global_batch, dims.dp)  # of a data-parallel rank
        if rest:
            return
        init = "meta"
        if self._planner.hosts.can_build(dims.world_size):
            init = "factory" if self._base is None else self._base.init
        for micro, checkpoint in itertools.product(self._micros(samples), self._checkpoints()):
            count = samples // micro
            if dims.virtual > 1 and count % dims.pp:
                continue  # interleaved stages take micro-batches in groups, and wait for the last
            ways = itertools.product(self._stages, self._schedules(dims), self._sequences(dims.tp))
            for stage, schedule, sequence in ways:
                for shard in self._shards(dims, stage):
                    yield Candidate(
                        stage,
                        replace(dims, shard=shard),
                        micro,
                        count,
                        checkpoint,
                        precision,
                        sequence_parallel=sequence,
                        init=init,
                        schedule=schedule,
                        split=self._split(dims),
                        partition=self._partition(dims.tp, checkpoint),
                    )

    def _partition(self, tp: int, checkpoint: str) -> bool:
        """Return whether inputs of recomputed blocks are divided, as the base asks for it."""
        asked = self._base is not None and self._base.partition
        return asked and tp > 1 and checkpoint != "none"

    def _sequences(self, tp: int) -> Sequence[bool]:
        """Return whether ranks have slices of the sequence: as the base, and where that is possible

        Slices take less memory, and as many bytes are sent.
        """
        if tp == 1:
            return (False,)
        parts = self._planner.parts
        possible = not parts.why_not_divided(tp, sequence=True)
        if self._base is None or self._base.dims.tp == 1:
            return (possible,)
        asked = self._base.sequence_parallel
        if asked == possible or parts.why_not_divided(tp, sequence=asked):
            return (possible,)
        return asked, possible

    def _schedules(self, dims: ParallelDims) -> Sequence[str]:
        """Return the orders of forwards and backwards, that of the base first."""
        base = self._base
        if dims.pp == 1:
            return ("layer_major",) if base is not None and base.layer_major else (PLAIN,)
        if dims.virtual > 1:
            return ("interleaved",)
        if base is None or base.dims.pp == 1 or base.dims.virtual > 1:
            return _SCHEDULES
        return tuple(dict.fromkeys((base.schedule, *_SCHEDULES)))

    def _split(self, dims: ParallelDims) -> tuple[str, ...]:
        """Return the base's own split where there are as many chunks."""
        base = self._base
        if base is None or (dims.pp, dims.virtual) != (base.dims.pp, base.dims.virtual):
            return ()
        return base.split

    def _worlds(self) -> list[int]:
        if self._space.devices is not None:
            return sorted(set(self._space.devices))
        worlds = {self._hardware.num_devices}
        if self._base is not None:
            worlds.add(self._base.dims.world_size)
        return sorted(worlds)

    def _precisions(self) -> Sequence[str]:
        if self._space.precisions is not None:
            return self._space.precisions
        if self._base is not None:
            return (self._base.precision,)
        return (self._planner.job.precision.compute,)

    def _checkpoints(self) -> Sequence[str]:
        if self._space.checkpoints is not None:
            return self._space.checkpoints
        subject = self._planner.subject
        known = tuple(each for each in subject.traces if each not in subject.unknown)
        return known or tuple(subject.traces)

    def _dims(self, world: int) -> Iterator[ParallelDims]:
        num_blocks = self._planner.parts.num_blocks
        order = ParallelDims.order if self._base is None else self._base.dims.order
        for tp in self._tps():
            if world % tp:
                continue
            for pp in _divisors(world // tp):
                if pp > max(1, num_blocks):
                    continue
                if self._space.pp is not None and pp not in self._space.pp:
                    continue
                most_virtual = min(self._space.virtual, num_blocks // pp) if pp > 1 else 1
                for virtual in range(1, most_virtual + 1):
                    if virtual == 1 or num_blocks % (pp * virtual) == 0:
                        yield ParallelDims(world // tp // pp, tp, pp, virtual, order=order)

    def _tps(self) -> Iterator[int]:
        """Return sizes of tensor-parallel groups: within a node, and such that it divides."""
        possible = _divisors(self._hardware.devices_per_node)
        if self._space.tp is not None:
            possible = [tp for tp in possible if tp in self._space.tp]
        parts = self._planner.parts
        ways = [tp for tp in possible if tp > 1]
        parts.begin((tp, True) for tp in ways)
        for tp in possible:  # each may have to be traced
            if tp > 1:
                self._tracing(tp, ways.index(tp) + 1, len(ways))
            if tp == 1 or any(
                not parts.why_not_divided(tp, sequence=sequence) for sequence in (True, False)
            ):
                yield tp

    def _micros(self, samples: int) -> list[int]:
        """Return the sizes of micro-batches into which the samples of a rank divide."""
        most = self._space.most_micro
        if self._base is not None:
            most = max(most, self._base.micro)
        possible = [micro for micro in _divisors(samples) if micro <= most]
        if self._space.micro is None:
            return possible
        return [micro for micro in possible if micro in self._space.micro]

    def _shards(self, dims: ParallelDims, stage: int) -> list[int | None]:
        """Return the sizes of shard groups: all replicas (None), or those of a node."""
        sizes: list[int | None] = [None]
        if not stage:
            return sizes
        local = dims.dp_per_host(self._hardware.devices_per_node)
        divides = 1 < local < dims.dp and dims.dp % local == 0
        if self._space.shard_in_node and dims.pp == 1 and divides:
            sizes.append(local)
        base = self._base
        if base is not None and dims.dp == base.dims.dp and base.dims.shard not in (None, *sizes):
            sizes.append(base.dims.shard)
        return sizes


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
