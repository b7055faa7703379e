"""How the parameters of a unit come, and its gradients go, where all ranks are alike.

    parameters   are gathered over the shard group
    gradients    are reduce-scattered over it; when the step's are complete, the shards are
                 all-reduced over the copies: two parts of one handle

One rule for all stages. At stage 0 the shard group is a single rank, which leaves the all-reduce;
with one copy of the states the reduce-scatter is left. `server.py` is the other way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zrun_core.distributed.collectives import slice_start
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.handle import Handle
from zrun_core.distributed.transport import gather_tag, reduce_tag
from zrun_core.memory.layout import MeshInfo, Ownership, StatePolicy, UnitLayout

if TYPE_CHECKING:
    from zrun_core.zero.unit import FlatUnit


@dataclass(frozen=True)
class Exchange(Ownership):
    """Collectives over the shard group and over the copies."""

    def all_gather(self, comm: Comm, unit: FlatUnit) -> Handle:
        """Begin to make `unit` whole from the shards of its ranks."""
        tag = gather_tag(unit.index)
        return comm.all_gather(unit.full, unit.param_shard, unit.shard, tag=tag, name=unit.name)

    def reduce_grad(
        self,
        comm: Comm,
        unit: FlatUnit,
        whole: torch.Tensor,
        recv_buffer: torch.Tensor,
        into: torch.Tensor,
        *,
        accumulate: bool,
        boundary: bool,
    ) -> Handle:
        """Begin to sum this rank's gradient of `unit` with those of the others.

        Both parts of the sum have one tag: they are between different pairs of ranks.

        Args:
            whole: [padded_numel] the gradient; scratch afterwards.
            recv_buffer: scratch, as large as `recv_numel` says.
            into: where the sum of the owned elements goes, also the ones in `whole`.
            accumulate: whether it is added to what is there.
            boundary: whether the step's gradient is complete with it: then the copies add up.
        """
        tag = reduce_tag(unit.index)
        scattered = comm.reduce_scatter(
            whole, recv_buffer, into, unit.shard, accumulate=accumulate, tag=tag, name=unit.name
        )
        if not boundary or unit.replicate.size == 1:
            return scattered
        replicas = unit.replicate
        return scattered.then(
            lambda: self.all_reduce_replicas(comm, unit, recv_buffer, into), replicas
        )

    def all_reduce_replicas(
        self,
        comm: Comm,
        unit: FlatUnit,
        recv_buffer: torch.Tensor,
        into: torch.Tensor,
    ) -> Handle:
        """Begin to add up the shards of all copies, in place."""
        tag = reduce_tag(unit.index)
        return comm.all_reduce(into, recv_buffer, unit.replicate, tag=tag, name=unit.name)

    def sent_bytes(
        self,
        unit: UnitLayout,
        states: StatePolicy,
        mesh_info: MeshInfo,
        *,
        gathers: int,
        reductions: int,
        sums: int,
    ) -> dict[str, int]:
        """Return the bytes that a rank sends of a unit, by kind of collective.

        Args:
            gathers: how often it is made whole.
            reductions: how often its gradient is summed in the shard group; 0 of what is frozen.
            sums: how often the copies add up.
        """
        num_replicas, others = mesh_info.num_replicas, mesh_info.shard_size - 1
        shard, reduce_size = unit.shard_numel, states.reduce_dtype.itemsize
        start, stop = (
            slice_start(shard, num_replicas, mesh_info.replica_index + end) for end in (0, 1)
        )
        all_reduced = shard + (num_replicas - 2) * (stop - start) if num_replicas > 1 else 0
        return {
            "all_gather": gathers * others * shard * unit.dtype.itemsize,
            "reduce_scatter": reductions * others * shard * reduce_size,
            "all_reduce": sums * all_reduced * reduce_size,
        }
