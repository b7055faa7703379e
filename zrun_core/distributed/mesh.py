"""The groups of ranks that a run communicates in: one along each axis of parallelism.

    world       all ranks
    pipe        the stages of a pipeline
    data        the same layers, on different samples
    shard       of these, neighbours that hold one copy of the states between them
    replicate   of these, those that hold equal shards of different copies
    tensor      parts of the same layers
    tied        stages of a pipeline that have the same parameters, as its two ends often do
    pipe_back   `pipe` again, with connections of its own, for gradients
    pipe_wrap   `pipe` again, for what the last stage sends on to the first
    pipe_back_wrap  the same for the gradients of that, from the first to the last
    host        the ranks on this machine

`shard` x `replicate` is `data`. With one copy for all, `replicate` has size 1; with ZeRO stage 0,
`shard` has. Some units may divide `data` otherwise, as experts do that few ranks share: these have
a `shard` and a `replicate` of their own (`Mesh.own`). A unit says in which groups it lies
(`Mesh.groups_of`); nobody asks the rank.

[Note: a process group for each direction]
NCCL has no tags: two ranks of a process group have one communicator for all messages between them,
in either direction, and a message blocks those behind it until its other end runs. If both ranks
send first, both wait for ever. So between two stages each direction, of activations and of their
gradients, has a process group of its own; what goes through one is sent and received in one order.

    stage 0   -- pipe -->           stage 1        activations, from each chunk to the next
              <-- pipe_wrap --                     the same from chunk 1 of stage 1 to chunk 2
              <-- pipe_back --                     gradients of what went through `pipe`
              -- pipe_back_wrap -->                gradients of what went through `pipe_wrap`

This holds where a group was made without `device_id`: with it, all messages of a group share one
communicator, and longer pipelines stop too. Never pass it.

[Note: which process groups are made]
Groups of the same ranks share a process group, and those of all ranks take the default one: without
tensor and pipeline parallelism, on one host and with one copy of the states, nothing is made.
Every rank names all groups to torch in one order, which makes those that it is in, and nothing for
the others: no thread, no connection, 30 us. With `use_local_synchronization` it need not name them,
but then torch derives a group's name from how many groups this rank is in, and ranks of which that
differs wait for each other until time is over (https://github.com/pytorch/pytorch/pull/189073).
It differs where hosts have different numbers of ranks, where pipelines have ends, and in scripts
with groups of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from zrun_core.distributed.transport import Group
from zrun_core.errors import JobError
from zrun_core.spine.parallel_dims import Coordinates, GroupAxis, groups_along


class UnitGroups(NamedTuple):
    """The ranks that a unit lies on: `shard` x `replicate` is `data`.

    Attributes:
        shard: the ranks that divide the unit between them.
        replicate: the ranks that hold the same shard.
    """

    shard: Group
    replicate: Group


@dataclass(frozen=True)
class Mesh:
    """This rank's groups by axis.

    Attributes:
        shard, replicate: of units without groups of their own.
        own: by name, the groups that only some units have.
    """

    world: Group
    pipe: Group
    data: Group
    tensor: Group
    shard: Group
    replicate: Group
    tied: Group
    host: Group
    pipe_back: Group
    pipe_wrap: Group
    pipe_back_wrap: Group
    own: Mapping[str, UnitGroups] = field(default_factory=dict, compare=False)

    @classmethod
    def build(
        cls,
        rank: int,
        hosts: Sequence[str],
        shard_size: int,
        *,
        places: Sequence[Coordinates] | None = None,
        tied_stages: Sequence[int] = (),
        wraps: bool = False,
        timeout_s: float | None = None,
    ) -> Mesh:
        """Find this rank's groups, and make their process groups.

        Collective: every rank calls it with the same arguments, once the default process group is
        there.

        Args:
            hosts: the host of each rank.
            shard_size: data-parallel ranks that hold one copy of the states between them.
            places: of each rank along the axes; None: all are data-parallel.
            wraps: the last stage of a pipeline sends on to the first, as interleaved chunks do.
            timeout_s: of the collectives of groups that are made here; None is torch's own for the
                backend.

        Raises:
            JobError: `shard_size` does not divide the data-parallel ranks.
        """
        if places is None:
            places = [Coordinates(dp=number) for number in range(len(hosts))]
        assert len(set(places)) == len(hosts), "each rank has a place of its own"
        num_data = 1 + max(place.dp for place in places)
        if num_data % shard_size:
            what = f"{shard_size} ranks do not divide the {num_data} data-parallel ranks"
            raise JobError(f"zero.shard_group: {what}")
        process_groups = _ProcessGroups(rank, len(hosts), timeout_s)

        def along(axis: GroupAxis) -> Group:
            return process_groups.group(axis, groups_along(axis, places, shard_size, tied_stages))

        world = along("world")
        pipe = along("pipe")
        pipes = groups_along("pipe", places, shard_size)
        pipe_back = process_groups.apart("pipe_back", pipes)
        pipe_wrap = pipe
        pipe_back_wrap = pipe_back
        if wraps and pipe.size == 2:  # in longer ones no other message goes between the two ends
            pipe_wrap = process_groups.apart("pipe", pipes)
            pipe_back_wrap = process_groups.apart("pipe_back", pipes)
        return cls(
            world=world,
            pipe=pipe,
            # Where both are the same ranks, what they send counts as that of `world`.
            data=world if num_data == world.size else along("data"),
            tensor=along("tensor"),
            shard=along("shard"),
            replicate=along("replicate"),
            tied=along("tied"),
            host=process_groups.group("host", _by_host(hosts)),
            pipe_back=pipe_back,
            pipe_wrap=pipe_wrap,
            pipe_back_wrap=pipe_back_wrap,
        )

    def tie(
        self, places: Sequence[Coordinates], stages: Sequence[int], timeout_s: float | None
    ) -> Mesh:
        """Return the same groups, and that of the stages that have the same parameters. Collective.

        Args:
            places: of each rank along the axes.
            timeout_s: as of `build`.
        """
        if not stages:
            return self
        process_groups = _ProcessGroups(self.world.index, self.world.size, timeout_s)
        groups = groups_along("tied", places, self.shard.size, stages)
        return replace(self, tied=process_groups.group("tied", groups))

    def divide(
        self,
        name: str,
        shard_size: int,
        *,
        places: Sequence[Coordinates] | None = None,
        timeout_s: float | None = None,
    ) -> Mesh:
        """Return the same groups, and `own` ones for some units. Collective.

        Args:
            name: by which units say that they lie in these.
            shard_size: data-parallel ranks that hold one copy of such a unit between them.
            places, timeout_s: as of `build`.

        Raises:
            JobError: `shard_size` does not divide the data-parallel ranks.
        """
        if places is None:
            places = [Coordinates(dp=number) for number in range(self.world.size)]
        if self.data.size % shard_size:
            what = f"{shard_size} ranks do not divide the {self.data.size} data-parallel ranks"
            raise JobError(f"units on {name}: {what}")
        process_groups = _ProcessGroups(self.world.index, self.world.size, timeout_s)
        groups = UnitGroups(
            shard=process_groups.group("shard", groups_along("shard", places, shard_size)),
            replicate=process_groups.group(
                "replicate", groups_along("replicate", places, shard_size)
            ),
        )
        return replace(self, own={**self.own, name: groups})

    def groups_of(self, name: str) -> UnitGroups:
        """Return the groups of a unit.

        Args:
            name: as of `UnitLayout.groups`; empty: the usual ones.
        """
        return self.own[name] if name else UnitGroups(self.shard, self.replicate)

    def along(self, axes: Iterable[str], groups: str = "") -> tuple[int, int]:
        """Return how many ranks there are along several axes together, and this one's place.

        Args:
            groups: of the unit that is asked about, as of `groups_of`.
        """
        of_unit = self.groups_of(groups)._asdict()
        size = 1
        index = 0
        for axis in axes:
            group: Group = of_unit.get(axis) or getattr(self, axis)
            size *= group.size
            index = index * group.size + group.index
        return size, index

    def is_first(self, axes: Iterable[str]) -> bool:
        """Return whether this rank is the first along all of `axes`."""
        return self.along(axes)[1] == 0

    @property
    def adds_samples(self) -> bool:
        """Return whether this rank's loss, samples and tokens count in sums over `world`.

        Of ranks that compute the same samples it is one, on the stage that has the loss.
        """
        return self.tensor.index == 0 and self.pipe.index == self.pipe.size - 1


def _by_host(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the ranks of each host."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


class _ProcessGroups:
    """Makes the process groups of one mesh. See [Note: which process groups are made]."""

    def __init__(self, rank: int, world_size: int, timeout_s: float | None) -> None:
        self._rank = rank
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if world_size > 1:
            self._made[tuple(range(world_size))] = dist.distributed_c10d._get_default_group()

    def group(self, axis: str, groups: Sequence[tuple[int, ...]]) -> Group:
        """Return this rank's group along `axis`, and make the process groups that are missing.

        `groups` are all of them along the axis, in one order on every rank.
        """
        for ranks in groups:
            if len(ranks) > 1 and ranks not in self._made:
                self._made[ranks] = dist.new_group(list(ranks), self._timeout)
        mine = next(ranks for ranks in groups if self._rank in ranks)
        return Group(axis, mine, mine.index(self._rank), self._made.get(mine))

    def apart(self, axis: str, groups: Sequence[tuple[int, ...]]) -> Group:
        """Return this rank's group, with a process group that no other has, even of these ranks.

        See [Note: a process group for each direction]. `groups` are as of `group`.
        """
        made = self._made
        self._made = {}
        group = self.group(axis, groups)
        self._made = made
        return group
