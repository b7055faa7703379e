"""Divide the layers of a built model: plan the whole of it, cut what this rank has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from zrun_core.activations.partition import Partition
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.spine.sections.parallel import ParallelConfig
from zrun_core.tensor_parallel.divide import Divided, divide
from zrun_core.tensor_parallel.fake_check import check_on_fakes
from zrun_core.tensor_parallel.plan import TensorPlan, plan_model
from zrun_core.tensor_parallel.sequence import lengths_checked, order_checked, spans
from zrun_core.tensor_parallel.tensor_comm import TensorComm
from zrun_core.train.stage_building import StageParts
from zrun_core.zero.wrap.auto_wrap import repeated_blocks


def planned(model: nn.Module, parallel: ParallelConfig) -> TensorPlan | None:
    """Return how a model is divided, by its modules alone; None: it is not.

    Args:
        model: the user's, before it is cut into stages.

    Raises:
        JobError: it cannot be divided as the job says.
    """
    if parallel.tp == 1:
        return None
    return plan_model(model, None if parallel.plan == "auto" else parallel.plan, parallel.tp)


def plan_tensors(
    model: nn.Module,
    parallel: ParallelConfig,
    forward: Callable[[], object],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[TensorPlan | None, list[str]]:
    """Return how a model is divided, and check it by a forward without values.

    Args:
        model: the user's, before it is cut into stages.
        forward: runs the loss of a batch.

    Returns:
        The plan, None where the model is not divided; and notes for the user.

    Raises:
        JobError: it cannot be divided as the job says, or slices would compute something else.
    """
    plan = planned(model, parallel)
    if plan is None:
        return None, []
    blocks = [name for name, _ in repeated_blocks(model)] if parallel.sequence else []
    first = [span[0] for span in spans([blocks])]  # in front of which sequences are whole
    spanned = next(iter(spans([blocks])), [])
    with lengths_checked(model, first, parallel.tp), order_checked(model, spanned):
        checked = check_on_fakes(model, plan, forward, dtype, device, blocks)
    return checked.plan, [checked.note] if checked.note else []


def divide_model(
    model: nn.Module,
    plan: TensorPlan | None,
    parallel: ParallelConfig,
    comm: TensorComm,
    parts: StageParts | None,
) -> Divided | None:
    """Give this rank its slices of a model, in place; None: it has all.

    Args:
        model: the user's, or what a stage of a pipeline has of it.
        comm: of the ranks that have slices of the same layers.
        parts: of the pipeline; None: there is none.

    Raises:
        JobError: sequences cannot be divided.
    """
    if plan is None:
        return None
    chunks = _chunks(model, parts) if parallel.sequence else ()
    if parts is None:
        return divide(model, plan, comm, chunks)
    divided = divide(model, plan, comm, chunks, parts.stage.run_elsewhere)
    for part, whole in divided.replaced():
        parts.stage.ghosts.stand_for(part, whole)
    for module, key, of_all in divided.attributes:
        parts.stage.ghosts.know_attribute(module, key, of_all)
    return divided


def input_partition(
    activations: ActivationsConfig, parallel: ParallelConfig, mesh: Mesh, comm: Comm
) -> Partition | None:
    """Return what divides the inputs of recomputed blocks; None: they are kept as they are.

    Args:
        activations, parallel: sections of the job. With slices of the sequence they are slices.
    """
    if not activations.partition or parallel.sequence:
        return None
    return Partition(TensorComm(comm, mesh.tensor))


def _chunks(model: nn.Module, parts: StageParts | None) -> Sequence[Sequence[str]]:
    """Return the names of the blocks that this rank computes one after the other."""
    if parts is None:
        return [[name for name, _ in repeated_blocks(model)]]
    stage = parts.stage
    return [
        [stage.flow.blocks[number] for number in stage.split.blocks(chunk)]
        for chunk in stage.chunks
    ]
