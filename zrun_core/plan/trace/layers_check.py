"""The layers around the modules of a job's model, as its ranks put them on, without any rank.

The model is built as `check_parts` builds it, without values where its factory bears that, once for
each stage. It is planned, cut, divided and transformed by the functions that a rank calls, in the
order of `RankBuilder.build`, over collectives that move nothing. Of ranks with slices it is the
first.

What is on for a while only is not seen: in trials before the first step, and while a hook runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from zrun_core.activations.kept import DeviceKeeper
from zrun_core.activations.offloaded_inputs import OffloadedInputs
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.transport import Group
from zrun_core.errors import JobError, ZrunError
from zrun_core.memory.buffers import Tier, placement_of
from zrun_core.plan.trace.divided_model import comm_of_none
from zrun_core.plan.trace.parts_check import Subject, micro_of
from zrun_core.plan.trace.sample_batches import SampleBatches, samples_of
from zrun_core.plan.trace.traced_model import build_whole
from zrun_core.spine.config import JobConfig
from zrun_core.tensor_parallel.roles import any_number
from zrun_core.tensor_parallel.tensor_comm import TensorComm
from zrun_core.train import parallelize
from zrun_core.train.runners import put_on_for_steps
from zrun_core.train.stage_building import StageParts, build_stage
from zrun_core.train.tensor_building import divide_model, input_partition, plan_tensors
from zrun_core.user_code.forward_layers import Layer, layers_of

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class LayeredKind:
    """Modules that are repeated, and have the same layers.

    Attributes:
        modules: their names, with * in place of a number in which they differ.
        names: of each of them.
        num_alike: modules of these names and this class, with whatever layers.
        class_name: of each of them.
        layers: from the outermost, the name of each in stacks, and what it does.
        is_own_run: whether a module's own forward runs inside of the innermost.
        is_set: whether its own forward is one that the model's code has put on the module itself.
    """

    modules: str
    names: list[str]
    num_alike: int
    class_name: str
    layers: list[tuple[str, str]]
    is_own_run: bool
    is_set: bool


def layered_kinds(job: JobConfig, job_dir: Path, device: str) -> list[LayeredKind]:
    """Return the layers of a job's model, in the order of its modules; none of those without any.

    Args:
        device: type of what trains, "cpu" or "cuda".

    Raises:
        JobError: training would refuse it when it starts, or a model that is to be cut or divided
            has no first batch.
        UserCodeError: the model cannot be built, or a batch made.
    """
    found: dict[_Seen, None] = {}  # in order; a module that stages have otherwise is in it twice
    for stage in range(job.parallel.pp):
        found |= dict.fromkeys(_on_stage(job, job_dir, stage, device))
    alike: dict[tuple[str, str], set[str]] = {}
    kinds: dict[_Seen, list[str]] = {}
    for each in found:
        kind = each._replace(name=any_number(each.name))
        kinds.setdefault(kind, []).append(each.name)
        alike.setdefault((kind.name, kind.class_name), set()).add(each.name)
    found_kinds = []
    for kind, names in kinds.items():
        num_alike = len(alike[kind.name, kind.class_name])
        if kind.layers:
            found_kinds.append(
                LayeredKind(
                    modules=kind.name if num_alike > 1 else names[0],
                    names=names,
                    num_alike=num_alike,
                    class_name=kind.class_name,
                    layers=[(layer.label, layer.about) for layer in kind.layers],
                    is_own_run=not any(layer.is_instead for layer in kind.layers),
                    is_set=kind.is_set,
                )
            )
    return found_kinds


class _Seen(NamedTuple):
    """A module: its name, and what `LayeredKind` says of it."""

    name: str
    class_name: str
    layers: tuple[Layer, ...]
    is_set: bool


def _on_stage(job: JobConfig, job_dir: Path, index: int, device: str) -> Iterator[_Seen]:
    """Yield the modules that a stage runs, in their order, as its first rank has them."""
    parallel = job.parallel
    mesh = _mesh(parallel.tp, parallel.pp, index)
    comm = comm_of_none("cpu")
    tensor_comm = TensorComm(comm, mesh.tensor)
    plan = None
    parts: StageParts | None = None
    if parallel.model_ranks > 1:
        subject = Subject(job, job_dir, _samples(job, job_dir), micro_of(job))
        model = subject.model
        own = _own_forwards(model)
        plan, _ = plan_tensors(model, parallel, subject.forward, subject.dtype, _CPU)
        if parallel.pp > 1:
            settings = parallelize.shard_settings(
                job.zero, job.precision, job.activations, _CPU, compile=job.compile
            )
            parts = build_stage(model, subject.forward, job, settings, mesh, _CPU)
    else:
        model = build_whole(job, job_dir)
        own = _own_forwards(model)
    divide_model(model, plan, parallel, tensor_comm, parts)
    parallelize.transform(
        model,
        job.zero,
        job.precision,
        job.activations,
        compile=job.compile,
        inputs=_inputs(job, mesh, comm, device),
    )
    put_on_for_steps(parallel, model, None if parts is None else parts.stage)
    elsewhere = set() if parts is None else parts.stage.run_elsewhere
    for name, module in model.named_modules():
        if not any(name == each or name.startswith(f"{each}.") for each in elsewhere):
            yield _Seen(name, type(module).__name__, layers_of(module), id(module) in own)


def _own_forwards(model: nn.Module) -> set[int]:
    """Return the modules, by identity, of which the model's code has set the forward."""
    return {id(module) for module in model.modules() if "forward" in vars(module)}


def _mesh(tp: int, pp: int, stage: int) -> Mesh:
    """Return the groups of the first rank of a stage, which reach nobody."""
    axes = [each.name for each in fields(Mesh) if each.name != "own"]
    groups = {axis: Group(axis, (0,), 0, None) for axis in axes}
    groups["tensor"] = Group("tensor", tuple(range(tp)), 0, None)
    groups["pipe"] = Group("pipe", tuple(range(pp)), stage, None)
    return Mesh(**groups, own={})


def _samples(job: JobConfig, job_dir: Path) -> SampleBatches:
    try:
        return samples_of(job, job_dir)
    except ZrunError as error:
        raise JobError(
            "layers: ranks divide and cut the model by a forward of a first batch, and the data "
            f"was not read: {error}"
        ) from error


def _inputs(job: JobConfig, mesh: Mesh, comm: Comm, device: str) -> OffloadedInputs | None:
    """Return what moves or divides the inputs of recomputed blocks; None: they stay as they are.

    Whichever tier it is, the layer is the same: here they stay, and nothing is reserved.
    """
    tier = placement_of(job.offload, job.activations, device).activation
    partition = input_partition(job.activations, job.parallel, mesh, comm)
    if tier is Tier.DEVICE and partition is None:
        return None
    return OffloadedInputs(DeviceKeeper(), partition)
