"""Every buffer that a rank keeps from step to step, from a model on the meta device and a job.

    settings = settings_of(job, load, "cuda")
    model = plan_model(module, settings)
    buffers = rank_buffers(model, settings, ParallelDims(dp=8))

The list is made by `StatePolicy.rank_buffers`, as the list that the runtime allocates is: what is
planned is what is allocated. A stage of a pipeline is what is left of the model without the
parameters of other stages, cut into units by the same `wrap_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from zrun_core.distributed.comm import direct_up_to
from zrun_core.memory.buffers import ON_DEVICE, Buffer, Kind, Placement, Tier
from zrun_core.memory.layout import NO_PARTS, UnitLayout, dense_stride
from zrun_core.memory.placement import place
from zrun_core.memory.state_policy import MeshInfo, RankPlaces, module_buffers
from zrun_core.memory.tensors import TIED, TensorPart, full_part
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.pipeline.ownership import chunks_of, owned, tied_stages
from zrun_core.pipeline.split import Split
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import Coordinates, ParallelDims
from zrun_core.train.parallelize import make_settings
from zrun_core.zero.unit.unit_params import is_read_in_place, moves_pages
from zrun_core.zero.wrap.auto_wrap import WrapPlan
from zrun_core.zero.wrap.foreign import only_params
from zrun_core.zero.wrap.sharding_config import ShardingConfig, wrap_plan

FIRST = Coordinates()  # the first of an axis has at least as many bytes as any other


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A model, or one tensor-parallel rank's part of it, which stages and shards are planned of.

    Attributes:
        tree: its modules, on the meta device.
        settings: how it is sharded.
        buffers: of its modules. Every stage of a pipeline has them.
        uses: by name of a parameter, the segments that use it; None: it has no pipeline.
        table: as of `ShardedModel`.
    """

    tree: nn.Module
    settings: ShardingConfig
    buffers: tuple[Buffer, ...]
    uses: Mapping[str, tuple[int, ...]] | None = None
    table: Mapping[str, TensorPart] = field(default_factory=dict)

    @property
    def num_params(self) -> int:
        """Elements of all parameters."""
        return sum(param.numel() for param in self.tree.parameters())

    @cached_property
    def _units(self) -> dict[tuple[Split, int] | None, tuple[UnitLayout, ...]]:
        return {}

    @cached_property
    def _layouts(self) -> dict[tuple[Any, ...], tuple[UnitLayout, ...]]:
        return {}

    def layouts(
        self,
        num_shards: int = 1,
        num_parts: int | None = None,
        split: Split | None = None,
        stage: int = 0,
    ) -> tuple[UnitLayout, ...]:
        """Return the units of a rank, divided over `num_shards` ranks.

        Args:
            num_parts: that units are padded to; None: as many as shards.
            split: into the stages of a pipeline; None: there is none.

        Raises:
            JobError: the model cannot be cut so.
        """
        parts = num_parts or num_shards
        key = (split, stage, num_shards, parts)
        if key not in self._layouts:
            units = self.units(split, stage)
            found = (replace(unit, num_shards=num_shards, num_parts=parts) for unit in units)
            self._layouts[key] = tuple(found)
        return self._layouts[key]

    def units(self, split: Split | None = None, stage: int = 0) -> tuple[UnitLayout, ...]:
        """Return the units of a stage as one rank alone has them.

        Args:
            split: into the stages of a pipeline; None: there is none.

        Raises:
            JobError: the model cannot be cut so.
        """
        key = None if split is None or split.pp == 1 else (split, stage)
        if key not in self._units:
            if key is None:
                plan = wrap_plan(self.tree, self.settings, RankPlaces(), self.table)
            else:
                plan = self._plan_of_stage(*key)
            self._units[key] = tuple(unit.layout for unit in plan.units)
        return self._units[key]

    def num_tied(self, split: Split | None, stage: int) -> int:
        """Return the number of stages that share tied parameters with a stage, with itself."""
        if split is None or split.pp == 1 or self.uses is None:
            return 1
        together = tied_stages(self._owners(split))
        return len(together) if stage in together else 1

    def _owners(self, split: Split) -> dict[str, tuple[int, ...]]:
        """Return the stages that have each parameter."""
        assert self.uses is not None
        if split not in self._owned:
            self._owned[split] = owned(self.uses, split)
        return self._owned[split]

    @cached_property
    def _owned(self) -> dict[Split, dict[str, tuple[int, ...]]]:
        return {}

    def _plan_of_stage(self, split: Split, stage: int) -> WrapPlan:
        """Return the units of what is left of the model where others' parameters are gone."""
        assert self.uses is not None
        owners = self._owners(split)
        here = {name: stages for name, stages in owners.items() if stage in stages}
        params = dict(self.tree.named_parameters())
        table = {name: part for name, part in self.table.items() if name in here}
        for name, stages in here.items():
            if len(stages) > 1:
                part = table.get(name) or full_part(
                    name, tuple(params[name].shape), dense_stride(params[name])
                )
                table[name] = replace(part, replicated_over=(*part.replicated_over, TIED))
        chunks = chunks_of(self.uses, split, owners, stage)
        with only_params(self.tree, here):
            return wrap_plan(self.tree, self.settings, RankPlaces(), table, chunks)


def settings_of(job: JobConfig, load: Callable[[str], Any], device: str) -> ShardingConfig:
    """Return how `job` wants its model sharded and updated.

    Args:
        load: resolves `module:attr` of an optimizer of the user's.
        device: type of what trains, "cpu" or "cuda".

    Raises:
        JobError: there is no such optimizer, or it cannot be sharded.
    """
    return make_settings(job, resolve_optimizer(job.optim, load), torch.device(device))


def plan_model(
    model: nn.Module,
    settings: ShardingConfig,
    buffer_bytes: int | None = None,
    table: Mapping[str, TensorPart] = NO_PARTS,
    uses: Mapping[str, tuple[int, ...]] | None = None,
) -> PlannedModel:
    """Divide `model`, on any device, into units as the runtime does.

    Args:
        buffer_bytes: of the modules' buffers, where `model` itself has none to look at.
        table: as of `ShardedModel`.
        uses: by name of a parameter, the segments that use it; None: it has no pipeline.

    Raises:
        JobError: the settings name modules that the model lacks.
    """
    buffers = module_buffers(model)
    if buffer_bytes is not None:
        buffers = [Buffer("buffers of modules", Kind.BUFFER, buffer_bytes)]
    planned = PlannedModel(model, settings, tuple(buffers), uses, table)
    planned.units()
    return planned


def mesh_info_of_rank(
    settings: ShardingConfig,
    dims: ParallelDims,
    rank: Coordinates,
    device: str,
    tied_size: int = 1,
) -> MeshInfo:
    """Return a rank's place among those that share its part of the model.

    Args:
        rank: its coordinates.
        device: type of what trains, "cpu" or "cuda".
        tied_size: stages that have the same parameters.
    """
    shard_size = dims.shard_size if settings.zero.divides else 1
    replicate = dims.dp // shard_size
    return MeshInfo(
        shard_size,
        rank.dp % shard_size,
        replicate,
        rank.dp // shard_size,
        direct_up_to(device),
        tied_size,
        dims.tp,
    )


def layouts_of_rank(
    model: PlannedModel,
    settings: ShardingConfig,
    rank: Coordinates,
    mesh_info: MeshInfo,
    split: Split | None = None,
) -> tuple[UnitLayout, ...]:
    """Return the units of a rank, divided as at run time.

    Args:
        rank: its coordinates.
        mesh_info: as `mesh_info_of_rank` returns it.
        split: into the stages of a pipeline; None: there is none.

    Raises:
        JobError: the model cannot be cut so.
    """
    num_parts = settings.zero.num_parts(mesh_info)
    return model.layouts(mesh_info.shard_size, num_parts, split, rank.pp)


def rank_buffers(
    model: PlannedModel,
    settings: ShardingConfig,
    dims: ParallelDims,
    *,
    rank: Coordinates = FIRST,
    placement: Placement = ON_DEVICE,
    device: str = "cuda",
    tied_size: int = 1,
    split: Split | None = None,
) -> list[Buffer]:
    """Return everything that a rank keeps from step to step.

    Args:
        rank: whose buffers. The first of each axis has the most; of a pipeline's stages, so may the
            last one.
        device: type of what trains, "cpu" or "cuda".
        tied_size: stages that have the same parameters, this one among them.
        split: into the stages of a pipeline; None: there is none.

    Raises:
        JobError: the model cannot be cut so.
    """
    mesh_info = mesh_info_of_rank(settings, dims, rank, device, tied_size)
    layouts = layouts_of_rank(model, settings, rank, mesh_info, split)
    away = place(layouts, placement)
    found = settings.states.rank_buffers(
        layouts,
        RankPlaces(mesh_info),
        prefetch=settings.prefetch,
        moves_pages=moves_pages(device),
        placements=away,
        host_is_device=is_read_in_place(device, placement),
    )
    scratch = _update_scratch(settings, layouts, away, device)
    everything = [*found, *model.buffers, *scratch]
    if device == "cpu":
        return [_where_host_is_device(buffer) for buffer in everything]
    return everything


def _where_host_is_device(buffer: Buffer) -> Buffer:
    """Return `buffer` as it is on a machine that computes in the host's memory."""
    if buffer.tier is not Tier.HOST:
        return buffer
    return replace(buffer, tier=Tier.DEVICE, pinned=False)


def _update_scratch(
    settings: ShardingConfig,
    layouts: Sequence[UnitLayout],
    away: Mapping[str, Placement],
    device: str,
) -> list[Buffer]:
    """Return what the optimizer keeps from its first update on, on each tier where it updates.

    `away` has the placements of those units whose states leave the device, by name. `device` is the
    type of what trains, "cpu" or "cuda".
    """
    optimizer = settings.optimizer
    if optimizer is None:
        return []
    is_on_host = [
        unit.name in away and away[unit.name].optimizer is not Tier.DEVICE
        for unit in layouts
        if unit.trainable
    ]
    sizes = {}
    if not all(is_on_host):
        sizes[Tier.DEVICE] = optimizer.scratch_bytes(device, settings.precision.reduce)
    if any(is_on_host):
        sizes[Tier.HOST] = optimizer.scratch_bytes("cpu", settings.precision.reduce)
    return [
        Buffer("optimizer scratch", Kind.TEMP, size, tier) for tier, size in sizes.items() if size
    ]
