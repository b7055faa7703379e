"""Parameter servers (Li et al. 2014), to compare with: `sync: server` and `sync: async_server`.

    every rank    push: its unsharded gradient    ->  rank 0 sums them in rank order, and updates
    rank 0        pull: the updated parameters    ->  every other rank

Only the first rank has optimizer states. With the asynchronous one passes issue nothing: each rank
pushes and pulls by itself (`zrun_core/parameter_server`), and rank 0 updates by each push.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.handle import Handle
from zrun_core.distributed.transport import Group, gather_tag, reduce_tag
from zrun_core.memory.layout import UnitLayout
from zrun_core.memory.state_policy import MeshInfo, StatePolicy
from zrun_core.zero.unit.exchange import Exchange, StepCounts

if TYPE_CHECKING:
    from zrun_core.distributed.mesh import Mesh
    from zrun_core.zero.unit.flat_unit import FlatUnit


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
        return comm.pull(
            unit.param.full, unit.replicate, tag=gather_tag(unit.index), name=unit.name
        )

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


@dataclass(frozen=True)
class AsyncServer(ParameterServer):
    """The first replica updates by the gradient of each rank alone, whenever that comes.

    Gradients stay where backward has left them, and parameters are there before a forward begins:
    `PushPull` gives and takes them.
    """

    def recv_numel(self, unit: UnitLayout, mesh_info: MeshInfo) -> int:
        return 0

    def held_numel(self, unit: UnitLayout, mesh_info: MeshInfo) -> int:
        if mesh_info.replica_index > 0 or not unit.trainable:
            return 0
        return (mesh_info.num_replicas - 1) * unit.padded_numel

    def num_versions(self, mesh_info: MeshInfo) -> int:
        """Return 2 where one version is updated while passes use another."""
        return 2 if mesh_info.replica_index == 0 and mesh_info.num_replicas > 1 else 1

    def ordered_among(self, mesh: Mesh) -> Group:
        """Return this rank alone: no reduction of its has a counterpart elsewhere."""
        rank = mesh.data.ranks[mesh.data.index]
        return Group(mesh.data.axis, (rank,), 0, None)

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
        """Leave the gradient where it is."""
        assert boundary
        assert not accumulate
        return Handle(comm, [])

    def num_sums(self, counts: StepCounts, mesh_info: MeshInfo) -> int:
        """Return the pushes that this rank has sent; of the first one, those that it answered."""
        if mesh_info.replica_index > 0:
            return counts.pushes
        return mesh_info.num_replicas * counts.steps - counts.pushes

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
        return {"pull": sums * unit.padded_numel * unit.dtype.itemsize}
