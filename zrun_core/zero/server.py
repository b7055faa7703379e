"""A parameter server (Li et al. 2014): `sync: server`, to compare with. Not to train.

    every rank    push: its unsharded gradient    ->  rank 0 sums them in rank order, and updates
    rank 0        pull: the updated parameters    ->  every other rank

Only the first rank has optimizer states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.handle import Handle
from zrun_core.distributed.transport import gather_tag, reduce_tag
from zrun_core.memory.layout import UnitLayout
from zrun_core.memory.state_policy import MeshInfo, StatePolicy
from zrun_core.zero.exchange import Exchange

if TYPE_CHECKING:
    from zrun_core.zero.unit import FlatUnit


@dataclass(frozen=True)
class ParameterServer(Exchange):
    """The first replica updates everything. For stage 0 only, where each replica is one rank."""

    def updated_range(self, unit: UnitLayout, mesh_info: MeshInfo) -> tuple[int, int]:
        if unit.trainable and mesh_info.replica_index > 0:
            return 0, 0
        return super().updated_range(unit, mesh_info)

    def updated_replicated_over(self, unit: UnitLayout) -> tuple[str, ...]:
        if unit.trainable:
            return ()
        return super().updated_replicated_over(unit)

    def counted_parts(self, unit: UnitLayout, mesh_info: MeshInfo) -> range:
        if mesh_info.replica_index > 0:
            return range(0)
        return range(unit.num_parts)

    def recv_numel(self, unit: UnitLayout, mesh_info: MeshInfo) -> int:
        if mesh_info.replica_index > 0:
            return 0
        return (mesh_info.num_replicas - 1) * unit.padded_numel

    def goes_stale(self, mesh_info: MeshInfo) -> bool:
        return mesh_info.num_replicas > 1

    def all_gather(self, comm: Comm, unit: FlatUnit) -> Handle:
        """Begin to pull the parameters of `unit` from the first rank."""
        return comm.pull(unit.full, unit.replicate, tag=gather_tag(unit.index), name=unit.name)

    def reduce_grad(
        self,
        comm: Comm,
        unit: FlatUnit,
        unsharded_grad: torch.Tensor,
        recv_buffer: torch.Tensor,
        into: torch.Tensor,
        *,
        accumulate: bool,
        boundary: bool,
    ) -> Handle:
        """Begin to sum the gradients on the first rank.

        Args:
            unsharded_grad: [padded_numel] in reduce dtype; the first rank's becomes the sum.
            recv_buffer: [recv_numel] scratch, on the first rank.
            into: unused; it is a part of `unsharded_grad`.
            accumulate: never at stage 0, where micro-batches are added up before the sum.
            boundary: always at stage 0.
        """
        assert boundary
        assert not accumulate
        tag = reduce_tag(unit.index)
        return comm.push(unsharded_grad, recv_buffer, unit.replicate, tag=tag, name=unit.name)

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
        if not unit.trainable:
            return {}
        if mesh_info.replica_index > 0:
            return {"push": sums * unit.padded_numel * states.reduce_dtype.itemsize}
        other_ranks = mesh_info.num_replicas - 1
        return {"pull": gathers * other_ranks * unit.padded_numel * unit.dtype.itemsize}
