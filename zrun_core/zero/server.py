"""A parameter server (Li et al. 2014): `sync: server`, to compare with. Not to train.

The first rank alone has the optimizer's states. Every rank pushes its whole gradient to it; it adds
them up in rank order, updates, and sends the parameters to each of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zrun_core.distributed.comm import Comm, Handle, gather_tag, reduce_tag
from zrun_core.memory.layout import Peers, StatePolicy, UnitLayout
from zrun_core.zero.exchange import Exchange

if TYPE_CHECKING:
    from zrun_core.zero.unit import FlatUnit


@dataclass(frozen=True)
class Server(Exchange):
    """The first of the copies updates everything. It is for stage 0: each copy is one rank."""

    def owned_range(self, unit: UnitLayout, peers: Peers) -> tuple[int, int]:
        is_served = unit.trainable and peers.copy_index > 0
        return (0, 0) if is_served else super().owned_range(unit, peers)

    def owned_replicated_over(self, unit: UnitLayout) -> tuple[str, ...]:
        return () if unit.trainable else super().owned_replicated_over(unit)

    def counted_parts(self, unit: UnitLayout, peers: Peers) -> range:
        return range(0 if peers.copy_index else unit.num_parts)

    def arrivals(self, unit: UnitLayout, peers: Peers) -> int:
        return 0 if peers.copy_index else (peers.copies - 1) * unit.padded_numel

    def goes_stale(self, peers: Peers) -> bool:
        return peers.copies > 1

    def gather(self, comm: Comm, unit: FlatUnit) -> Handle:
        return comm.pull(unit.full, unit.replicate, tag=gather_tag(unit.index), name=unit.name)

    def reduce(
        self,
        comm: Comm,
        unit: FlatUnit,
        whole: torch.Tensor,
        arrivals: torch.Tensor,
        into: torch.Tensor,
        *,
        accumulate: bool,
        boundary: bool,
    ) -> Handle:
        """Begin to sum the gradients on the server, in `whole`, of which `into` is a part."""
        assert boundary
        assert not accumulate
        tag = reduce_tag(unit.index)
        return comm.push(whole, arrivals, unit.replicate, tag=tag, name=unit.name)

    def sent(
        self,
        unit: UnitLayout,
        states: StatePolicy,
        peers: Peers,
        *,
        gathers: int,
        reductions: int,
        sums: int,
    ) -> dict[str, int]:
        if not unit.trainable:
            return {}
        if peers.copy_index:
            return {"push": sums * unit.padded_numel * states.reduce_dtype.itemsize}
        others = peers.copies - 1
        return {"pull": gathers * others * unit.padded_numel * unit.dtype.itemsize}
