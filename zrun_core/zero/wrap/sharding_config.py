"""Settings of a sharded model, its units by them, and the bytes that a rank needs.

Whether a rank has room for a model is asked here, from the structure alone, before anything of it
is allocated.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.errors import PreflightError
from zrun_core.memory.buffers import ON_DEVICE, Buffer, Kind, Placement, Tier
from zrun_core.memory.layout import NO_PARTS, UnitLayout
from zrun_core.memory.placement import place
from zrun_core.memory.room import Room
from zrun_core.memory.state_policy import RankPlaces, StatePolicy, ZeroPolicy
from zrun_core.memory.tensors import TensorPart
from zrun_core.optim.resolve import OptimizerSpec
from zrun_core.sizes import format_size
from zrun_core.spine.sections.zero import TileConfig
from zrun_core.zero.unit.exchange import Exchange
from zrun_core.zero.unit.places import places_of
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.unit.unit_params import moves_pages
from zrun_core.zero.wrap.auto_wrap import NO_CHUNKS, NO_GROUPS, WrapPlan, auto_wrap
from zrun_core.zero.wrap.tiling import tensors_of_tiles, tile_linears

# Of what a rank keeps from step to step.
_OWN_KINDS = (Kind.PARAM, Kind.GRAD, Kind.OPTIM, Kind.RING, Kind.BUFFER)


@dataclass(frozen=True)
class ShardingConfig:
    """Settings of sharding and of the update.

    Attributes:
        zero: the stage's policy.
        precision: formats of parameters and gradients.
        optimizer: None where `ShardedModel.set_optimizer` gives it later.
        bucket: bytes of parameters that a unit should not exceed.
        clip: largest norm of the gradient; None: any.
        no_decay: regexes; parameters whose name contains a match have no weight decay.
        unit_names: regexes; modules that become units of their own.
        leaf_names: regexes; modules that are gathered and reduced as a whole.
        persist_below: parameters of fewer bytes are never resharded.
        prefetch: units that are gathered ahead of their use.
        whole_blocks: never hook inside a repeated block, because it is compiled.
        recomputes_blocks: activation checkpointing.
        layer_major: micro-batches go through the model slice by slice: see `sliced_passes.py`.
        exchange: the collectives of a unit.
        memory_bytes: that a rank may have on its device; None: it finds out.
        tile: linears that are tiled before the model is sharded.
        room: that the ranks of this host have beside their devices.
        placement: where states live between uses.
        disk_folder: where the file of states on disk is made.
        schedule: of updates that run beside training: "overlap", "serial" or "delayed".
        delay_after: steps of "delayed" before the first that is.
        versions: of trained parameters, as of `StatePolicy`.
    """

    zero: ZeroPolicy
    precision: Precision
    optimizer: OptimizerSpec | None
    bucket: int
    clip: float | None = None
    no_decay: Sequence[str] = ()
    unit_names: Sequence[str] = ()
    leaf_names: Sequence[str] = ()
    persist_below: int = 0
    prefetch: int = 1
    whole_blocks: bool = False
    recomputes_blocks: bool = False
    layer_major: bool = False
    exchange: Exchange = field(default_factory=Exchange)
    memory_bytes: int | None = None
    tile: TileConfig | None = None
    room: Room = field(default_factory=Room)
    placement: Placement = ON_DEVICE
    disk_folder: str | None = None
    schedule: Literal["overlap", "serial", "delayed"] = "overlap"
    delay_after: int = 40
    versions: int = 1

    @property
    def states(self) -> StatePolicy:
        """The rule for the bytes of a unit.

        Without an optimizer there are no moments; where it will be elsewhere, room for two.
        """
        states = StatePolicy(
            self.zero,
            self.precision.reduce,
            0 if self.placement.optimizer is Tier.DEVICE else 2,
            ownership=self.exchange,
            recomputes_blocks=self.recomputes_blocks,
            layer_major=self.layer_major,
            versions=self.versions,
        )
        if self.optimizer is None:
            return states
        return replace(
            states,
            moments=self.optimizer.moments,
            moment_dtype=self.optimizer.moment_dtype,
            updates_together=self.optimizer.layer_wise,
        )

    def group_of(self, name: str) -> int:
        """Return the optimizer group of a parameter: 1 is without weight decay, 0 has it."""
        is_exempt = any(re.search(pattern, name) for pattern in self.no_decay)
        return 1 if is_exempt else 0


@dataclass
class MemoryAccount:
    """Bytes of one rank.

    Attributes:
        by_kind: on its device.
        elsewhere: by tier and kind.
    """

    by_kind: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(_OWN_KINDS, 0))
    elsewhere: Counter[tuple[Tier, Kind]] = field(default_factory=Counter)

    def add(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            if buffer.tier is Tier.DEVICE:
                self.by_kind[buffer.kind] += buffer.num_bytes
            else:
                self.elsewhere[buffer.tier, buffer.kind] += buffer.num_bytes


def wrap_plan(
    model: nn.Module,
    settings: ShardingConfig,
    places: RankPlaces,
    table: Mapping[str, TensorPart] = NO_PARTS,
    chunk_of: Mapping[str, int] = NO_CHUNKS,
    groups_of: Mapping[str, str] = NO_GROUPS,
) -> WrapPlan:
    """Return the units of `model` as `ShardedModel` makes them, and the modules that need them.

    Args:
        model: on any device, also meta.
        table: by parameter name, its part in a tensor of the whole model; absent: all of one, or
            that of a tile.
        chunk_of, groups_of: as of `auto_wrap`.

    Raises:
        ValueError: `groups_of` has groups that the rank has not, or a parameter that `model` has
            not.
    """
    zero = settings.zero
    _check_groups(model, groups_of, places)
    planned = auto_wrap(
        model,
        dtype=settings.precision.compute,
        num_shards=places.usual.shard_size,
        num_parts=zero.num_parts(places.usual),
        bucket=settings.bucket,
        unit_names=settings.unit_names,
        leaf_names=settings.leaf_names,
        persist_below=settings.persist_below,
        whole_blocks=settings.whole_blocks,
        group_of=settings.group_of,
        table={**tensors_of_tiles(model), **table},
        chunk_of=chunk_of,
        groups_of=groups_of,
    )
    for unit in planned.units:
        if unit.layout.groups:
            own = places.of(unit.layout)
            num_parts = zero.num_parts(own)
            unit.layout = replace(unit.layout, num_shards=own.shard_size, num_parts=num_parts)
    return planned


def _check_groups(model: nn.Module, groups_of: Mapping[str, str], places: RankPlaces) -> None:
    """Check which parameters lie on groups of their own.

    Raises:
        ValueError: a parameter is not of the model, or the rank is in no such groups.
    """
    if unknown := sorted(groups_of.keys() - dict(model.named_parameters()).keys()):
        raise ValueError(f"{unknown[0]} is to lie on {groups_of[unknown[0]]}, and is no parameter")
    for name, groups in groups_of.items():
        if groups not in places.own:
            raise ValueError(f"{name} is to lie on {groups}: call mesh.divide({groups!r}, ...)")


def check_model_fits(model: nn.Module, settings: ShardingConfig, mesh: Mesh, comm: Comm) -> None:
    """Refuse a model whose states this rank cannot hold, from its structure.

    Args:
        model: the user's module, which may be on the meta device, not tiled yet.
        settings: as of `ShardedModel`.

    Raises:
        PreflightError: this rank has no room for the states.
        JobError: the model cannot be tiled as the settings say.
    """
    tiling = tile_linears(model, settings.tile, settings.precision.compute, settings.leaf_names)
    planned = wrap_plan(model, settings, places_of(comm, mesh))
    tiling.undo()
    check_states_fit([unit.layout for unit in planned.units], settings, mesh, comm)


def check_states_fit(
    layouts: Sequence[UnitLayout], settings: ShardingConfig, mesh: Mesh, comm: Comm
) -> None:
    """Refuse a model whose states this rank cannot hold, before anything of it is allocated.

    Raises:
        PreflightError: the states alone take more than a rank has.
    """
    buffers = planned_buffers(layouts, settings, places_of(comm, mesh), comm.device)
    settings.room.check(buffers)
    has = settings.memory_bytes
    if has is None:
        return
    here = [Tier.DEVICE]
    if comm.device.type == "cpu":
        here.append(Tier.HOST)
    if (needed := sum(each.num_bytes for each in buffers if each.tier in here)) > has:
        room = format_size(has) if has > 0 else "nothing left beside Python and torch"
        raise PreflightError(
            f"the model's states take {format_size(needed)} on this rank, which has {room}: "
            "zrun estimate says what would fit"
        )


def planned_buffers(
    layouts: Sequence[UnitLayout],
    settings: ShardingConfig,
    places: RankPlaces,
    device: torch.device,
    *,
    is_apart: bool = False,
) -> list[Buffer]:
    """Return all that a rank allocates for its units, on every tier.

    Args:
        is_apart: the host tier is apart from a CPU: see `Tiers`.
    """
    return settings.states.rank_buffers(
        layouts,
        places,
        prefetch=settings.prefetch,
        moves_pages=moves_pages(device.type),
        placements=place(layouts, settings.placement),
        host_is_device=device.type == "cpu" and not is_apart,
    )
