"""The subject of an estimate: a job, a size or a `config.json`, on hosts that are there or not.

question = of_job(load_job(path), cluster)           # on hosts as they were found
question = of_job_on(load_job(path), hardware)       # on hardware by name
question = of_model("7.5B", hardware)                # a model of that size, and no job

A size and a `config.json` are jobs, too: their model is built by zrun or by transformers, and their
data is blank text. All models are traced.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zrun.estimate import answer_cache
from zrun.estimate.forecast import PATIENCE_S, UNRELATED
from zrun.hosts.cluster import Cluster
from zrun.job import overrides as command_line
from zrun.job.document import Document
from zrun.job.load import LoadedJob
from zrun.job.validate import validate
from zrun.placement.plan import make_plan
from zrun_core.errors import JobError
from zrun_core.spine.cache import cache_folder
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import ParallelDims, resolve_shard_size
from zrun_core.spine.spec import BatchPlan, offload_folder

if TYPE_CHECKING:
    from zrun_core.hardware.hardware import Hardware
    from zrun_core.plan.answer.planner import Planner
    from zrun_core.plan.question.candidate import Candidate
    from zrun_core.plan.question.size import SizedGPT
    from zrun_core.plan.trace.profile import Profile

POLICIES = ("none", "selective", "every_n", "full")
_SIZED = "zrun_core.models.gpt:gpt"
_BLANK_TEXT = "zrun_core.data.text:text"  # which no trace reads
_OF_CONFIG = "zrun_core.models.transformers_config:model"
_TEXT_OF_CONFIG = "zrun_core.models.transformers_config:text"
_MOST_TRACES = 2  # at a time: each reads the data and imports the code of the job
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Keys that change no trace.
_ALONE = (
    "zero.",
    "activations.checkpoint",
    "activations.offload",
    "offload",
    "parallel.",
    "batch.",
)


@dataclass(frozen=True)
class Question:
    """A model, what runs it, and how the job asks for it.

    The model is looked at when `planner` or `base` is first asked for.

    Attributes:
        title: the name of the job, or what was given in its place.
        job: without any auto, on this hardware.
        asked: what the job asks for.
        plan: makes `planner`.
        config: as it is written; None where there is no job.
        names_stage: whether a ZeRO stage was asked for; else it is the lowest that fits.
        names_share: whether the share of the states that leave the device was; else it is the least
            that fits.
        key: of its answers; None: they cannot be kept.
        patience_s: seconds that the model and its data may take.
    """

    title: str
    hardware: Hardware
    job: JobConfig
    batch: BatchPlan
    asked: Candidate
    plan: Callable[[], Planner]
    config: JobConfig | None = None
    names_stage: bool = True
    names_share: bool = True
    key: str | None = None
    patience_s: float = PATIENCE_S

    @cached_property
    def planner(self) -> Planner:
        """The estimates of its model on its hardware.

        Raises:
            JobError: the job names what does not exist.
            UserCodeError: the job's own code fails.
        """
        return self.plan()

    @cached_property
    def base(self) -> Candidate:
        """The candidate to be estimated."""
        if not self.names_stage:
            return _least_stage(self.planner, self.asked)
        if not self.names_share:
            from zrun_core.plan.answer.least_share import with_least_share

            return with_least_share(self.planner, self.asked)
        return self.asked


def of_job(
    loaded: LoadedJob,
    cluster: Cluster,
    environ: Mapping[str, str] = os.environ,
    patience_s: float = PATIENCE_S,
) -> Question:
    """Return the question of a job on hosts as they were found.

    Args:
        patience_s: seconds that the model and its data may take; what is known by then counts.

    Raises:
        JobError: the job cannot run there, or names what does not exist.
        PreflightError: a host lacks what it asks for.
        UserCodeError: the job's own code fails.
    """
    from zrun.estimate.machine import hardware_of

    resolved = make_plan(loaded.config, cluster)
    device = "cpu" if resolved.job.device == "cpu" else "cuda"
    per_host = max(len(resolved.plan.ranks_on(host)) for host in resolved.plan.hosts)
    limit = resolved.job.limits.memory
    folder = offload_folder(resolved.job, loaded.path.absolute().parent, Path("runs"))
    hardware = hardware_of(cluster, device, per_host, environ, limit, folder)
    return _question(loaded, resolved.job, resolved.batch, hardware, patience_s)


def of_job_on(loaded: LoadedJob, hardware: Hardware, patience_s: float = PATIENCE_S) -> Question:
    """Return the question of a job on hardware by name, with a rank on each of its devices.

    Raises:
        JobError: the batch or `parallel` do not divide over it, or the job names what does not
            exist.
        UserCodeError: the job's own code fails.
    """
    job, batch = _resolved_on(loaded.config, hardware)
    return _question(loaded, job, batch, hardware, patience_s)


def of_model(
    text: str,
    hardware: Hardware,
    overrides: Sequence[str] = (),
    seq: int | None = None,
    environ: Mapping[str, str] = os.environ,
    patience_s: float = PATIENCE_S,
) -> Question:
    """Return the question of a model of a size, or of a `config.json`.

    Args:
        seq: tokens per sample; None: as many as the model is for.
        patience_s: seconds that the model may take; what is known by then counts.

    Raises:
        JobError: `text` is neither, or an override is wrong.
    """
    title, loaded = _job_of_model(text, hardware, overrides, seq, environ)
    job, batch = _resolved_on(loaded.config, hardware)
    names_stage = any(each.partition("=")[0] in ("zero", "zero.stage") for each in overrides)
    question = _question(loaded, job, batch, hardware, patience_s)

    def plan() -> Planner:
        try:
            return question.plan()
        except JobError as error:
            if loaded.config.model.call == _SIZED:
                raise
            raise JobError(f"{text}: {error}") from None

    key = question.key and f"{question.key}-{'as-asked' if names_stage else 'any-stage'}"
    return replace(question, title=title, plan=plan, config=None, names_stage=names_stage, key=key)


def names_model_only(text: str) -> bool:
    """Return True if `text` is the size of a model or a `config.json`, not a job file."""
    path = Path(text)
    return path.suffix == ".json" or not (path.exists() or path.suffix in (".yaml", ".yml"))


def with_other_keys(question: Question, loaded: LoadedJob, key: str) -> Question:
    """Return the same question of a job with other keys; without a new trace where none is needed.

    Args:
        key: the one key that differs.
    """
    divides = key == "parallel" or key.startswith("parallel.plan")
    if divides or not key.startswith(_ALONE):  # another model, or another format
        return of_job_on(loaded, question.hardware, question.patience_s)
    job, batch = _resolved_on(loaded.config, question.hardware)
    asked = _candidate(job, batch, question.hardware)
    return replace(
        question,
        job=job,
        batch=batch,
        asked=asked,
        names_share=job.offload.fraction != "auto",
        plan=lambda: question.planner,
        key=None,
    )


def _question(
    loaded: LoadedJob,
    job: JobConfig,
    batch: BatchPlan,
    hardware: Hardware,
    patience_s: float,
) -> Question:
    from zrun_core.plan.trace.trace_process import key_of_trace

    job_dir = loaded.path.absolute().parent
    hardware = _with_limits(hardware, job)
    asked = _candidate(job, batch, hardware)

    def plan() -> Planner:
        from zrun_core.spine.sections.section import Ref
        from zrun_core.user_code import user

        profile = _profile(job, job_dir, hardware, asked, patience_s, 1, False)
        at_once = _traces_at_once(profile, hardware, asked)
        shared_s = patience_s * at_once  # of cores that several may have to share

        def divide(tp: int, sequence: bool) -> Profile:
            return _profile(job, job_dir, hardware, asked, shared_s, tp, sequence)

        from zrun_core.plan.answer.planner import Planner
        from zrun_core.plan.trace.parameters_only import with_bounds
        from zrun_core.plan.trace.trace_process import end_all

        return Planner(
            with_bounds(profile, (asked.checkpoint,)),
            hardware,
            job,
            divide=divide,
            at_once=at_once,
            end=end_all,
            load=lambda name: user.load(Ref(call=name), job_dir),
        )

    key = None
    if ":" not in job.optim.name:  # of an optimizer of the job's own nobody notes the files
        traced = key_of_trace(job, job_dir, **_of_trace(hardware, asked))
        written = loaded.config.model_dump(mode="json", by_alias=True, exclude=set(UNRELATED))
        key = answer_cache.key_of(
            {"trace": traced, "written": written, **_facts(job, batch, hardware)}
        )
    return Question(
        job.name,
        hardware,
        job,
        batch,
        asked,
        plan,
        loaded.config,
        names_share=job.offload.fraction != "auto",
        key=key,
        patience_s=patience_s,
    )


def _with_limits(hardware: Hardware, job: JobConfig) -> Hardware:
    """Return hardware of which a job takes no more for states than it says."""
    disk_bytes = hardware.disk_bytes
    if job.offload.disk_space is not None:
        disk_bytes = min(disk_bytes, job.offload.disk_space)
    return replace(hardware, disk_bytes=disk_bytes, offload_bytes=job.offload.host_memory)


def _facts(job: JobConfig, batch: BatchPlan, hardware: Hardware) -> dict[str, Any]:
    return {
        "job": job.model_dump(mode="json", by_alias=True, exclude=set(UNRELATED)),
        "batch": batch.model_dump(),
        "hardware": repr(hardware),
    }


def _of_trace(hardware: Hardware, asked: Candidate) -> dict[str, Any]:
    device = "cpu" if hardware.device.kind == "cpu" else "cuda"
    policies = tuple(dict.fromkeys((asked.checkpoint, *POLICIES)))  # what is asked for comes first
    ranks = min(hardware.devices_per_node, asked.dims.world_size)
    return {
        "micros": (asked.micro,),
        "checkpoints": policies,
        "device": device,
        "threads": max(1, hardware.cores // ranks) if device == "cpu" else 1,
    }


def _profile(
    job: JobConfig,
    job_dir: Path,
    hardware: Hardware,
    asked: Candidate,
    patience_s: float,
    tp: int,
    sequence: bool,
) -> Profile:
    """Return what the first of `tp` ranks has of a job's model, and what it computes."""
    from zrun.job.environment import worker_environment
    from zrun_core.plan.trace.trace_process import trace_in_subprocess

    # What comes next needs torch: it is imported while the other process traces.
    ahead = threading.Thread(target=_import_planner, daemon=True)
    ahead.start()
    profile = trace_in_subprocess(
        _divided(job, tp, sequence),
        job_dir,
        **_of_trace(hardware, asked),
        environment=worker_environment(job, os.environ),
        timeout_s=patience_s,
    )
    ahead.join()
    return profile


def _traces_at_once(whole: Profile, hardware: Hardware, asked: Candidate) -> int:
    """Return how many ways to divide a model there is room to trace at a time, with two at most.

    A model that runs for real takes the memory of its values: one after the other.
    """
    from zrun_core.spine import memory_limits

    if whole.source != "traced" or not whole.tracing_bytes:
        return 1
    threads: int = _of_trace(hardware, asked)["threads"]
    cores = len(os.sched_getaffinity(0)) // threads
    room = memory_limits.host_available() // (2 * whole.tracing_bytes)
    most: int = max(1, min(_MOST_TRACES, cores, room))
    return most


def _divided(job: JobConfig, tp: int, sequence: bool) -> JobConfig:
    """Return a job whose model is divided over `tp` ranks, with slices of the sequence or not."""
    changed: dict[str, Any] = {"tp": tp, "sequence": sequence}
    activations = job.activations
    if tp == 1:  # there is nothing to divide
        changed["plan"] = "auto"
        activations = activations.model_copy(update={"partition": False})
    parallel = job.parallel.model_copy(update=changed)
    return job.model_copy(update={"parallel": parallel, "activations": activations})


def _import_planner() -> None:
    import zrun_core.plan.answer.search  # noqa: F401


def _resolved_on(config: JobConfig, hardware: Hardware) -> tuple[JobConfig, BatchPlan]:
    device: Literal["cpu", "cuda"] = "cpu" if hardware.device.kind == "cpu" else "cuda"
    asked = config.model_copy(update={"device": device, "slots": hardware.devices_per_node})
    facts = asked.launch_facts(device, hardware.num_devices)
    job, _ = asked.resolve(facts)
    group = job.zero.shard_group
    if isinstance(group, int) and job.zero.stage and facts.dp % group:
        raise JobError(
            f"zero.shard_group: groups of {group} do not divide {facts.dp} data-parallel ranks"
        )
    return job, BatchPlan.of(job.batch, facts.dp)


def _candidate(job: JobConfig, batch: BatchPlan, hardware: Hardware) -> Candidate:
    from zrun_core.memory.buffers import placement_of
    from zrun_core.plan.question.candidate import Candidate

    parallel = job.parallel
    dims = ParallelDims.of(parallel)
    shard = resolve_shard_size(job.zero, dims.dp, dims.dp_per_host(hardware.devices_per_node))
    if job.zero.stage and shard != dims.dp:
        dims = replace(dims, shard=shard)
    return Candidate(
        job.zero.stage,
        dims,
        batch.micro,
        batch.accumulation,
        job.activations.checkpoint,
        job.precision.compute,
        placement=placement_of(job.offload, job.activations, hardware.device.kind),
        sequence_parallel=dims.tp > 1 and parallel.sequence,
        init=job.init,
        schedule=parallel.schedule,
        split=() if parallel.split == "auto" else tuple(parallel.split),
        partition=job.activations.partition,
    )


def _job_of_model(
    text: str,
    hardware: Hardware,
    overrides: Sequence[str],
    seq: int | None,
    environ: Mapping[str, str],
) -> tuple[str, LoadedJob]:
    """Return the title and the job of a model without one: micro-batches of one, blank text.

    It is in bf16 where the device has it, and no host builds the whole of it.
    """
    precision = next((name for name in ("bf16", "fp16") if name in hardware.device.peak), "fp32")
    if Path(text).suffix == ".json":
        config = _read_config(Path(text))
        title = str(config["model_type"])
        model, model_args = _OF_CONFIG, {}
        data, data_args = _TEXT_OF_CONFIG, {} if seq is None else {"seq_len": seq}
    else:
        config = None
        title = f"GPT of {text.strip()}"
        gpt = _gpt(text)
        model, model_args = _SIZED, gpt.args(seq)
        data, data_args = _BLANK_TEXT, {"seq_len": seq or gpt.seq}
    given: dict[str, Any] = {
        "name": "size",
        "model": {"call": model, "args": model_args},
        "data": {"call": data, "args": data_args},
        "steps": 1,
        "batch": {"micro": 1},
        "precision": precision,
        "init": "meta",
    }
    lines = (f"{key}: {json.dumps(value)}\n" for key, value in given.items())
    document = Document.parse("".join(lines), text, environ)
    command_line.apply(document, overrides, environ)
    job = validate(document)
    if ":" in job.optim.name:
        raise JobError(
            f"optim.name: {job.optim.name} is the job's own code, and this estimate has no job"
        )
    if config is not None:  # as it is, whatever looks like a variable or a number in it
        changed = {
            key: ref.model_copy(update={"args": {**ref.args, "config": config}})
            for key, ref in (("model", job.model), ("data", job.data))
        }
        job = job.model_copy(update=changed)
    # A folder without code: it is the same wherever the question is asked.
    return title, LoadedJob(job, cache_folder("models") / "size.yaml", {})


def _gpt(text: str) -> SizedGPT:
    from zrun_core.plan.question.size import gpt_of_size

    try:
        return gpt_of_size(text)
    except JobError as error:
        if _HUB_NAME.fullmatch(text):
            raise JobError(
                f"{text} is not a file; for a model of the Hub give its config.json (hf "
                f"download {text} config.json) or its size, such as 7.5B: zrun downloads "
                "nothing"
            ) from None
        raise JobError(f"{text!r} is neither a file nor the size of a model: {error}") from None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise JobError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise JobError(
            f"{path} is not JSON: name the config.json of a transformers model"
        ) from None
    if not isinstance(config, dict):
        raise JobError(f"{path} is not a JSON object: name the config.json of a transformers model")
    if "model_type" not in config:
        raise JobError(f"{path} has no model_type: name the config.json of a transformers model")
    return config


def _least_stage(planner: Planner, base: Candidate) -> Candidate:
    """Return the lowest stage that fits; the highest if none does."""
    stages = [replace(base, stage=stage) for stage in range(4)]
    for each in stages:
        if planner.estimate(each, traffic=False, all_stages=False).fits:
            return each
    return stages[-1]
