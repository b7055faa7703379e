"""The bytes that the states of flat units take on a rank. Pure arithmetic.

`StatePolicy.rank_buffers` is what the runtime allocates, what the planner sums, and what the report
at the end of a run compares. The unit of the example in `layout.py`, with Adam on 2 ranks, takes on
rank 0, in bytes:

    stage               0           1           2           3
    param           24576       24576       24576       12288       6144 elements, or its shard
    grad            24576       24576       12288       12288
    moments     2 * 16640   2 * 12288   2 * 12288   2 * 12288       4160 elements without padding
    gather ring         0           0           0       12288       the shard of rank 1
    reduce ring     24576       24576       73728       73728       2 and 3: see `reduce_ring_bytes`
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from zrun_core.memory.buffers import ON_DEVICE, Buffer, Kind, Placement, Tier
from zrun_core.memory.layout import PAGE_BYTES, UnitLayout, whole_pages
from zrun_core.memory.tensors import TENSOR, TIED

STAGING_SLOTS = 2  # one is filled while the other is on its way up to the device, or down from it
DISK_SLOTS = 3  # of host memory: one is read into, one is updated, one is written from
_FP32_BYTES = 4

ALL_ON_DEVICE: Mapping[str, Placement] = {}  # by unit name: no unit has a state elsewhere


@dataclass(frozen=True)
class ZeroPolicy:
    """The decisions of a ZeRO stage (Rajbhandari et al. 2020, section 5).

    Two questions tell the stages apart, and they are asked of this object only: reduce now? free
    after use? The third, whether the states are divided at all, is answered by the shard group,
    which is a single rank at stage 0.
    """

    stage: int

    @property
    def divides(self) -> bool:
        """Return whether the shard group may have more than one rank."""
        return self.stage > 0

    def reduce_now(self, boundary: bool) -> bool:
        """Return whether a unit's gradient is reduced after this micro-batch.

        If not, it stays unsharded until the last one.

        Args:
            boundary: it is the last one of the step.
        """
        return boundary or self.stage >= 2

    @property
    def reshard_after_use(self) -> bool:
        """Return whether a unit is resharded once its forward or backward is over."""
        return self.stage >= 3

    def num_parts(self, mesh_info: MeshInfo) -> int:
        """Return the number of equal parts that units are padded to, and that norms are taken over.

        Where nothing is divided they are those of a division over all ranks: so stages agree in the
        bits of their norms.
        """
        if self.divides:
            return mesh_info.shard_size
        return mesh_info.shard_size * mesh_info.num_replicas


@dataclass(frozen=True)
class MeshInfo:
    """A data-parallel rank's place in the groups of a unit.

    Attributes:
        shard_size: ranks that divide the states between them.
        shard_index: this rank's place among them.
        num_replicas: groups like that, with equal shards.
        replica_index: which of them is this rank's.
        direct_up_to: up to so many ranks exchange pairwise, so that the parts of all peers arrive
            apart; more, or ranks whose backend sums on the way, get one part.
        tied_size: stages of a pipeline that have the same parameters, this one among them.
        tied_index: this one's place among them.
        tensor_size: ranks that have parts of the same layers.
    """

    shard_size: int = 1
    shard_index: int = 0
    num_replicas: int = 1
    replica_index: int = 0
    direct_up_to: int = 0
    tied_size: int = 1
    tensor_size: int = 1
    tied_index: int = 0

    def num_recv_parts(self, size: int) -> int:
        """Return the number of parts that arrive where `size` ranks sum something."""
        if size == 1:
            return 0
        if size <= self.direct_up_to:
            return size - 1
        return 1


@dataclass(frozen=True)
class RankPlaces:
    """A rank's place in the groups of each unit.

    Attributes:
        usual: in those of most units.
        own: by name of groups, in those that only some units have: see `UnitLayout.groups`.
    """

    usual: MeshInfo = MeshInfo()
    own: Mapping[str, MeshInfo] = field(default_factory=dict)

    def of(self, unit: UnitLayout) -> MeshInfo:
        """Return the rank's place in the groups of `unit`."""
        return self.own[unit.groups] if unit.groups else self.usual


@dataclass(frozen=True)
class Ownership:
    """The elements of a unit that each data-parallel rank updates: those of its shard.

    So do the ranks of the other replicas, with the same result.
    """

    def updated_range(self, unit: UnitLayout, mesh_info: MeshInfo) -> tuple[int, int]:
        """Return the elements that this rank updates."""
        return unit.shard_range(mesh_info.shard_index)

    def updated_replicated_over(self, unit: UnitLayout) -> tuple[str, ...]:
        """Return the data-parallel axes of the mesh along which ranks keep the same elements."""
        return ("replicate",)

    def counted_parts(self, unit: UnitLayout, mesh_info: MeshInfo) -> range:
        """Return the parts that this rank counts in norms: each part is counted by one rank.

        They are the same parts at every stage, so that sums have the same bits.
        """
        parts = unit.parts_of_shard(mesh_info.shard_index)
        return parts[mesh_info.replica_index :: mesh_info.num_replicas]

    def recv_numel(self, unit: UnitLayout, mesh_info: MeshInfo) -> int:
        """Return the elements of scratch that a reduction needs for what arrives.

        What comes from the replicas, or from other stages that have the unit, takes the place of
        what came from the shard group.
        """
        of_shards = unit.shard_numel * mesh_info.num_recv_parts(mesh_info.shard_size)
        summed_over = [mesh_info.num_replicas]
        if TIED in unit.summed_over:
            summed_over.append(mesh_info.tied_size)
        if TENSOR in unit.summed_over:
            summed_over.append(mesh_info.tensor_size)
        of_sums = [
            math.ceil(unit.shard_numel / size) * mesh_info.num_recv_parts(size)
            for size in summed_over
        ]
        return max(of_shards, *of_sums)

    def held_numel(self, unit: UnitLayout, mesh_info: MeshInfo) -> int:
        """Return the elements of other ranks' gradients that wait here, apart from reductions."""
        return 0

    def num_versions(self, mesh_info: MeshInfo) -> int:
        """Return the versions of trained parameters that passes and updates of a rank need."""
        return 1

    def goes_stale(self, mesh_info: MeshInfo) -> bool:
        """Return whether other ranks update what this one uses."""
        return mesh_info.shard_size > 1


@dataclass(frozen=True)
class SlotSizes:
    """Bytes of the pieces of host memory in which states elsewhere pass. 0: there are none.

    Attributes:
        down: of one for a gradient on its way from the device; there are `STAGING_SLOTS`.
        up: of one for updated parameters on their way to it; as many.
        disk: by kind, of one for a state on disk; there are `DISK_SLOTS`.
    """

    down: int = 0
    up: int = 0
    disk: Mapping[Kind, int] = field(default_factory=dict)

    def buffers(self) -> list[Buffer]:
        """Return all of them, those of one purpose as one buffer."""
        sizes = {
            "gradient staging": STAGING_SLOTS * self.down,
            "parameter staging": STAGING_SLOTS * self.up,
            **{f"disk slots of {k.value}": DISK_SLOTS * size for k, size in self.disk.items()},
        }
        return [
            Buffer(name, Kind.RING, size, Tier.HOST, pinned=True)
            for name, size in sizes.items()
            if size
        ]


@dataclass(frozen=True)
class StatePolicy:
    """Everything that decides how many bytes the states of a unit take on one rank.

    Attributes:
        moments: values that the optimizer keeps per parameter: 2 for Adam.
        updates_together: all units propose an update before the first is applied: layer-wise
            optimizers.
        recomputes_blocks: backward runs a repeated block again first, so its units are in use
            together.
        layer_major: all micro-batches of a step go through a slice of the model before the next one
            comes, so the units of a slice are unsharded together, once for all of them.
        versions: of trained parameters that a stage of PipeDream holds; else there is one.
    """

    zero: ZeroPolicy
    reduce_dtype: torch.dtype
    moments: int
    moment_dtype: torch.dtype = torch.float32
    updates_together: bool = False
    ownership: Ownership = Ownership()
    recomputes_blocks: bool = False
    layer_major: bool = False
    versions: int = 1

    def num_versions(self, mesh_info: MeshInfo) -> int:
        """Return the versions of trained parameters that a rank holds."""
        return max(self.versions, self.ownership.num_versions(mesh_info))

    def has_master(self, unit: UnitLayout, placement: Placement = ON_DEVICE) -> bool:
        """Return whether the optimizer works on a copy of the parameters.

        fp32 parameters are their own master, where they are on its tier.
        """
        if not unit.trainable:
            return False
        return unit.dtype != torch.float32 or placement.param is not placement.optimizer

    def reshard_after_use(self, unit: UnitLayout) -> bool:
        """Return whether only a shard of the unit's parameters stays in memory between uses."""
        return self.zero.reshard_after_use and not unit.keep_unsharded

    def rank_buffers(
        self,
        units: Sequence[UnitLayout],
        places: RankPlaces,
        *,
        prefetch: int,
        moves_pages: bool,
        placements: Mapping[str, Placement] = ALL_ON_DEVICE,
        host_is_device: bool = False,
    ) -> list[Buffer]:
        """Return all that a rank allocates for `units` before the first step, and their moments.

        Moments are allocated by the first step. The rest is allocated once.

        Args:
            prefetch: units gathered ahead of their use.
            moves_pages: a unit is unsharded by moving pages into it: see `arena.PageWindow`.
            placements: by unit name, of units whose states are not all on the device.
            host_is_device: the device computes in the host's memory.
        """
        by_unit = [
            self.buffers(unit, places.of(unit), placements.get(unit.name, ON_DEVICE))
            for unit in units
        ]
        gather_bytes = self.gather_ring_bytes(
            units, prefetch, moves_pages=moves_pages, placements=placements
        )
        reduce_bytes = self.reduce_ring_bytes(units, places, placements=placements)
        return [
            *(buffer for buffers in by_unit for buffer in buffers),
            Buffer("gather ring", Kind.RING, gather_bytes),
            Buffer("reduce ring", Kind.RING, reduce_bytes),
            *self.slot_sizes(units, places, placements, host_is_device=host_is_device).buffers(),
        ]

    def buffers(
        self,
        unit: UnitLayout,
        mesh_info: MeshInfo,
        placement: Placement = ON_DEVICE,
    ) -> list[Buffer]:
        """Return the permanent buffers of `unit` on one rank: parameters, gradients, optimizer.

        On the host, what the device copies from or to is pinned; the optimizer's states are not,
        because the update runs where they are. On disk each begins on a page.
        """
        found = self._states(unit, mesh_info, placement)
        if placement is ON_DEVICE:
            return found
        return [_on_tier(buffer, placement.tier_of(buffer.kind)) for buffer in found]

    def _states(self, unit: UnitLayout, mesh_info: MeshInfo, placement: Placement) -> list[Buffer]:
        is_resharded = self.reshard_after_use(unit)
        param_numel = unit.shard_numel if is_resharded else unit.padded_numel
        param_bytes = param_numel * unit.dtype.itemsize
        found = [Buffer(f"{unit.name}/param", Kind.PARAM, param_bytes)]
        if not unit.trainable:
            return found
        found += [
            Buffer(f"{unit.name}/version{number}", Kind.PARAM, param_bytes)
            for number in range(1, self.num_versions(mesh_info))
        ]
        keeps_shard = self.zero.reduce_now(boundary=False)
        grad_numel = unit.shard_numel if keeps_shard else unit.padded_numel
        grad_bytes = whole_pages(grad_numel * self.reduce_dtype.itemsize)
        found.append(Buffer(f"{unit.name}/grad", Kind.GRAD, grad_bytes))
        start, stop = self.ownership.updated_range(unit, mesh_info)
        if self.has_master(unit, placement):
            master_bytes = _FP32_BYTES * (stop - start)
            found.append(Buffer(f"{unit.name}/master", Kind.OPTIM, master_bytes))
        # Padding has no moments.
        moment_numel = sum(piece.stop - piece.start for piece in unit.pieces(start, stop))
        moment_bytes = moment_numel * self.moment_dtype.itemsize
        found += [
            Buffer(f"{unit.name}/moment{number}", Kind.OPTIM, moment_bytes)
            for number in range(self.moments)
        ]
        return found

    def gather_ring_bytes(
        self,
        units: Sequence[UnitLayout],
        prefetch: int,
        *,
        moves_pages: bool = True,
        placements: Mapping[str, Placement] = ALL_ON_DEVICE,
    ) -> int:
        """Return the room for units that are unsharded at a time.

        These are the ones in use, `prefetch` more, one that comes from its home on another tier,
        and all that are kept until their pass ends.
        Where pages are moved into a unit it takes those of the other ranks' shards only; elsewhere
        its own shard is a copy, and there must be room for all of it, as there must be where its
        home is on another tier.

        Args:
            prefetch: units gathered ahead of their use.
            moves_pages: as of `rank_buffers`.
            placements: as of `rank_buffers`.
        """
        passing: list[tuple[UnitLayout, int]] = []
        kept_bytes = 0
        for unit in units:
            room = self._gather_numel(unit, placements, moves_pages) * unit.dtype.itemsize
            if not room:
                continue
            if unit.keep_until_pass_ends:
                kept_bytes += room
            else:
                passing.append((unit, room))
        sizes = [size for _, size in passing]
        is_away = [placements.get(u.name, ON_DEVICE).param is not Tier.DEVICE for u, _ in passing]
        ahead = prefetch
        if any(is_away):  # what is gathered next is on its way from its home
            ahead += 1
        prefetched_bytes = ahead * max(sizes, default=0)
        # The backward of a tile may have begun when its block is recomputed, tile after tile.
        num_tiles = 2 if self.recomputes_blocks else 1
        together_bytes = self._most_together(passing, num_tiles)
        if self.layer_major:
            together_bytes = self._most_of_a_slice(passing)
        passing_bytes = min(together_bytes + prefetched_bytes, sum(sizes))
        return passing_bytes + kept_bytes

    def _gather_numel(
        self, unit: UnitLayout, placements: Mapping[str, Placement], moves_pages: bool
    ) -> int:
        """Return the elements of the ring that a unit takes while it is unsharded."""
        if placements.get(unit.name, ON_DEVICE).param is not Tier.DEVICE:
            return unit.padded_numel
        if not self.reshard_after_use(unit) or unit.num_shards == 1:
            return 0
        if moves_pages:
            return unit.padded_numel - unit.shard_numel
        return unit.padded_numel

    def reduce_ring_bytes(
        self,
        units: Sequence[UnitLayout],
        places: RankPlaces,
        *,
        placements: Mapping[str, Placement] = ALL_ON_DEVICE,
    ) -> int:
        """Return the room for reductions: of what is being filled, and of one unit on its way.

        Each takes what leaves and what arrives. What leaves is the unit's unsharded gradient, which
        lives here only if gradients are sharded, or have their home on another tier. Units that are
        kept unsharded fill up while others come and go. Once all reductions are over, units that
        are updated together cast their gradients to fp32 in the same room.

        In the example of `layout.py` at stages 2 and 3, 6144 elements leave and 3072 arrive: twice
        9216 * 4 = 73728 bytes, for the unit that is filled and the one on its way.

        Args:
            placements: as of `rank_buffers`.
        """
        passing: list[tuple[UnitLayout, int]] = []
        kept_numel = 0
        alone_numel = 0
        held_numel = 0
        cast_bytes = 0
        for unit in units:
            if not unit.trainable:
                continue
            mesh_info = places.of(unit)
            held_numel += self.ownership.held_numel(unit, mesh_info)
            placement = placements.get(unit.name, ON_DEVICE)
            is_away = placement.grad is not Tier.DEVICE
            leaves_from_ring = is_away or self.zero.reduce_now(boundary=False)
            leaving_numel = unit.padded_numel if leaves_from_ring else 0
            arriving_numel = self.ownership.recv_numel(unit, mesh_info)
            if is_away:  # what leaves for a disk begins on a page, and so does what is beside it
                per_page = PAGE_BYTES // self.reduce_dtype.itemsize
                arriving_numel = math.ceil(arriving_numel / per_page) * per_page
            is_cast = self.updates_together and self.reduce_dtype != torch.float32
            if is_cast and placement.optimizer is Tier.DEVICE:
                start, stop = self.ownership.updated_range(unit, mesh_info)
                cast_bytes += _FP32_BYTES * (stop - start)
            if unit.num_parts == 1 and not is_away:
                # Replicas of what no ranks divide: one unit at a time.
                alone_numel = max(alone_numel, arriving_numel)
                continue
            passing.append((unit, leaving_numel + arriving_numel))
            if unit.keep_until_pass_ends or unit.keep_unsharded:
                kept_numel += leaving_numel
        on_its_way = max((numel for _, numel in passing), default=0)
        if any(unit.groups for unit in units):  # those that no ranks divide come among the others
            on_its_way = max(on_its_way, alone_numel)
        passing_numel = self._most_together(passing, num_tiles=1) + on_its_way + kept_numel
        reduce_numel = max(passing_numel, alone_numel) + held_numel
        reduce_bytes = reduce_numel * self.reduce_dtype.itemsize
        return whole_pages(max(reduce_bytes, cast_bytes))

    def _most_together(self, sizes: Iterable[tuple[UnitLayout, int]], num_tiles: int) -> int:
        """Return the largest sum of sizes of units that are in use together."""
        sums: Counter[str] = Counter()
        tiles: Counter[tuple[str, str]] = Counter()  # by what is in use around them, and by name
        for unit, size in sizes:
            is_recomputed = self.recomputes_blocks and unit.block
            if unit.tile:
                tiles[unit.block if is_recomputed else unit.around, unit.modules] += size
            else:
                sums[unit.block if is_recomputed else unit.modules] += size
        with_tiles = [sums[around] + num_tiles * size for (around, _), size in tiles.items()]
        return max([*sums.values(), *with_tiles], default=0)

    def _most_of_a_slice(self, sizes: Sequence[tuple[UnitLayout, int]]) -> int:
        """Return the largest sum of sizes of the units of a slice."""
        sums: Counter[str] = Counter()
        slices = slices_of([unit for unit, _ in sizes])
        for name, (_, size) in zip(slices, sizes, strict=True):
            sums[name] += size
        return max(sums.values(), default=0)

    def slot_sizes(
        self,
        units: Sequence[UnitLayout],
        places: RankPlaces,
        placements: Mapping[str, Placement],
        *,
        host_is_device: bool,
    ) -> SlotSizes:
        """Return the host memory that states elsewhere pass through.

        Gradients come down to an update on the host through some slots, and parameters go up from
        it through others. A unit's states of one kind pass to and from a disk at a time.

        Args:
            placements: as of `rank_buffers`.
            host_is_device: as of `rank_buffers`: nothing goes down or up.
        """
        down = 0
        up = 0
        disk: dict[Kind, int] = {}
        for unit in units:
            placement = placements.get(unit.name, ON_DEVICE)
            sizes = Counter[Kind]()
            for buffer in self.buffers(unit, places.of(unit), placement):
                if buffer.tier is Tier.DISK:
                    sizes[buffer.kind] += buffer.num_bytes
                if buffer.kind is Kind.GRAD and placement.optimizer is not Tier.DEVICE:
                    down = max(down, buffer.num_bytes)
            for kind, size in sizes.items():
                disk[kind] = max(disk.get(kind, 0), size)
            goes_up = placement.optimizer is not Tier.DEVICE and placement.param is Tier.DEVICE
            if goes_up and unit.trainable:
                start, stop = self.ownership.updated_range(unit, places.of(unit))
                up = max(up, whole_pages((stop - start) * unit.dtype.itemsize))
        if host_is_device:
            return SlotSizes(disk=disk)
        return SlotSizes(down, up, disk)


def slices_of(units: Iterable[UnitLayout]) -> list[str]:
    """Return the slice of the model that each unit is of, named by its block; "": the first.

    A slice is a repeated block and what follows it up to the next one.

    Args:
        units: in order of registration, which mostly is that of use.
    """
    found: list[str] = []
    block = ""
    for unit in units:
        block = unit.block or block
        found.append(block)
    return found


def _on_tier(buffer: Buffer, tier: Tier) -> Buffer:
    """Return `buffer` as it is on its home's tier."""
    if tier is Tier.DEVICE:
        return buffer
    if tier is Tier.HOST:
        return replace(buffer, tier=tier, pinned=buffer.kind is not Kind.OPTIM)
    return replace(buffer, tier=tier, num_bytes=whole_pages(buffer.num_bytes))


def module_buffers(module: torch.nn.Module) -> list[Buffer]:
    """Return the buffers that `module` keeps of its own: each once, whatever names it has.

    It may be on any device.
    """
    return [Buffer(name, Kind.BUFFER, buffer.nbytes) for name, buffer in module.named_buffers()]
