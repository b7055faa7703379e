"""Combinations of sections that no job can have, each refused with what to write instead.

    refuse_tiles_in_parts(job.zero, job.parallel)

`JobConfig` asks them in turn: the first that refuses is told. All of them raise a ValueError.
"""

from __future__ import annotations

from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.spine.sections.data import DataConfig
from zrun_core.spine.sections.evaluation import BestConfig, EvalConfig
from zrun_core.spine.sections.guards import GuardsConfig
from zrun_core.spine.sections.offload import OffloadConfig
from zrun_core.spine.sections.optim import OptimConfig
from zrun_core.spine.sections.optimizer_args import LAYER_WISE, why_not_on_disk
from zrun_core.spine.sections.parallel import ParallelConfig, PipelineSchedule
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.spine.sections.profile import ProfileConfig
from zrun_core.spine.sections.zero import ZeroConfig


def refuse_server_with_shards(sync: str, zero: ZeroConfig) -> None:
    """Refuse to divide states that a parameter server keeps on one rank."""
    if sync == "server" and zero.stage:
        raise ValueError(
            f"sync: server keeps all states on one rank, and zero {zero.stage} divides "
            "them over all; write zero: 0, or leave sync out"
        )


def refuse_parameters_elsewhere_below_stage_3(offload: OffloadConfig, zero: ZeroConfig) -> None:
    """Refuse parameters beside the device where they stay unsharded between uses."""
    if offload.param != "device" and zero.stage != 3:
        raise ValueError(
            f"offload.param: {offload.param} needs zero.stage: 3, which gathers the parameters of "
            "a unit only while it runs (also on one rank); write zero: 3, or leave the "
            "parameters on the device"
        )


def refuse_layer_wise_updates_on_disk(optim: OptimConfig, offload: OffloadConfig) -> None:
    """Refuse states on a disk for optimizers that need the norms of all layers first."""
    name = optim.name.lower()
    if name in LAYER_WISE and offload.optimizer == "disk":
        raise ValueError(why_not_on_disk(name))


def refuse_server_with_offload(sync: str, offload: OffloadConfig) -> None:
    """Refuse states elsewhere than on the device of a parameter server."""
    if sync == "server" and offload.tiers != {"device"}:
        raise ValueError("sync: server keeps all states on a device; leave offload or sync out")


def refuse_server_with_parts_of_the_model(sync: str, parallel: ParallelConfig) -> None:
    """Refuse a parameter server for ranks that have a part of the model each."""
    if sync == "server" and parallel.model_ranks > 1:
        raise ValueError(
            f"sync: server keeps all states on one rank, and tp {parallel.tp} x pp "
            f"{parallel.pp} = {parallel.model_ranks} ranks share a model; leave sync or "
            "parallel out"
        )


def refuse_staleness_without_async_server(sync: str, staleness: int | str) -> None:
    """Refuse a bound on what nothing else lets happen."""
    if staleness and sync != "async_server":
        raise ValueError(
            f"staleness: {staleness} bounds how far ranks are apart under sync: async_server, and "
            f"under sync: {sync} they never are; write sync: async_server, or leave staleness out"
        )


def refuse_what_async_server_lacks(
    optim: OptimConfig,
    precision: PrecisionConfig,
    zero: ZeroConfig,
    offload: OffloadConfig,
    parallel: ParallelConfig,
) -> None:
    """Refuse what needs all ranks, or states elsewhere than on one, at an update.

    Args:
        optim: layer-wise optimizers sum norms over ranks in the middle of an update.
        precision: a loss scale needs the overflows of all ranks.
        zero: above stage 0 states are divided.
        offload: states elsewhere are updated beside the passes, by the thread that trains.
        parallel: of a part of a model, a rank alone has no gradient to push.

    Raises:
        ValueError: one of the sections needs it.
    """
    key = "sync: async_server"
    if zero.stage:
        raise ValueError(
            f"{key} keeps all states on one rank, and zero {zero.stage} divides them over all; "
            "write zero: 0, or leave sync out"
        )
    if parallel.model_ranks > 1:
        raise ValueError(
            f"{key} has each rank compute gradients of the whole model by itself, and tp "
            f"{parallel.tp} x pp {parallel.pp} = {parallel.model_ranks} ranks share one; "
            "leave sync or parallel out"
        )
    if parallel.facts.goes_in_slices:
        raise ValueError(
            f"{key} runs the micro-batches of a push one after the other; leave "
            "parallel.schedule: layer_major out, which saves nothing at zero 0"
        )
    if offload.tiers != {"device"}:
        raise ValueError(f"{key} keeps all states on a device; leave offload or sync out")
    if precision.compute == "fp16":
        raise ValueError(
            f"{key}: updates are made without waiting for the other ranks, and the loss scale of "
            "fp16 needs to know of overflows on all of them; write precision: bf16, or sync: server"
        )
    if optim.name.lower() in LAYER_WISE:
        raise ValueError(
            f"{key} updates by one rank's gradient while others compute, and optim.name: "
            f"{optim.name} has all ranks sum the norms of layers first; take another optimizer, "
            "or sync: server"
        )


def refuse_batches_that_async_server_cannot_deal_out(
    data: DataConfig, guards: GuardsConfig, device: str
) -> None:
    """Refuse what reads ahead, or drops together, where whoever is free takes what is next.

    Args:
        data: its loader processes would read ahead what another rank may take.
        guards: a batch is dropped on all ranks, in a step that all of them make.
        device: an accelerator's stream is its training thread's alone.

    Raises:
        ValueError: it is so.
    """
    key = "sync: async_server"
    if data.workers:
        raise ValueError(
            f"{key} deals out samples to whichever rank is free, so data.workers: {data.workers} "
            "processes cannot read them ahead; write workers: 0"
        )
    if guards.on_oom == "skip":
        raise ValueError(
            f"guards.on_oom: skip drops a batch on all ranks together, and under {key} they make "
            "no step together; write on_oom: stop"
        )
    if device == "cuda":
        raise ValueError(
            f"{key} trains on CPUs: its server updates in threads beside the one that computes; "
            "write device: cpu, or sync: server"
        )


def refuse_dropped_batches_at_stage_3(guards: GuardsConfig, zero: ZeroConfig) -> None:
    """Refuse to drop a batch on one rank whose parameters the others gather."""
    if guards.on_oom == "skip" and zero.stage == 3:
        raise ValueError(
            "guards.on_oom: skip is impossible at zero.stage 3: the other ranks would wait "
            "for parameters of the one that ran out; write stop, or zero.stage: 2"
        )


def refuse_dropped_batches_of_a_part_of_the_model(
    guards: GuardsConfig, parallel: ParallelConfig
) -> None:
    """Refuse to drop a batch on one of the ranks that share a model."""
    model = parallel.model_ranks
    if guards.on_oom == "skip" and model > 1:
        raise ValueError(
            f"guards.on_oom: skip is impossible where tp {parallel.tp} x pp "
            f"{parallel.pp} = {model} ranks share a model: the others would wait for the "
            "one that ran out; write on_oom: stop"
        )


def refuse_late_weights_of_compiled_blocks(parallel: ParallelConfig, is_compiled: bool) -> None:
    """Refuse to take apart the backwards of blocks that are compiled."""
    if parallel.facts.splits_backward and is_compiled:
        raise ValueError(
            f"parallel.schedule: {parallel.schedule} makes the gradients of linears' weights apart "
            "from those of their inputs, and compile: true makes them in one graph; write "
            "schedule: 1f1b, or compile: false"
        )


def refuse_tiles_in_parts(zero: ZeroConfig, parallel: ParallelConfig) -> None:
    """Refuse to tile the linears of a model of which a rank has a part."""
    for axis, degree in (("pp", parallel.pp), ("tp", parallel.tp)):
        if zero.tile is not None and degree > 1:
            raise ValueError(
                f"zero.tile replaces linears of a whole model, and parallel.{axis} {degree} "
                f"leaves each rank a part of it; leave zero.tile out, or write {axis}: 1"
            )


def refuse_partition_without_tensor_groups(
    activations: ActivationsConfig, parallel: ParallelConfig
) -> None:
    """Refuse to divide inputs of blocks where no two ranks have the same ones."""
    if activations.partition and parallel.tp == 1:
        raise ValueError(
            "activations.partition divides inputs of blocks among the ranks that share each layer, "
            "and with parallel.tp 1 none do; write parallel: {tp: 2} or more, or leave partition "
            "out"
        )


def refuse_what_pipedream_lacks(
    schedule: PipelineSchedule,
    optim: OptimConfig,
    precision: PrecisionConfig,
    zero: ZeroConfig,
    offload: OffloadConfig,
) -> None:
    """Refuse what needs all stages, or no more than the newest weights, at an update.

    Args:
        schedule: by name: each stage updates its weights after each micro-batch.
        optim: its `clip` needs a norm over all stages.
        precision: a loss scale needs the overflows of all stages.
        zero: above stage 1 it would shard the gradients of versions.
        offload: states elsewhere are updated beside the passes, not between them.

    Raises:
        ValueError: one of the sections needs it.
    """
    key = f"parallel.schedule: {schedule}"
    if optim.clip is not None:
        raise ValueError(
            f"{key}: a stage updates its weights without waiting for the others, and optim."
            "clip needs the gradient norm of all of them; leave optim.clip out, or write "
            "schedule: 1f1b"
        )
    if precision.compute == "fp16":
        raise ValueError(
            f"{key}: a stage updates its weights without waiting for the others, and the loss "
            "scale of fp16 needs to know of overflows in all of them; write precision: bf16, "
            "or schedule: 1f1b"
        )
    if zero.stage > 1:
        raise ValueError(
            f"{key} keeps versions of the weights whose gradients are summed at each update: "
            f"zero {zero.stage} would shard them; write zero: 1, or schedule: 1f1b"
        )
    if offload.tiers != {"device"}:
        raise ValueError(
            f"{key} updates each stage between its passes, and states elsewhere are updated "
            "beside them; leave offload out, or write schedule: 1f1b"
        )


def refuse_profile_beyond_the_end(profile: ProfileConfig, steps: int | None) -> None:
    """Refuse to trace steps that a job does not have, if it says how many there are."""
    if steps is not None and profile.last > steps:
        first = max(1, steps - (profile.last - profile.first))
        raise ValueError(
            f"profile.steps: [{profile.first}, {profile.last}] goes beyond the job's {steps} "
            f"steps; write [{first}, {steps}], or raise steps"
        )


def check_best(best: BestConfig, evaluation: EvalConfig | None) -> None:
    """Refuse to keep the best step by a number that no evaluation has."""
    if evaluation is None:
        raise ValueError("checkpoint.best needs an evaluation; write eval: {data: ...}")
    evaluation.check_metric("checkpoint.best.metric", best.metric)
