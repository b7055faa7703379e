"""A job as a `ShardingConfig`; a model's transformations in order: tiles to sharding."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from zrun_core.activations.checkpoint import apply_checkpointing, own_checkpointing
from zrun_core.activations.kept import DeviceKeeper, make_keeper
from zrun_core.activations.kv_cache import omit_cache
from zrun_core.activations.offloaded_inputs import OffloadedInputs
from zrun_core.activations.partition import Partition
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.errors import JobError
from zrun_core.hardware.spans import Spans
from zrun_core.memory.buffers import Placement, Tier, placement_of
from zrun_core.memory.layout import NO_PARTS, UnitLayout
from zrun_core.memory.placement import place
from zrun_core.memory.state_policy import ZeroPolicy
from zrun_core.memory.tensors import TensorPart
from zrun_core.optim.resolve import OptimizerSpec
from zrun_core.spine import memory_limits
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.spine.sections.zero import ZeroConfig
from zrun_core.tensor_parallel.divide import Divided
from zrun_core.train.stage_building import StageParts
from zrun_core.user_code.build import Built
from zrun_core.user_code.forward_layers import Layer, wrap_forward
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.exchange import Exchange
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.unit.server import AsyncServer, ParameterServer
from zrun_core.zero.wrap.auto_wrap import NO_CHUNKS, repeated_blocks
from zrun_core.zero.wrap.sharding_config import ShardingConfig
from zrun_core.zero.wrap.tiling import read_tiles, tile_linears, tiled_linears

EXCHANGES: Mapping[str, type[Exchange]] = {
    "ring": Exchange,
    "server": ParameterServer,
    "async_server": AsyncServer,
}


def make_settings(job: JobConfig, optimizer: OptimizerSpec, device: torch.device) -> ShardingConfig:
    """Return how a job's model is sharded and updated."""
    settings = shard_settings(job.zero, job.precision, job.activations, device, compile=job.compile)
    offload = job.offload
    exchange = EXCHANGES[job.sync]()
    return replace(
        settings,
        optimizer=optimizer,
        clip=job.optim.clip,
        no_decay=job.optim.no_decay,
        exchange=exchange,
        placement=placement_of(offload, job.activations, device.type),
        layer_major=job.parallel.facts.goes_in_slices,
        schedule=offload.schedule,
        delay_after=offload.delay_after,
    )


def shard_settings(
    zero: ZeroConfig,
    precision: PrecisionConfig,
    activations: ActivationsConfig,
    device: torch.device,
    *,
    compile: bool,
) -> ShardingConfig:
    """Return how a model is sharded; its optimizer is chosen later.

    Args:
        compile: whether repeated blocks are compiled, and so are units of their own.
    """
    return ShardingConfig(
        zero=ZeroPolicy(zero.stage),
        precision=Precision.of(precision),
        optimizer=None,
        bucket=zero.bucket_on(device.type),
        unit_names=zero.units,
        leaf_names=zero.leaf,
        persist_below=zero.persist_below,
        prefetch=zero.prefetch,
        whole_blocks=compile,
        recomputes_blocks=activations.checkpoint != "none",
        tile=zero.tile,
    )


def parallelize(
    built: Built,
    job: JobConfig,
    settings: ShardingConfig,
    mesh: Mesh,
    comm: Comm,
    inputs: OffloadedInputs | None = None,
    parts: StageParts | None = None,
    divided: Divided | None = None,
) -> tuple[ShardedModel, list[str]]:
    """Transform a built model in place and shard it.

    Args:
        inputs: moves what blocks are recomputed from; None: it stays on the device.
        parts: of the model's pipeline; None: it has none.
        divided: the slices of its layers that this rank has; None: it has all.

    Returns:
        The sharded model, and notes for the user.

    Raises:
        JobError: the job asks for what this model cannot do.
    """
    notes = transform(
        built.module,
        job.zero,
        job.precision,
        job.activations,
        compile=job.compile,
        inputs=inputs,
        spans=comm.spans,
    )
    read = built.read if divided is None else divided.read(built.read)
    read = read_tiles(built.module, read)
    table = tensor_table(parts, divided)
    chunk_of = NO_CHUNKS if parts is None else parts.chunk_of
    sharded = ShardedModel(built.module, read, settings, mesh, comm, table=table, chunk_of=chunk_of)
    if divided is not None and divided.reads is not None:
        if job.compile:
            raise divided.reads.when_compiled()
        divided.reads.install(built.module, sharded.gatherer.running)
    if divided is not None and not job.compile:
        divided.late_reads.install(built.module, sharded.gatherer.running)
    if parts is not None:
        parts.stage.show_others(sharded.gatherer.running)
    return sharded, notes + moved_share(sharded.layouts, settings.placement)


def tensor_table(parts: StageParts | None, divided: Divided | None) -> Mapping[str, TensorPart]:
    """Return, by name of a parameter, what it is of a tensor of the whole model.

    Args:
        parts: of a pipeline, whose stages may share tied parameters.
        divided: slices of layers, which may be tied too.
    """
    shared = NO_PARTS if parts is None else parts.table
    if divided is None:
        return shared
    table = dict(divided.table)
    for name, part in shared.items():
        axes = (*table[name].replicated_over, *part.replicated_over)
        table[name] = replace(table[name], replicated_over=axes)
    return table


def offloaded_inputs(
    tier: Tier,
    mesh: Mesh,
    comm: Comm,
    folder: Path,
    host_memory: int | None = None,
    partition: Partition | None = None,
) -> OffloadedInputs | None:
    """Return what moves or divides the inputs of recomputed blocks; None: they stay as they are.

    Args:
        tier: on which they wait for backward, as of `Placement`.
        comm: knows its device, and who is to learn that it waits for a disk.
        folder: on the disk, where that is the tier.
        host_memory: bytes that the ranks of this host may take of its memory; None: what is free.
        partition: divides them; None: each rank keeps them whole.

    Raises:
        PreflightError: there is no such file or memory to be had.
    """
    if tier is Tier.DEVICE:
        return None if partition is None else OffloadedInputs(DeviceKeeper(), partition)
    if host_memory is None:
        host_memory = memory_limits.host_available()
    waiting = functools.partial(comm.wait_for_tier, f"its disk ({folder})")
    host_bytes = host_memory // mesh.host.size
    keeper = make_keeper(tier, comm.device, folder, host_bytes, waiting)
    return OffloadedInputs(keeper, partition)


def moved_share(layouts: Sequence[UnitLayout], placement: Placement) -> list[str]:
    """Return a note of what a share of the states comes to, since whole units leave the device."""
    away = place(layouts, placement)
    if not away and placement.fraction == 0 and not placement.is_on_device:
        return ["offload.fraction 0: every state stays on the device"]
    if not away or placement.fraction == 1:
        return []
    moved = sum(layout.numel for layout in layouts if layout.name in away)
    share = moved / sum(layout.numel for layout in layouts)
    return [
        f"offload.fraction {placement.fraction:g}: the states of {len(away)} of {len(layouts)} "
        f"units leave the device, of {share:.0%} of the parameters"
    ]


def transform(
    model: nn.Module,
    zero: ZeroConfig,
    precision: PrecisionConfig,
    activations: ActivationsConfig,
    *,
    compile: bool,
    inputs: OffloadedInputs | None = None,
    spans: Spans | None = None,
) -> list[str]:
    """Prepare a model to be sharded, in place.

    The order matters, and is that of `Layer`. Tiles come first: they are modules. Checkpointing
    replaces the forward of a block; compile then traces the replacement, with its recomputation;
    the hooks of sharding stay outside of the compiled graph. Where inputs of blocks move, compile
    comes first: copies stay outside of the graph too.

    Args:
        compile: whether to compile each repeated block.
        inputs: moves what blocks are recomputed from; None: it stays on the device.
        spans: name recomputations for a profile; None: there is none.

    Returns:
        Notes for the user: what was tiled, and settings of the model's own that do not count in
        training.

    Raises:
        JobError: this model cannot be transformed so.
    """
    if compile and activations.checkpoint == "selective":
        _refuse_moves_around_kept_results(activations)
    notes = tile_linears(model, zero.tile, Precision.of(precision).compute, zero.leaf).notes
    if own_checkpointing(model):
        policy = activations.checkpoint
        if policy == "none":
            notes.append(
                "the model's own gradient checkpointing is on: activations.checkpoint: full does "
                "the same, and memory is planned for it"
            )
        else:
            notes.append(
                f"activations.checkpoint: {policy} replaces the model's own gradient checkpointing"
            )
    if omit_cache(model):
        notes.append("config.use_cache is off in training; model.generate still uses it")
    if inputs is None:
        apply_checkpointing(model, activations, compiles=compile, spans=spans)
    if compile:
        compile_blocks(model)
    if inputs is not None:
        apply_checkpointing(model, activations, inputs, spans=spans)
    return notes


def _refuse_moves_around_kept_results(activations: ActivationsConfig) -> None:
    what = ""
    if activations.partition:
        what = "divided (activations.partition)"
    if activations.offload != "device":
        what = f"offloaded (activations.offload: {activations.offload})"
    if what:
        raise JobError(
            "activations.checkpoint: selective keeps results inside of compiled blocks, and inputs "
            f"that are {what} move outside of them: write checkpoint: full, or compile: false"
        )


def compile_blocks(model: nn.Module) -> None:
    """Compile the forward of each repeated block with torch.compile; one graph serves them all.

    Raises:
        JobError: the model has no repeated blocks.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise JobError("compile: the model has no repeated blocks to compile; write compile: false")
    for _, block in blocks:
        for _, tiled in tiled_linears(block):  # the hooks of its tiles are outside of the graph
            outside = torch.compiler.disable(tiled.forward)
            wrap_forward(tiled, Layer.OUTSIDE_GRAPHS, outside)
        wrap_forward(block, Layer.COMPILED, torch.compile(block.forward))
