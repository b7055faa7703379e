"""The groups of ranks that a run communicates in.

The data-parallel ranks form a grid: `shard` groups of neighbouring ranks hold one copy of the model states between
them, `replicate` groups hold equal shards. `world` is all of them. With one copy for all, `replicate` has size 1; with
ZeRO stage 0, `shard` has. `host` is the ranks on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from zrun_core.comm import Group
from zrun_core.errors import JobError


@dataclass(frozen=True)
class Mesh:
    """This rank's groups by axis."""

    world: Group
    shard: Group
    replicate: Group
    host: Group

    @classmethod
    def build(cls, rank: int, hosts: Sequence[str], shard_size: int, timeout_s: float | None = None) -> Mesh:
        """Collective: every rank calls it with the same arguments, after the process group exists.

        Args:
            hosts: the host of each rank; ranks of a host are contiguous.
            shard_size: ranks that hold one copy of the states between them.
            timeout_s: of the collectives of groups that are made here; None is torch's own for the backend.

        Raises:
            JobError: `shard_size` does not divide the world.
        """
        world_size = len(hosts)
        if world_size % shard_size:
            raise JobError(f"zero.shard_group: {shard_size} ranks do not divide the {world_size} data-parallel ranks")
        num_replicas = world_size // shard_size
        everyone = tuple(range(world_size))
        shard_groups = [everyone[i * shard_size : (i + 1) * shard_size] for i in range(num_replicas)]
        replicate_groups = [everyone[i::shard_size] for i in range(shard_size)]
        host_groups = [tuple(r for r in everyone if hosts[r] == host) for host in dict.fromkeys(hosts)]
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        return cls(
            world=_join("world", [everyone], rank, timeout),
            shard=_join("shard", shard_groups, rank, timeout),
            replicate=_join("replicate", replicate_groups, rank, timeout),
            host=_join("host", host_groups, rank, timeout),
        )


def _join(axis: str, groups: list[tuple[int, ...]], rank: int, timeout: timedelta | None) -> Group:
    """This rank's group of `groups`. Every rank creates all of them, in one order, as torch requires."""
    mine: Group | None = None
    for ranks in groups:
        handle = None
        if len(ranks) > 1:
            everyone = len(groups) == 1
            handle = dist.distributed_c10d._get_default_group() if everyone else dist.new_group(list(ranks), timeout)
        if rank in ranks:
            mine = Group(axis, ranks, ranks.index(rank), handle)
    assert mine is not None
    return mine
