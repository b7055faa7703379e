"""What a job becomes to be verified: few steps on few ranks of this host, recorded.

The keys that decide what is computed stay: stage, precision, axes, schedule, offload,
recomputation, compile, optimizer. Batches shrink, and hooks, evaluations and saves are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from zrun.job.smoke import smoke_of
from zrun.verification.shrink import has_sizes, shrunk
from zrun_core.errors import JobError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import ParallelDims

_LARGEST_GROUP = 2  # ranks of a shard group, of which a trial on CPUs has two
_MOST_SAMPLES = 2  # of a micro-batch


@dataclass(frozen=True)
class Trial:
    """A job that is to be verified, as keys on top of it.

    Attributes:
        overrides: of what runs, without those that shrink the model.
        shrinks: those.
        told: what it is, in words.
        parallel: its axes.
        stays: why the model does not shrink, in words; "" where it does, or is small already.
        notes: what of the job it leaves out.
    """

    overrides: tuple[str, ...]
    shrinks: tuple[str, ...]
    told: str
    parallel: ParallelDims
    stays: str = ""
    notes: tuple[str, ...] = ()


def check_method(job: JobConfig) -> None:
    """Refuse what is another method than a plain loop, on purpose.

    Raises:
        JobError: the job asks for it.
    """
    if job.parallel.facts.updates_each:
        raise JobError(
            f"parallel.schedule: {job.parallel.schedule} updates with gradients of older weights, "
            "so a plain loop trains something else and cannot be compared; verify the rest with "
            "parallel.schedule=1f1b"
        )
    if job.sync == "async_server":
        raise JobError(
            "sync: async_server updates by gradients of older parameters, so a plain loop trains "
            "something else and cannot be compared; verify the rest with sync=server"
        )
    if job.offload.schedule == "delayed":
        raise JobError(
            "offload.schedule: delayed uses parameters that are one step old, so a plain loop "
            "trains something else and cannot be compared; verify the rest with "
            "offload.schedule=overlap"
        )


def trial_of(job: JobConfig, steps: int, slots: int | None, gpus: int) -> Trial:
    """Return the trial of a job on this host.

    Args:
        slots: ranks; None: two replicas of the model, or as many as there are GPUs for.
        gpus: number of GPUs of this host.

    Raises:
        JobError: the ranks do not make up whole replicas.
    """
    parallel = job.parallel
    of_model = parallel.model_ranks
    if slots is not None and slots % of_model:
        raise JobError(
            f"--slots {slots}: tp {parallel.tp} x pp {parallel.pp} need a multiple of {of_model}"
        )
    on_gpus = job.device != "cpu" and gpus >= (slots or of_model)
    if slots is not None:
        replicas = slots // of_model
    elif on_gpus:
        replicas = min(2, gpus // of_model)
    else:
        replicas = 2
    if slots is None and parallel.dp == 1:
        replicas = 1
    group = job.zero.shard_group
    if slots is None and not on_gpus and isinstance(group, int) and group <= _LARGEST_GROUP:
        replicas = 2 * group  # so that there are copies of it
    ranks = replicas * of_model
    micro, accumulation = _batch(job, replicas)
    name = f"{job.name[:100]}-verify"
    keys = {
        "name": name,
        "hosts": "null",
        "min_hosts": "null",
        "launch.backend": "local",
        "slots": str(ranks),
        "device": "cuda" if on_gpus else "cpu",
        "parallel.dp": str(replicas),
        "batch.micro": str(micro),
        "batch.global": str(micro * replicas * accumulation),
        "hooks": "{}",
        "resume": "never",
        "restarts": "0",
        "checkpoint": "null",
        "eval": "null",
        "log.every": "1",
    }
    if job.profile is not None:
        keys["profile"] = "null"
    overrides = [*_few_steps(job, steps), *(f"{key}={value}" for key, value in keys.items())]
    notes = []
    if isinstance(group, int) and replicas % group:
        overrides.append("zero.shard_group=all")
        notes.append(
            f"zero.shard_group {group} does not divide {replicas} ranks, so it is all here: give "
            f"--slots a multiple of {group}"
        )
    if job.epochs is not None:
        notes.append("steps replace epochs: a short last step is not run")
    if accumulation == 1:
        notes.append("each rank has one micro-batch: nothing accumulates")
    smaller = shrunk(job.model.args, tp=parallel.tp, blocks=2 * parallel.pp * parallel.virtual)
    shrinks = [f"model.args.{'.'.join(path)}={value}" for path, value in smaller.items()]
    told = (
        f"{ranks} {'ranks' if ranks > 1 else 'rank'} on {'GPUs' if on_gpus else 'CPUs'}: "
        f"tp {parallel.tp}, dp {replicas}, pp {parallel.pp}, "
        f"{steps} steps of {micro * replicas * accumulation} samples"
    )
    stays = ""
    if job.zero.tile is not None or "persist_below" in job.zero.model_fields_set:
        shrinks = []  # a smaller model would have no tiles, or all of it would persist
        stays = "a smaller one would have no tiles, or persist whole (zero.tile, persist_below)"
    elif not has_sizes(job.model.args):
        stays = (
            f"no argument of {job.model.call} has the usual name of a depth or a width, such as "
            "depth, num_layers, dim or hidden_size"
        )
    axes = ParallelDims(tp=parallel.tp, dp=replicas, pp=parallel.pp)
    return Trial(tuple(overrides), tuple(shrinks), told, axes, stays, tuple(notes))


def _few_steps(job: JobConfig, steps: int) -> list[str]:
    if job.steps is not None and job.steps <= steps:
        return []
    kept = ("steps=", "tokens=", "epochs=", "lr.")
    return [each for each in smoke_of(job, steps).overrides if each.startswith(kept)]


def _batch(job: JobConfig, replicas: int) -> tuple[int, int]:
    """Return samples of a micro-batch, and micro-batches of a rank in a step."""
    whole = job.batch.global_
    if isinstance(job.batch.micro, int):
        micro = job.batch.micro
    else:
        assert isinstance(whole, int)
        micro = max(1, whole // (2 * replicas))
    accumulation = 2
    if isinstance(whole, int):
        accumulation = min(2, max(1, whole // (micro * replicas)))
    if job.parallel.pp > 1:
        accumulation = max(2, job.parallel.pp)
    return min(micro, _MOST_SAMPLES), accumulation


def save_at(step: int) -> list[str]:
    """Return the keys by which a trial saves after a step."""
    return [f"checkpoint={{every: {step}, keep: 100}}"]


def other_layout(job: JobConfig, checkpoint: str) -> tuple[list[str], str]:
    """Return the keys by which a trial goes on from a save in another layout, and what that is."""
    draws = "block" if job.parallel.draws_by_block else "stream"
    is_plain = job.slots == 1 and job.zero.stage == 0
    stage, ranks = 0, 1
    if is_plain:
        stage = 3
        if isinstance(job.batch.global_, int) and job.batch.global_ >= 2:
            ranks = 2
    keys = [
        "checkpoint=null",
        f"resume={checkpoint}",
        f"parallel={{draws: {draws}}}",
        f"zero={stage}",
        "offload=device",
        "activations={}",
        "sync=ring",
        f"slots={ranks}",
    ]
    if ranks == 2:
        assert isinstance(job.batch.micro, int)
        assert isinstance(job.batch.global_, int)
        keys.append(f"batch.micro={max(1, min(job.batch.micro, job.batch.global_ // 2))}")
    return keys, f"{ranks} {'ranks' if ranks > 1 else 'rank'} at stage {stage}"
