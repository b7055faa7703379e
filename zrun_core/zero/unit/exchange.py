"""The collectives of a unit: gather its parameters, sum its gradient, and the bytes that both send.

    parameters   all-gather over the shard group
    gradient     reduce-scatter over the shard group; with the last micro-batch of a step an
                 all-reduce of the shards over the replicate group follows, in the same `Handle`

All stages do the same. At stage 0 the shard group is one rank, which leaves the all-reduce; with
one replica the reduce-scatter is left. `server.py` has the other way to exchange them.

Elements moved per optimizer step, for P trainable parameters, K micro-batches and N ranks,
times (N-1)/N:

    stage   all-gather   reduce-scatter   all-reduce
    0                                     P (2P sent)
    1       P            P
    2       P            K P
    3       2K P         K P

In layer-major order stage 3 gathers 2 P, whatever K is, and its last slice once.

Frozen parameters are gathered at stage 3 alone: once per micro-batch for forward, and once more
for backward where a gradient flows through their unit, or a block with them is recomputed. The
bytes are exact because units are padded to equal shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zrun_core.distributed.collectives import slice_start
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.handle import Handle
from zrun_core.distributed.transport import Group, gather_tag, reduce_tag
from zrun_core.memory.layout import UnitLayout
from zrun_core.memory.state_policy import MeshInfo, Ownership, RankPlaces, StatePolicy, slices_of
from zrun_core.memory.tensors import TIED

if TYPE_CHECKING:
    from zrun_core.distributed.mesh import Mesh
    from zrun_core.zero.unit.flat_unit import FlatUnit

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "push", "pull")


@dataclass(frozen=True)
class Exchange(Ownership):
    """Collectives over the shard group and the replicate group."""

    def all_gather(self, comm: Comm, unit: FlatUnit) -> Handle:
        """Begin to gather the parameters of `unit` into `unit.param.full`."""
        tag = gather_tag(unit.index)
        return comm.all_gather(
            unit.param.full, unit.param.shard, unit.shard, tag=tag, name=unit.name
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
        """Begin to sum this rank's gradient of `unit` with those of the other ranks.

            unsharded_grad [padded_numel]
                 |  reduce-scatter over unit.shard
                 v
            into [shard_numel]     with `boundary`: all-reduce over unit.replicate, in place

        Both collectives have one tag: they are between different pairs of ranks.

        Args:
            unsharded_grad: [padded_numel] in reduce dtype; undefined afterwards.
            recv_buffer: [recv_numel] scratch of the same dtype.
            into: [updated range] where the sum goes; may be a part of `unsharded_grad`.
            accumulate: add the sum to the values of `into`, from earlier micro-batches.
            boundary: the step's gradient is complete with this one.
        """
        tag = reduce_tag(unit.index)
        scattered = comm.reduce_scatter(
            unsharded_grad,
            recv_buffer,
            into,
            unit.shard,
            accumulate=accumulate,
            tag=tag,
            name=unit.name,
        )
        if not boundary or unit.replicate.size == 1:
            return scattered

        def all_reduce() -> Handle:
            return self.all_reduce_replicas(comm, unit, recv_buffer, into)

        return scattered.then(all_reduce, unit.replicate)

    def ordered_among(self, mesh: Mesh) -> Group:
        """Return the ranks that issue the reductions of a backward in one order."""
        return mesh.data

    def num_sums(self, counts: StepCounts, mesh_info: MeshInfo) -> int:
        """Return how often a unit's gradient is summed over the replicas, by `counts`."""
        return counts.steps

    def all_reduce_replicas(
        self,
        comm: Comm,
        unit: FlatUnit,
        recv_buffer: torch.Tensor,
        into: torch.Tensor,
    ) -> Handle:
        """Begin to sum the shards `into` [updated range] of all replicas, in place.

        Args:
            recv_buffer: [recv_numel] scratch of the same dtype.
        """
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
            reductions: number of reduce-scatters; 0 for a frozen unit.
            sums: number of all-reduces over the replicas; 0 for a frozen unit.
        """
        other_shards = mesh_info.shard_size - 1
        shard_numel = unit.shard_numel
        grad_itemsize = states.reduce_dtype.itemsize
        replicas = mesh_info.num_replicas, mesh_info.replica_index
        return {
            "all_gather": gathers * other_shards * shard_numel * unit.dtype.itemsize,
            "reduce_scatter": reductions * other_shards * shard_numel * grad_itemsize,
            "all_reduce": sums * grad_itemsize * all_reduce_numel(shard_numel, *replicas),
        }


def all_reduce_numel(numel: int, ranks: int, index: int) -> int:
    """Return the elements that one of several ranks sends in an all-reduce.

    Each sums one slice: a rank sends the other slices to the ranks that sum them, and then its own
    slice to each of the others. Of 10 elements on 4 ranks the first has a slice of 3: it sends 7,
    then 3 to each of three, which is 10 + (4 - 2) * 3 = 16.

    Args:
        numel: elements that are summed.
        index: of the one that sends.
    """
    if ranks == 1:
        return 0
    start = slice_start(numel, ranks, index)
    stop = slice_start(numel, ranks, index + 1)
    return numel + (ranks - 2) * (stop - start)


def shared_sum_bytes(
    layouts: Sequence[UnitLayout],
    states: StatePolicy,
    places: RankPlaces,
    axis: str,
    place: tuple[int, int],
) -> int:
    """Return the bytes that a rank sends at a step's end to sum gradients: `Reducer.sum_shared`.

    Args:
        places: of the rank among data-parallel ones.
        axis: `TENSOR` or `TIED`: with the ranks along it, it sums what they have too.
        place: how many ranks these are, and which of them this one is.
    """
    total = 0
    for unit in layouts:
        if unit.trainable and axis in unit.summed_over:
            start, stop = states.ownership.updated_range(unit, places.of(unit))
            total += all_reduce_numel(stop - start, *place)
    return total * states.reduce_dtype.itemsize


@dataclass(frozen=True)
class StepCounts:
    """The facts of training steps that their traffic depends on.

    Attributes:
        steps: optimizer steps.
        micro_batches: total of all steps.
        refreshes: forward passes that found parameters stale: one for each update, and the first.
        pushes: gradients of this rank by which an asynchronous server has updated; else none.
    """

    steps: int
    micro_batches: int
    refreshes: int
    pushes: int = 0


def planned_gathers(layouts: Sequence[UnitLayout], states: StatePolicy) -> list[int]:
    """Return how often each unit that is resharded after use is gathered, per pass.

    Twice, for forward and for backward; tiles of blocks that are recomputed once more, which the
    last ones of a block may be spared. In layer-major order forward and backward are one pass,
    through which stays what several modules use; and the last slice goes from one to the other at
    once.

    Args:
        layouts: all units of the rank, in order of registration.
    """
    found = []
    if not states.layer_major:
        for unit in layouts:
            is_again = states.recomputes_blocks and unit.tile and unit.block
            found.append(3 if is_again else 2)
        return found
    slices = slices_of(layouts)
    for unit, name in zip(layouts, slices, strict=True):
        stays = name == slices[-1] or unit.keep_until_pass_ends
        found.append(1 if stays else 2)
    return found


def expected_traffic(
    layouts: Sequence[UnitLayout],
    states: StatePolicy,
    exchange: Exchange,
    counts: StepCounts,
    places: RankPlaces,
    *,
    gathers: Sequence[int] | None = None,
) -> dict[str, int]:
    """Return the bytes that a rank sends in training steps, by kind of collective.

    These are those of parameters and their gradients, also where several stages have them. The
    runtime is held to these numbers, and a plan states them beforehand. They hold for models whose
    modules each run once per forward.

    Args:
        gathers: by layout, how often a unit that is resharded after use is gathered per
            micro-batch, or per step in layer-major order; None: as `planned_gathers`.
    """
    passes = counts.steps if states.layer_major else counts.micro_batches
    expected = dict.fromkeys(KINDS, 0)
    reductions = counts.steps
    if states.zero.reduce_now(boundary=False):
        reductions = counts.micro_batches
    gathers_of = planned_gathers(layouts, states) if gathers is None else gathers
    for unit, gathers_per_pass in zip(layouts, gathers_of, strict=True):
        mesh_info = places.of(unit)
        num_gathers = 0
        if states.reshard_after_use(unit):
            num_gathers = gathers_per_pass * passes
        elif unit.trainable:
            num_gathers = counts.refreshes
        sent = exchange.sent_bytes(
            unit,
            states,
            mesh_info,
            gathers=num_gathers,
            reductions=reductions if unit.trainable else 0,
            sums=exchange.num_sums(counts, mesh_info) if unit.trainable else 0,
        )
        for kind, num_bytes in sent.items():
            expected[kind] += num_bytes
    tied = places.usual.tied_size, places.usual.tied_index
    of_step = shared_sum_bytes(layouts, states, places, TIED, tied)
    expected["all_reduce"] += counts.steps * of_step
    return {kind: num_bytes for kind, num_bytes in expected.items() if num_bytes}
