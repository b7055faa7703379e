"""Every buffer that a rank keeps from step to step, from a model on the meta device and a job.

    settings = settings_of(job, load, "cuda")
    model = plan_model(module, settings)
    buffers = rank_buffers(model, settings, ParallelDims(dp=8))

The list is made by `StatePolicy.rank_buffers`, as the list that the runtime allocates is: what is
planned is what is allocated. Pipelines have no runtime yet; their buffers are the contract that it
will allocate from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from zrun_core.distributed.comm import direct_up_to
from zrun_core.memory.buffers import ON_DEVICE, Buffer, Kind, Placement, Tier
from zrun_core.memory.layout import NO_PARTS, UnitLayout
from zrun_core.memory.placement import place
from zrun_core.memory.state_policy import MeshInfo, module_buffers
from zrun_core.memory.tensors import TensorPart, contiguous_stride, full_part
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.pipeline.split import equal
from zrun_core.plan.question.transformer import TransformerShape
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import Coordinates, ParallelDims
from zrun_core.train.parallelize import make_settings
from zrun_core.zero.auto_wrap import repeated_blocks
from zrun_core.zero.sharding_config import ShardingConfig, wrap_plan
from zrun_core.zero.tiling import tile_linears
from zrun_core.zero.unit import moves_pages

# Bytes per parameter of Adam in mixed precision, K = 12: fp32 master and two moments (Rajbhandari
# et al. 2020, "ZeRO", section 3.1).
PAPER_PARAM_BYTES = PAPER_GRAD_BYTES = 2
PAPER_ADAM_BYTES = 12
FIRST = Coordinates()  # the first of an axis has at least as many bytes as any other


@dataclass(frozen=True)
class PlannedUnit:
    """A unit, and which parts of the model use it.

    Attributes:
        layout: of one rank alone, which has all of it.
        block: number of the repeated block that it lies in; -1 outside.
        before: used by modules that come before the first block. Tied embeddings are used at both
            ends.
        after: used by modules outside of blocks that come after the first block began.
    """

    layout: UnitLayout
    block: int = -1
    before: bool = False
    after: bool = False


@dataclass(frozen=True)
class PlannedModel:
    """The units of a model, or of one tensor-parallel rank's part of it, before they are sharded.

    Attributes:
        units: in the order of the model.
        blocks: names of the repeated blocks.
        buffers: of its modules.
    """

    units: tuple[PlannedUnit, ...]
    blocks: tuple[str, ...]
    buffers: tuple[Buffer, ...]

    @property
    def num_params(self) -> int:
        """Elements of all parameters."""
        return sum(unit.layout.numel for unit in self.units)

    @cached_property
    def _stages(self) -> dict[tuple[Any, ...], tuple[UnitLayout, ...]]:
        return {}

    def layouts(
        self,
        dims: ParallelDims,
        stage: int,
        num_shards: int,
        num_parts: int | None = None,
    ) -> tuple[UnitLayout, ...]:
        """Return the units of a pipeline stage, divided over `num_shards` ranks.

        Args:
            dims: of which the pipeline counts.
            stage: number of the pipeline stage.
            num_shards: ranks of a shard group.
            num_parts: that units are padded to; None: as many as shards.
        """
        parts = num_parts or num_shards
        key = (dims.pp, dims.virtual, stage, num_shards, parts)
        if key not in self._stages:
            units = self._units_of_stage(dims, stage)
            found = (replace(unit, num_shards=num_shards, num_parts=parts) for unit in units)
            self._stages[key] = tuple(found)
        return self._stages[key]

    def _units_of_stage(self, dims: ParallelDims, stage: int) -> list[UnitLayout]:
        if dims.pp == 1:
            return [unit.layout for unit in self.units]
        is_first = stage == 0
        is_last = stage == dims.pp - 1
        here = self._blocks_of_stage(dims, stage)
        foreign = self._prefixes_of_others(here)
        found = []
        for unit in self.units:
            if unit.layout.keep_unsharded:  # one unit of small parameters from all over the model
                found += _without(unit.layout, foreign)
            elif unit.block in here:
                found.append(unit.layout)
            elif unit.block < 0:
                is_used = (is_first and unit.before) or (is_last and unit.after)
                if is_used:
                    found.append(unit.layout)
        return found

    def module_buffers(self, dims: ParallelDims, stage: int) -> list[Buffer]:
        """Return the buffers of modules on a stage: in its blocks, and all outside of blocks."""
        foreign = self._prefixes_of_others(self._blocks_of_stage(dims, stage))
        return [buffer for buffer in self.buffers if not buffer.name.startswith(foreign)]

    def _blocks_of_stage(self, dims: ParallelDims, stage: int) -> set[int]:
        split = equal(len(self.blocks), dims.pp, dims.virtual)
        return {block for each in split.stage_blocks(stage) for block in each}

    def _prefixes_of_others(self, here: set[int]) -> tuple[str, ...]:
        """Return how names in blocks of other stages begin."""
        return tuple(f"{name}." for number, name in enumerate(self.blocks) if number not in here)


def _without(unit: UnitLayout, prefixes: tuple[str, ...]) -> list[UnitLayout]:
    """Return `unit` without the parameters whose names begin so; nothing if none is left."""
    slots = []
    offset = 0
    for slot in unit.slots:
        if not slot.name.startswith(prefixes):
            slots.append(replace(slot, offset=offset))
            offset += slot.numel
    if not slots:
        return []
    return [replace(unit, slots=tuple(slots))]


def settings_of(job: JobConfig, load: Callable[[str], Any], device: str) -> ShardingConfig:
    """Return how `job` wants its model sharded and updated.

    Args:
        job: that is planned.
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
) -> PlannedModel:
    """Divide `model`, on any device, into units as the runtime does.

    Args:
        model: to plan.
        settings: how it is sharded.
        buffer_bytes: of the modules' buffers, where `model` itself has none to look at.
        table: as of `ShardedModel`.

    Raises:
        JobError: the settings name modules that the model lacks.
    """
    wrapped = wrap_plan(model, settings, MeshInfo(), table)
    blocks = dict(repeated_blocks(model))
    numbers = {name: number for number, name in enumerate(blocks)}
    inside = {id(inner) for block in blocks.values() for inner in block.modules()}
    before: set[int] = set()
    after: set[int] = set()
    outside = before  # of the two, that of the modules outside of blocks that come now
    for module, needed, _ in wrapped.hooked:
        if id(module) in inside:
            outside = after
        else:
            outside.update(needed)
    units = tuple(
        PlannedUnit(
            unit.layout, numbers.get(unit.layout.block, -1), number in before, number in after
        )
        for number, unit in enumerate(wrapped.units)
    )
    buffers = module_buffers(model)
    if buffer_bytes is not None:
        buffers = [Buffer("buffers of modules", Kind.BUFFER, buffer_bytes)]
    return PlannedModel(units, tuple(blocks), tuple(buffers))


def plan_shape(shape: TransformerShape, settings: ShardingConfig, tp: int = 1) -> PlannedModel:
    """Divide what one of `tp` ranks has of a transformer into units, as of `zrun_core.models`.

    Column-parallel matrices and vocabularies are divided, and so are heads; what is added to the
    residual stream is on every rank (Shoeybi et al. 2019, "Megatron-LM", section 3). Parameters
    that a shape is said to have beyond those of its matrices are spread over the blocks.

    Args:
        shape: of the transformer.
        settings: how it is sharded.
        tp: tensor-parallel ranks.

    Raises:
        ValueError: the heads do not divide.
        JobError: its linears cannot be tiled as the settings say.
    """
    if shape.heads % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
        raise ValueError(
            f"{shape.heads} heads and {shape.kv_heads} key heads do not divide over {tp} ranks"
        )
    tree = _TransformerTree(shape, tp)
    if tp == 1:
        tile_linears(tree, settings.tile, settings.precision.compute, settings.leaf_names)
        return plan_model(tree, settings)
    return plan_model(tree, settings, table=_replicated_params(tree))


def _replicated_params(tree: nn.Module) -> dict[str, TensorPart]:
    """Return the parameters that every tensor-parallel rank has, by name."""
    found = {}
    for path, module in tree.named_modules():
        for key in getattr(module, "replicated", ()):
            param = module._parameters.get(key)
            if param is None:
                continue
            name = f"{path}.{key}"
            shape = tuple(param.shape)
            found[name] = full_part(
                name, shape, contiguous_stride(shape), replicated_over=("tensor",)
            )
    return found


class _Vectors(nn.Module):
    """Parameters of these sizes; `replicated` ones are on every tensor-parallel rank."""

    def __init__(self, replicated: Sequence[str] = (), **sizes: int) -> None:
        super().__init__()
        self.replicated = replicated
        for name, size in sizes.items():
            if size:
                self.register_parameter(name, nn.Parameter(torch.empty(size, device="meta")))


def _linear(inputs: int, outputs: int, *, bias: bool, replicated: Sequence[str] = ()) -> nn.Linear:
    """Return a linear; `replicated` parameters of it are on every tensor-parallel rank."""
    linear = nn.Linear(inputs, outputs, bias, device="meta")
    vars(linear)["replicated"] = replicated
    return linear


def _norm(shape: TransformerShape) -> _Vectors:
    has_bias = shape.norm_params == 2
    bias = shape.hidden if has_bias else 0
    return _Vectors(["weight", "bias"], weight=shape.hidden, bias=bias)


class _Attention(nn.Module):
    def __init__(self, shape: TransformerShape, tp: int) -> None:
        super().__init__()
        kv_heads = max(1, shape.kv_heads // tp)  # copies of them, where there are fewer than ranks
        width = (shape.heads // tp + 2 * kv_heads) * shape.head_dim
        out_width = shape.attention_width // tp
        self.qkv = _linear(shape.hidden, width, bias=shape.qkv_bias)
        self.out = _linear(out_width, shape.hidden, bias=shape.out_bias, replicated=["bias"])


class _FeedForward(nn.Module):
    def __init__(self, shape: TransformerShape, tp: int) -> None:
        super().__init__()
        width = -(-shape.ffn // tp)
        names = ("gate", "up") if shape.gated else ("up",)
        for name in names:
            self.add_module(name, _linear(shape.hidden, width, bias=shape.ffn_bias))
        self.down = _linear(width, shape.hidden, bias=shape.ffn_bias, replicated=["bias"])


class _TransformerBlock(nn.Module):
    def __init__(self, shape: TransformerShape, tp: int, rest: int) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = _Attention(shape, tp)
        self.mlp_norm = _norm(shape)
        self.mlp = _FeedForward(shape, tp)
        if rest:
            self.rest = _Vectors(weight=rest)


class _TransformerTree(nn.Module):
    """The modules of a transformer, with its parameters and nothing to run."""

    def __init__(self, shape: TransformerShape, tp: int) -> None:
        super().__init__()
        vocab = -(-shape.vocab // tp)
        self.tokens = _Vectors(weight=vocab * shape.hidden)
        if shape.positions:
            self.positions = _Vectors(["weight"], weight=shape.positions * shape.hidden)
        rest = max(0, shape.params - shape.num_params)
        each, remainder = divmod(-(-rest // tp), shape.layers)
        rests = [each + 1] * remainder + [each] * (shape.layers - remainder)
        self.blocks = nn.ModuleList(_TransformerBlock(shape, tp, size) for size in rests)
        self.norm = _norm(shape)
        self.head: nn.Module = _Vectors(bias=-(-shape.extra // tp))
        if shape.tied:
            self.head.weight = self.tokens.weight
        elif shape.extra:
            self.head.weight = nn.Parameter(torch.empty(vocab * shape.hidden, device="meta"))
        else:
            self.head = _linear(shape.hidden, vocab, bias=False)


def mesh_info_of_rank(
    settings: ShardingConfig,
    dims: ParallelDims,
    rank: Coordinates,
    device: str,
    tied_size: int = 1,
) -> MeshInfo:
    """Return a rank's place among those that share its part of the model.

    Args:
        settings: how the model is sharded.
        dims: sizes of the axes.
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
    )


def layouts_of_rank(
    model: PlannedModel,
    settings: ShardingConfig,
    dims: ParallelDims,
    rank: Coordinates,
    mesh_info: MeshInfo,
) -> tuple[UnitLayout, ...]:
    """Return the units of a rank, divided as at run time.

    Args:
        model: of one tensor-parallel rank.
        settings: how it is sharded.
        dims: sizes of the axes.
        rank: its coordinates.
        mesh_info: as `mesh_info_of_rank` returns it.
    """
    return model.layouts(dims, rank.pp, mesh_info.shard_size, settings.zero.num_parts(mesh_info))


def rank_buffers(
    model: PlannedModel,
    settings: ShardingConfig,
    dims: ParallelDims,
    *,
    rank: Coordinates = FIRST,
    placement: Placement = ON_DEVICE,
    device: str = "cuda",
    tied_size: int = 1,
) -> list[Buffer]:
    """Return everything that a rank keeps from step to step.

    Args:
        model: of one tensor-parallel rank.
        settings: how it is sharded and updated.
        dims: sizes of the axes.
        rank: whose buffers. The first of each axis has the most; of a pipeline's stages, so may the
            last one.
        placement: where its states are.
        device: type of what trains, "cpu" or "cuda".
        tied_size: stages that have the same parameters, this one among them.

    Raises:
        JobError: the blocks do not fill the pipeline.
    """
    mesh_info = mesh_info_of_rank(settings, dims, rank, device, tied_size)
    layouts = layouts_of_rank(model, settings, dims, rank, mesh_info)
    away = place(layouts, placement)
    found = settings.states.rank_buffers(
        layouts,
        mesh_info,
        prefetch=settings.prefetch,
        moves_pages=moves_pages(device),
        placements=away,
        host_is_device=device == "cpu",
    )
    scratch = _update_scratch(settings, layouts, away, device)
    everything = [*found, *model.module_buffers(dims, rank.pp), *scratch]
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

    Args:
        settings: with the optimizer.
        layouts: units of the rank.
        away: placements of those whose states leave the device, by name.
        device: type of what trains, "cpu" or "cuda".
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
