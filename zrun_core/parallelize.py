"""The one place that knows in which order a user's model is transformed: checkpointing, compile, sharding."""

from __future__ import annotations

import torch
from torch import nn

from zrun_core.activations.checkpoint import apply_checkpointing
from zrun_core.build import Built
from zrun_core.comm import Comm
from zrun_core.config import JobConfig
from zrun_core.errors import JobError
from zrun_core.layout import ZeroPolicy
from zrun_core.mesh import Mesh
from zrun_core.optim.choose import Chosen
from zrun_core.precision import Precision
from zrun_core.spec import resolve_bucket
from zrun_core.zero.cut import repeated_blocks
from zrun_core.zero.sharded import Settings, ShardedModel


def make_settings(job: JobConfig, optimizer: Chosen, device: torch.device) -> Settings:
    """How `job` wants its model sharded and updated."""
    return Settings(
        zero=ZeroPolicy.of_stage(job.zero.stage),
        precision=Precision.of(job.precision),
        optimizer=optimizer,
        bucket=resolve_bucket(job.zero, device.type),
        clip=job.optim.clip,
        no_decay=job.optim.no_decay,
        unit_names=job.zero.units,
        leaf_names=job.zero.leaf,
        persist_below=job.zero.persist_below,
        prefetch=job.zero.prefetch,
        whole_blocks=job.compile,
        server=job.sync == "server",
        recomputes_blocks=job.activations.checkpoint != "none",
    )


def shard_size(job: JobConfig, world_size: int, ranks_per_host: int) -> int:
    """Ranks that hold one copy of the model states between them."""
    if job.zero.stage == 0:
        return 1
    match job.zero.shard_group:
        case "all":
            return world_size
        case "node":
            return ranks_per_host
        case size:
            return size


def parallelize(built: Built, job: JobConfig, settings: Settings, mesh: Mesh, comm: Comm) -> ShardedModel:
    """Transform a built model in place and shard it.

    Raises:
        JobError: the job asks for what this model cannot do.
    """
    transform(built.module, job)
    return ShardedModel(built.module, built.read, settings, mesh, comm)


def transform(model: nn.Module, job: JobConfig) -> None:
    """What happens to a model before it is sharded, in place.

    Raises:
        JobError: the job asks for what this model cannot do.
    """
    apply_checkpointing(model, job.activations)
    if job.compile:
        compile_blocks(model)


def compile_blocks(model: nn.Module) -> None:
    """torch.compile the forward of each repeated block: one graph serves all of them, and hooks stay outside of it."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise JobError("compile: the model has no repeated blocks to compile; write compile: false")
    for _, block in blocks:
        block.forward = torch.compile(block.forward)
