"""Every buffer that a rank keeps from step to step, from a model on the meta device and a job, without any rank.

    settings = settings_of(job, load, "cuda")
    cut = plan_model(model, settings)
    buffers = rank_buffers(cut, settings, ParallelDims(dp=8))

The list is made by `StatePolicy.rank_buffers`, as the list that the runtime allocates is: what is planned is what
is allocated. Tensor and pipeline parallelism, other tiers than the device, and partitioned checkpoints have no runtime
yet; their buffers are the contract that it will allocate from.
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
from zrun_core.memory.state_policy import MeshInfo, module_buffers
from zrun_core.memory.tensors import TensorPart, contiguous_stride, full_part
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.plan.question.candidate import stage_blocks
from zrun_core.plan.question.transformer import TransformerShape
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import Coordinates, ParallelDims
from zrun_core.train.parallelize import make_settings
from zrun_core.zero.auto_wrap import repeated_blocks
from zrun_core.zero.sharded_model import ShardingConfig, wrap_plan
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
        layout: whole, as one rank alone has it.
        block: number of the repeated block that it lies in; -1 outside.
        before: whether modules use it that come before the first block. Tied embeddings are used at both ends.
        after: whether modules use it that come after the first block began, outside of blocks.
    """

    layout: UnitLayout
    block: int = -1
    before: bool = False
    after: bool = False


@dataclass(frozen=True)
class PlannedModel:
    """The units of a model, or of one tensor-parallel rank's part of it, before anybody divides them.

    Attributes:
        blocks: names of the repeated blocks.
        buffers: of its modules.
    """

    units: tuple[PlannedUnit, ...]
    blocks: tuple[str, ...]
    buffers: tuple[Buffer, ...]

    @property
    def num_params(self) -> int:
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
            num_parts: that they are padded to; None: as many as shards.
        """
        parts = num_parts or num_shards
        key = (dims.pp, dims.virtual, stage, num_shards, parts)
        if key not in self._stages:
            units = self._of_stage(dims, stage)
            found = (replace(unit, num_shards=num_shards, num_parts=parts) for unit in units)
            self._stages[key] = tuple(found)
        return self._stages[key]

    def _of_stage(self, dims: ParallelDims, stage: int) -> list[UnitLayout]:
        if dims.pp == 1:
            return [unit.layout for unit in self.units]
        ranges = stage_blocks(len(self.blocks), dims, stage)
        here = {block for each in ranges for block in each}
        first, last = stage == 0, stage == dims.pp - 1
        found = []
        for unit in self.units:
            if unit.layout.keep_unsharded:
                foreign = [
                    f"{name}." for number, name in enumerate(self.blocks) if number not in here
                ]
                found += _without(unit.layout, foreign)
            elif unit.block in here or (
                unit.block < 0 and ((first and unit.before) or (last and unit.after))
            ):
                found.append(unit.layout)
        return found

    def module_buffers(self, dims: ParallelDims, stage: int) -> list[Buffer]:
        """The modules' buffers on a pipeline stage: those of its blocks, and all that lie outside of blocks."""
        here = {block for each in stage_blocks(len(self.blocks), dims, stage) for block in each}
        foreign = tuple(f"{name}." for number, name in enumerate(self.blocks) if number not in here)
        return [buffer for buffer in self.buffers if not buffer.name.startswith(foreign)]


def _without(unit: UnitLayout, prefixes: Sequence[str]) -> list[UnitLayout]:
    """`unit` without the parameters whose names begin so; nothing if none is left."""
    slots, offset = [], 0
    for slot in unit.slots:
        if not slot.name.startswith(tuple(prefixes)):
            slots.append(replace(slot, offset=offset))
            offset += slot.numel
    return [replace(unit, slots=tuple(slots))] if slots else []


def settings_of(job: JobConfig, load: Callable[[str], Any], device: str) -> ShardingConfig:
    """How `job` wants its model sharded and updated on devices of this type, "cpu" or "cuda".

    Args:
        load: resolves `module:attr` of an optimizer of the user's.

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
    """Cut `model`, on any device, as the runtime does.

    Args:
        buffer_bytes: of the modules' buffers, where `model` itself has none to look at.
        table: as of `ShardedModel`.

    Raises:
        JobError: the settings name modules that the model has not.
    """
    cut = wrap_plan(model, settings, MeshInfo(), table)
    blocks = dict(repeated_blocks(model))
    numbers = {name: number for number, name in enumerate(blocks)}
    inside = {id(inner) for block in blocks.values() for inner in block.modules()}
    before: set[int] = set()
    after: set[int] = set()
    met_blocks = False
    for module, needed, _ in cut.hooked:
        if id(module) in inside:
            met_blocks = True
        else:
            (after if met_blocks else before).update(needed)
    units = tuple(
        PlannedUnit(
            unit.layout, numbers.get(unit.layout.block, -1), number in before, number in after
        )
        for number, unit in enumerate(cut.units)
    )
    buffers = module_buffers(model)
    if buffer_bytes is not None:
        buffers = [Buffer("buffers of modules", Kind.BUFFER, buffer_bytes)]
    return PlannedModel(units, tuple(blocks), tuple(buffers))


def plan_shape(shape: TransformerShape, settings: ShardingConfig, tp: int = 1) -> PlannedModel:
    """Cut a transformer as zrun cuts the same model of `zrun_core.models`: what one of `tp` ranks has of it.

    Column-parallel matrices and vocabularies are divided, and so are heads; what is added to the residual stream is
    whole on every rank (Shoeybi et al. 2019, section 3). Parameters that a shape is said to have beyond those of its
    matrices are spread over the blocks.

    Raises:
        ValueError: the heads do not divide.
    """
    if shape.heads % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
        raise ValueError(
            f"{shape.heads} heads and {shape.kv_heads} key heads do not divide over {tp} ranks"
        )
    tree = _Tree(shape, tp)
    alike = {} if tp == 1 else _alike_over_tensor(tree)
    return plan_model(tree, settings, table=alike)


def _alike_over_tensor(tree: nn.Module) -> dict[str, TensorPart]:
    found = {}
    for path, module in tree.named_modules():
        for key in module.alike if isinstance(module, _Vectors) else ():
            if (param := module._parameters.get(key)) is not None:
                name, shape = f"{path}.{key}", tuple(param.shape)
                found[name] = full_part(
                    name, shape, contiguous_stride(shape), replicated_over=("tensor",)
                )
    return found


class _Vectors(nn.Module):
    """Parameters of these sizes; those called `alike` are whole on every tensor-parallel rank."""

    def __init__(self, alike: Sequence[str] = (), **sizes: int) -> None:
        super().__init__()
        self.alike = alike
        for name, size in sizes.items():
            if size:
                self.register_parameter(name, nn.Parameter(torch.empty(size, device="meta")))


class _Attention(nn.Module):
    def __init__(self, shape: TransformerShape, tp: int) -> None:
        super().__init__()
        width = (shape.heads // tp + 2 * max(1, shape.kv_heads // tp)) * shape.head_dim
        self.qkv = _Vectors(weight=shape.hidden * width, bias=width * shape.qkv_bias)
        out = shape.attention_width // tp * shape.hidden
        self.out = _Vectors(["bias"], weight=out, bias=shape.hidden * shape.out_bias)


class _FeedForward(nn.Module):
    def __init__(self, shape: TransformerShape, tp: int) -> None:
        super().__init__()
        width = -(-shape.ffn // tp)
        names = ("gate", "up") if shape.gated else ("up",)
        for name in names:
            self.add_module(
                name, _Vectors(weight=shape.hidden * width, bias=width * shape.ffn_bias)
            )
        down = width * shape.hidden
        self.down = _Vectors(["bias"], weight=down, bias=shape.hidden * shape.ffn_bias)


class _TransformerBlock(nn.Module):
    def __init__(self, shape: TransformerShape, tp: int, rest: int) -> None:
        super().__init__()
        norm = {"weight": shape.hidden, "bias": shape.hidden * (shape.norm_params == 2)}
        self.attention_norm = _Vectors([*norm], **norm)
        self.attention = _Attention(shape, tp)
        self.mlp_norm = _Vectors([*norm], **norm)
        self.mlp = _FeedForward(shape, tp)
        if rest:
            self.rest = _Vectors(weight=rest)


class _Tree(nn.Module):
    """The modules of a transformer, with its parameters and nothing to run."""

    def __init__(self, shape: TransformerShape, tp: int) -> None:
        super().__init__()
        vocab, hidden = -(-shape.vocab // tp), shape.hidden
        self.tokens = _Vectors(weight=vocab * hidden)
        if shape.positions:
            self.positions = _Vectors(["weight"], weight=shape.positions * hidden)
        rest = max(0, shape.params - shape.num_params)
        each, more = divmod(-(-rest // tp), shape.layers)
        self.blocks = nn.ModuleList(
            _TransformerBlock(shape, tp, each + (number < more)) for number in range(shape.layers)
        )
        norm = {"weight": hidden, "bias": hidden * (shape.norm_params == 2)}
        self.norm = _Vectors([*norm], **norm)
        self.head = _Vectors(weight=0 if shape.tied else vocab * hidden, bias=-(-shape.extra // tp))
        if shape.tied:
            self.head.weight = self.tokens.weight


def mesh_info_of_rank(
    settings: ShardingConfig, dims: ParallelDims, rank: Coordinates, device: str
) -> MeshInfo:
    """A rank's place among those that share its part of the model."""
    shard = dims.shard_size if settings.zero.divides else 1
    return MeshInfo(
        shard, rank.dp % shard, dims.dp // shard, rank.dp // shard, direct_up_to(device)
    )


def layouts_of_rank(
    cut: PlannedModel,
    settings: ShardingConfig,
    dims: ParallelDims,
    rank: Coordinates,
    mesh_info: MeshInfo,
) -> tuple[UnitLayout, ...]:
    """The units of a rank, divided as at run time."""
    return cut.layouts(dims, rank.pp, mesh_info.shard_size, settings.zero.num_parts(mesh_info))


def place(units: Sequence[UnitLayout], placement: Placement) -> Mapping[str, Placement]:
    """The home of each unit whose states leave the device, by its name: the fewest that have the wanted fraction.

    They are the last of the model, whose gradients come first: the device keeps those that come last, whose update
    could not be hidden behind the rest of the backward pass.
    """
    away: dict[str, Placement] = {}
    if placement == replace(
        ON_DEVICE, activation=placement.activation, fraction=placement.fraction
    ):
        return away
    wanted = placement.fraction * sum(unit.numel for unit in units)
    for unit in reversed(units):
        if wanted <= 0:
            break
        away[unit.name] = replace(placement, fraction=1.0)
        wanted -= unit.numel
    return away


def rank_buffers(
    cut: PlannedModel,
    settings: ShardingConfig,
    dims: ParallelDims,
    *,
    rank: Coordinates = FIRST,
    placement: Placement = ON_DEVICE,
    device: str = "cuda",
) -> list[Buffer]:
    """Everything that a rank keeps from step to step.

    Args:
        cut: of what one tensor-parallel rank has.
        rank: whose buffers; the first of each axis has the most, and so has the last stage of a pipeline beside it.
        device: type of what trains, "cpu" or "cuda".

    Raises:
        ValueError: the blocks do not fill the pipeline.
    """
    mesh_info = mesh_info_of_rank(settings, dims, rank, device)
    layouts = layouts_of_rank(cut, settings, dims, rank, mesh_info)
    away = place(layouts, placement)
    found = settings.states.rank_buffers(
        layouts,
        mesh_info,
        prefetch=settings.prefetch,
        moves_pages=moves_pages(device),
        placements=away,
    )
    return [
        *found,
        *cut.module_buffers(dims, rank.pp),
        *_update_scratch(settings, layouts, away, device),
    ]


def _update_scratch(
    settings: ShardingConfig,
    layouts: Sequence[UnitLayout],
    away: Mapping[str, Placement],
    device: str,
) -> list[Buffer]:
    """What the optimizer keeps from its first update on, wherever it updates."""
    chosen = settings.optimizer
    on_host = [
        unit.name in away and away[unit.name].optimizer is not Tier.DEVICE
        for unit in layouts
        if unit.trainable
    ]
    sizes = {
        Tier.DEVICE: chosen.scratch_bytes(device) if chosen is not None and not all(on_host) else 0,
        Tier.HOST: chosen.scratch_bytes("cpu") if chosen is not None and any(on_host) else 0,
    }
    return [
        Buffer("optimizer scratch", Kind.TEMP, size, tier) for tier, size in sizes.items() if size
    ]
