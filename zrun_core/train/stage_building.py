"""Make a stage of a pipeline of a built model: follow its forward, cut it, keep one part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zrun_core.activations.kv_cache import omit_cache
from zrun_core.distributed.mesh import Mesh
from zrun_core.errors import JobError
from zrun_core.memory.layout import dense_stride
from zrun_core.memory.tensors import TIED, TensorPart, full_part
from zrun_core.pipeline.ownership import chunks_of, owned, tied_stages
from zrun_core.pipeline.split import Split, at_names, balance_in_words, balanced
from zrun_core.spine.config import JobConfig
from zrun_core.stages.flow import ModelFlow
from zrun_core.stages.follow import follow
from zrun_core.stages.stage import Stage
from zrun_core.telemetry.stage_fields import StageFacts
from zrun_core.user_code.grad_hooks import check_of_parts
from zrun_core.zero.wrap.sharding_config import ShardingConfig


@dataclass(frozen=True)
class StageParts:
    """A stage, and what its parameters are of the whole model.

    Attributes:
        stage: made of the model, in place.
        tied_stages: stages that share tied parameters.
        table: by name of a tied parameter, its part of a tensor: all of it, on several stages.
        chunk_of: by name of a parameter, its chunk among those of this stage.
        order: names of all tensors of the whole model, as it has them.
        facts: for the record.
        notes: for the user.
    """

    stage: Stage
    tied_stages: tuple[int, ...]
    table: Mapping[str, TensorPart]
    chunk_of: Mapping[str, int]
    order: tuple[str, ...]
    facts: StageFacts
    notes: tuple[str, ...]


def build_stage(
    model: nn.Module,
    forward: Callable[[], object],
    job: JobConfig,
    settings: ShardingConfig,
    mesh: Mesh,
    device: torch.device,
) -> StageParts:
    """Cut a model into stages, and make it this rank's one, in place.

    Args:
        model: the user's, whole, before it is transformed and sharded.
        forward: runs the loss of a micro-batch, with autocast as in training.

    Raises:
        JobError: the model cannot be cut so.
    """
    dtype = settings.precision.compute
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)
    omit_cache(model, only_with_gradients=False)  # it would hand tensors around the borders
    flow = follow(model, forward, dtype, device)
    split, owners = cut(job, flow, mesh.pipe.size)
    index = mesh.pipe.index
    chunk_of = chunks_of(flow.uses, split, owners, index)
    params = dict(model.named_parameters())
    order = (*params, *(name for name, _ in model.named_buffers()))
    table = {
        name: full_part(
            name, tuple(params[name].shape), dense_stride(params[name]), replicated_over=(TIED,)
        )
        for name, stages in owners.items()
        if index in stages and len(stages) > 1
    }
    for name, stages in owners.items():
        if len(stages) > 1:
            check_of_parts(
                name,
                params[name],
                params[name].shape,
                key="parallel.pp",
                parts=f"stages {', '.join(map(str, stages))} each have a part of it",
                instead="write pp: 1",
            )
    facts = StageFacts(
        stage=index,
        stages=split.pp,
        virtual=split.virtual,
        blocks=tuple(
            flow.blocks[block] for chunk in split.chunks(index) for block in split.blocks(chunk)
        ),
        model_params=sum(param.numel() for param in params.values()),
        model_trainable=sum(param.numel() for param in params.values() if param.requires_grad),
    )
    stage = Stage(model, flow, split, index, owners, dtype, device)
    balance = balance_in_words(split, flow.flops, flow.blocks)
    if flow.uncounted:
        balance += f"; {flow.uncounted}"
    notes = (f"parallel.split: {balance}",)
    return StageParts(stage, tied_stages(owners), table, chunk_of, order, facts, notes)


def cut(job: JobConfig, flow: ModelFlow, pp: int) -> tuple[Split, Mapping[str, tuple[int, ...]]]:
    """Return the chunks that a job asks for, and the stages that have each parameter.

    Each rank refuses what one stage must.

    Raises:
        JobError: the model cannot be cut so.
    """
    split = _split_of(job, flow, pp)
    owners = owned(flow.uses, split)
    _check_outside_uses(flow, split, owners)
    _check_writes(flow, split, owners)
    if job.parallel.facts.updates_each:
        _refuse_tied(job.parallel.schedule, owners)
    for stage in range(split.pp):
        chunks_of(flow.uses, split, owners, stage)
    for chunk in range(split.num_chunks):
        flow.crossing(split.blocks(chunk).start)
    return split, owners


def _split_of(job: JobConfig, flow: ModelFlow, pp: int) -> Split:
    """Return the chunks that a job asks for.

    Raises:
        JobError: the model has not as many blocks, or others.
    """
    parallel = job.parallel
    if parallel.split == "auto":
        return balanced(flow.flops, len(flow.blocks), pp, parallel.virtual)
    return at_names(parallel.split, flow.blocks, pp, parallel.virtual)


def _refuse_tied(schedule: str, owners: Mapping[str, Sequence[int]]) -> None:
    """Refuse parameters of several stages where each stage updates its own without waiting.

    Raises:
        JobError: there is one.
    """
    for name, stages in owners.items():
        if len(stages) > 1:
            raise JobError(
                f"parallel.schedule: {schedule}: {name} is used on stages "
                f"{', '.join(map(str, stages))}, and each stage updates its parameters without "
                "waiting for the others: untie it, or write schedule: 1f1b"
            )


def _check_writes(flow: ModelFlow, split: Split, owners: Mapping[str, Sequence[int]]) -> None:
    """Check that what a forward writes to a parameter is written once, where all of it is.

    Raises:
        JobError: another stage has the parameter too, or the forward outside of modules runs once
            for each of a stage's chunks.
    """
    for name, write in flow.written.items():
        if len(owners[name]) > 1:
            stages = ", ".join(map(str, owners[name]))
            why = f"stages {stages} each have a copy of it, which that would make differ"
        elif split.virtual > 1 and not write.is_in_node:
            why = "that would be done once for each chunk of a stage"
        else:
            continue
        raise JobError(
            f"parallel.pp: the forward writes to {name} ({write.line}), and {why}: write to it in "
            "the forward of the one module that uses it, or by a hook of the job after the step; "
            "or write pp: 1"
        )


def _check_outside_uses(flow: ModelFlow, split: Split, owners: Mapping[str, Sequence[int]]) -> None:
    """Check that what is made outside of modules with a parameter is used where that is.

    Raises:
        JobError: a stage needs it that has not the parameter.
    """
    for use in flow.outside:
        for segment in use.used_in:
            chunk = split.chunk_of_segment(segment)
            if segment < use.segment or split.stage_of(chunk) in owners[use.param]:
                continue
            where = "what follows the blocks"
            if segment < len(flow.blocks):
                where = flow.blocks[segment]
            raise JobError(
                f"parallel.pp: {use.param} is used outside of its module (in the forward of the "
                f"model, or in the loss function), and {where}, which is on stage "
                f"{split.stage_of(chunk)}, uses what is made of it: compute that in a module that "
                "has the parameter, whose result can be sent; or write pp: 1"
            )
