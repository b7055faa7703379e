"""Axes of parallelism: how many ranks there are along each, and the groups of ranks along it.

    dims = ParallelDims(dp=2, tp=2, pp=2)
    dims.coordinates(5)         # Coordinates(pp=1, dp=0, tp=1)
    dims.groups("data")         # [(0, 2), (1, 3), (4, 6), (5, 7)]

Pure: the launcher, the mesh of a run and the planner all read the axes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from zrun_core.spine.sections.parallel import Axis, ParallelConfig
from zrun_core.spine.sections.zero import ZeroConfig

GroupAxis = Literal["world", "pipe", "data", "tensor", "shard", "replicate", "tied"]


class NumCommunicators(NamedTuple):
    """How many communicators of NCCL a rank belongs to.

    Attributes:
        groups: of ranks that sum and gather.
        pairs: of two stages, for messages that go one way.
    """

    groups: int
    pairs: int


class Coordinates(NamedTuple):
    """A rank's place along each axis."""

    pp: int = 0
    dp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class ParallelDims:
    """The size of each axis of parallelism: dp * tp * pp ranks.

    Attributes:
        dp: parts of the batch.
        tp: parts of each layer.
        pp: stages of the pipeline.
        virtual: parts of the model on each stage: Narayanan et al. 2021, section 2.2.
        shard: size of the shard group; None: all data-parallel ranks.
        order: the axes, from the one that the numbers of ranks follow fastest.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    shard: int | None = None
    order: tuple[Axis, Axis, Axis] = ("tp", "dp", "pp")

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "virtual", "shard"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        if self.dp % self.shard_size:
            raise ValueError(
                f"{self.shard} ranks that share the states do not divide {self.dp} data-parallel "
                "ranks"
            )
        if self.virtual > 1 and self.pp == 1:
            raise ValueError("virtual stages need a pipeline: pp is 1")

    @classmethod
    def of(cls, parallel: ParallelConfig) -> ParallelDims:
        """Return the axes of a section that is resolved."""
        assert parallel.dp != "auto"
        return cls(parallel.dp, parallel.tp, parallel.pp, parallel.virtual, order=parallel.order)

    @property
    def world_size(self) -> int:
        return self.dp * self.model_ranks

    @property
    def model_ranks(self) -> int:
        """Return the number of ranks that share one copy of the model."""
        return self.tp * self.pp

    @property
    def shard_size(self) -> int:
        """Return the number of ranks that hold one copy of what is sharded."""
        return self.dp if self.shard is None else self.shard

    def size(self, axis: Axis) -> int:
        return {"tp": self.tp, "dp": self.dp, "pp": self.pp}[axis]

    def coordinates(self, rank: int) -> Coordinates:
        """Return where a rank is along each axis."""
        found: dict[str, int] = {}
        for axis in self.order:
            rank, found[axis] = divmod(rank, self.size(axis))
        return Coordinates(**found)

    def rank_at(self, place: Coordinates) -> int:
        """Return the rank at these coordinates."""
        rank = 0
        for axis in reversed(self.order):
            rank = rank * self.size(axis) + getattr(place, axis)
        return rank

    def dp_per_host(self, ranks_per_host: int) -> int:
        """Return how many data-parallel ranks of one stage and tensor part are on a host."""
        places = map(self.coordinates, range(min(ranks_per_host, self.world_size)))
        return sum(place.pp == 0 and place.tp == 0 for place in places)

    def groups(self, axis: GroupAxis) -> list[tuple[int, ...]]:
        """Return the groups of ranks along `axis`; see `groups_along`."""
        places = [self.coordinates(rank) for rank in range(self.world_size)]
        return groups_along(axis, places, self.shard_size, (0, self.pp - 1))

    def communicators(
        self, stage: int, ranks_per_host: int, tied_stages: Sequence[int] = ()
    ) -> NumCommunicators:
        """Return those of the first rank of a stage, as `distributed.communicators` makes them.

        Groups of the same ranks share one.
        """
        first = Coordinates(pp=stage)
        rank = self.rank_at(first)
        on_host = rank - rank % ranks_per_host
        found = {
            tuple(range(on_host, min(on_host + ranks_per_host, self.world_size))),
            tuple(range(self.world_size)),
            tuple(self.rank_at(first._replace(tp=tp)) for tp in range(self.tp)),
            tuple(self.rank_at(first._replace(dp=dp)) for dp in range(self.dp)),
            tuple(self.rank_at(first._replace(dp=dp)) for dp in range(self.shard_size)),
            tuple(self.rank_at(first._replace(dp=dp)) for dp in range(0, self.dp, self.shard_size)),
        }
        if stage in tied_stages:
            found.add(tuple(self.rank_at(first._replace(pp=pp)) for pp in tied_stages))
        neighbours = (stage > 0) + (stage < self.pp - 1)
        if self.virtual > 1 and stage in (0, self.pp - 1):
            neighbours += 1  # the other end
        return NumCommunicators(sum(len(ranks) > 1 for ranks in found), 2 * neighbours)


def groups_along(
    axis: GroupAxis,
    places: Sequence[Coordinates],
    shard_size: int,
    tied_stages: Sequence[int] = (),
) -> list[tuple[int, ...]]:
    """Return the groups of ranks that differ in their place along `axis` only.

    `data` divides into groups of `shard_size` neighbours, `shard`, which hold one copy of the
    states between them, and into `replicate`, ranks that hold equal shards. `tied` are stages of a
    pipeline that have the same parameters; a rank of any other stage is alone there.

    Args:
        axis: one of `GroupAxis`.
        places: of each rank.

    Returns:
        The groups in the order of their first ranks; each in the order of its ranks.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, (pp, dp, tp) in enumerate(places):
        match axis:
            case "world":
                alike: tuple[int, ...] = ()
            case "pipe":
                alike = (dp, tp)
            case "data":
                alike = (pp, tp)
            case "tensor":
                alike = (pp, dp)
            case "shard":
                alike = (pp, tp, dp // shard_size)
            case "replicate":
                alike = (pp, tp, dp % shard_size)
            case "tied":
                alike = (dp, tp) if pp in tied_stages else (dp, tp, pp)
        found.setdefault(alike, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def resolve_shard_size(zero: ZeroConfig, dp: int, dp_per_host: int) -> int:
    """Return the size of the shard group.

    Args:
        dp: data-parallel ranks: those of one stage and one part of the layers.
        dp_per_host: of these, the ones on one host.
    """
    if zero.stage == 0:
        return 1
    match zero.shard_group:
        case "all":
            return dp
        case "node":
            return dp_per_host
        case size:
            return size
