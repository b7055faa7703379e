"""A parameter server (Li et al. 2014): `sync: server`, to compare with. Not to train.

The first rank alone has the optimizer's states. Every rank pushes its whole gradient to it; it adds
them up in rank order, updates, and sends the parameters to each of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.handle import Handle
from zrun_core.distributed.transport import gather_tag, reduce_tag
from zrun_core.memory.layout import MeshInfo, StatePolicy, UnitLayout
from zrun_core.zero.exchange import Exchange

if TYPE_CHECKING:
    from zrun_core.zero.unit import FlatUnit


@dataclass(frozen=True)
class ParameterServer(Exchange):
    """The first of the copies updates everything. It is for stage 0: each copy is one rank."""

    def updated_range(self, unit: UnitLayout, mesh_info: MeshInfo) -> tuple[int, int]:
        is_served = unit.trainable and mesh_info.replica_index > 0
        return (0, 0) if is_served else super().updated_range(unit, mesh_info)

    def updated_replicated_over(self, unit: UnitLayout) -> tuple[str, ...]:
        return () if unit.trainable else super().updated_replicated_over(unit)

    def counted_parts(self, unit: UnitLayout, mesh_info: MeshInfo) -> range:
        return range(0 if mesh_info.replica_index else unit.num_parts)

    def recv_numel(self, unit: UnitLayout, mesh_info: MeshInfo) -> int:
        return 0 if mesh_info.replica_index else (mesh_info.num_replicas - 1) * unit.padded_numel

    def goes_stale(self, mesh_info: MeshInfo) -> bool:
        return mesh_info.num_replicas > 1

    def all_gather(self, comm: Comm, unit: FlatUnit) -> Handle:
        return comm.pull(unit.full, unit.replicate, tag=gather_tag(unit.index), name=unit.name)

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
        """Begin to sum the gradients on the server, in `whole`, of which `into` is a part."""
        assert boundary
        assert not accumulate
        tag = reduce_tag(unit.index)
        return comm.push(whole, recv_buffer, unit.replicate, tag=tag, name=unit.name)

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
        if mesh_info.replica_index:
            return {"push": sums * unit.padded_numel * states.reduce_dtype.itemsize}
        others = mesh_info.num_replicas - 1
        return {"pull": gathers * others * unit.padded_numel * unit.dtype.itemsize}
