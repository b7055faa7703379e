"""The keys of a job file: type, default, unit, bounds, meaning; and what they refuse together.

    JobConfig                                   the whole file
      batch: BatchConfig                        one class per section, each in `spine.sections`
        micro: Samples | Literal["auto"]        one field per key

`JobConfig.model_validate(mapping)` is the only way in. A section refuses what is wrong by itself,
`spine.combinations` what sections refuse of each other. Once a launch is known, `resolve` of each
section puts values in place of `auto`. The loader in `zrun.job` adds file
positions to the errors; `zrun explain`, `zrun init --full` and `zrun config schema` are printed
from these classes, descriptions and docstrings included. Nothing here reads a file or the
environment, and nothing imports torch.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from zrun_core.spine import combinations, device_names
from zrun_core.spine.hostname import MAX_SLOTS, checked_item
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.spine.sections.auto_values import AutoValue, LaunchFacts
from zrun_core.spine.sections.checkpoint import CheckpointConfig, InitFromConfig
from zrun_core.spine.sections.data import BatchConfig, DataConfig
from zrun_core.spine.sections.evaluation import EvalConfig
from zrun_core.spine.sections.guards import GuardsConfig, LimitsConfig
from zrun_core.spine.sections.hooks import HooksConfig
from zrun_core.spine.sections.launch import LaunchConfig, LogConfig
from zrun_core.spine.sections.offload import OffloadConfig
from zrun_core.spine.sections.optim import LrConfig, OptimConfig
from zrun_core.spine.sections.parallel import ParallelConfig
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.spine.sections.profile import ProfileConfig
from zrun_core.spine.sections.section import NAME_PATTERN, Ranks, Ref, Samples, Section, Steps
from zrun_core.spine.sections.zero import ZeroConfig

_MAX_VARIABLE_BYTES = (1 << 17) - 1  # MAX_ARG_STRLEN of Linux, with the NUL at its end
# Sections that are asked, and told of, before the others, which follow in the order of the file.
_RESOLVED_FIRST = ("parallel", "batch", "zero", "lr")


def _checked_device(name: Any) -> Any:
    """Refuse a device that is known, and on which nothing trains."""
    if (why := device_names.why_refused(name)) is not None:
        raise ValueError(why)
    return name


def _checked_epochs(number: Any) -> Any:
    """Refuse a part of an epoch in words: steps count it."""
    if isinstance(number, float) and not number.is_integer() and 0 < number < math.inf:
        raise ValueError(
            f"{number:g} is not a whole number of epochs: for a part of one write steps: N, the "
            "samples of that part / batch.global"
        )
    return number


class JobConfig(Section):
    """A training job, as asked for. Defaults add nothing that the job does not say."""

    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")] = Field(
        description="names the run directory", examples=["gpt-1b"]
    )
    model: Ref = Field(
        description="returns the nn.Module to train", examples=["train.py:build_model"]
    )
    data: DataConfig = Field(
        description="returns the training Dataset", examples=["train.py:build_data"]
    )
    loss: Ref | None = Field(
        default=None,
        description="(model, batch) -> loss or (sum, weight); null: the model's own loss",
        examples=["train.py:loss_fn"],
    )
    steps: Steps | None = Field(
        default=None, description="optimizer steps to train", examples=[10000]
    )
    tokens: Annotated[int, Field(gt=0, le=10**18)] | None = Field(
        default=None,
        description="train until this many tokens were consumed",
        examples=[1_000_000_000],
    )
    epochs: Annotated[Samples | None, BeforeValidator(_checked_epochs)] = Field(
        default=None, description="passes over the data; the last step may be short", examples=[3]
    )
    batch: BatchConfig = Field(
        description="samples per step: {global, micro}", examples=[{"global": 512, "micro": 4}]
    )
    precision: PrecisionConfig = Field(
        default_factory=PrecisionConfig,
        description="fp32 | bf16 | fp16 | {compute, reduce, master, loss_scale}",
        examples=["bf16"],
    )
    zero: ZeroConfig = Field(
        default_factory=ZeroConfig, description="0 | 1 | 2 | 3 | {stage, ...}", examples=[2]
    )
    sync: Literal["ring", "server", "async_server"] = Field(
        default="ring",
        description="zero 0: ring | server: one rank sums, updates and sends parameters; a "
        "baseline to compare with | async_server: it updates by each gradient as it comes, and "
        "nobody waits; changes numerics",
    )
    staleness: Annotated[int, Field(ge=0, le=10**6)] | Literal["any"] = Field(
        default=0,
        description="sync: async_server: pushes that a rank may be ahead of the slowest; 0 has the "
        "numbers of sync: server; any: no bound but that all ranks meet after 32 steps at most",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="seed of the model factory, the data order, what samples draw, and dropout",
    )
    init: Literal["factory", "meta"] = Field(
        default="factory",
        description="factory: the model's code runs once per host | meta: modules reset "
        "themselves, shard by shard",
    )
    optim: OptimConfig = Field(
        default_factory=OptimConfig,
        description="optimizer and its hyper-parameters",
        examples=[{"lr": 3e-4}],
    )
    lr: LrConfig = Field(
        default_factory=LrConfig,
        description="learning-rate schedule by optimizer step",
        examples=[{"schedule": "cosine", "warmup": 100}],
    )
    eval: EvalConfig | None = Field(
        default=None,
        description="evaluation; null: none",
        examples=[{"data": "train.py:build_val_data", "every": 500}],
    )
    activations: ActivationsConfig = Field(
        default_factory=ActivationsConfig,
        description="activation checkpointing: none | full | every_n | selective | {checkpoint, "
        "n, offload, partition}",
        examples=["full"],
    )
    offload: OffloadConfig = Field(
        default_factory=OffloadConfig,
        description="which states live on the host or on a disk between uses",
        examples=["host"],
    )
    checkpoint: CheckpointConfig | None = Field(
        default=None,
        description="saves: steps between them, or {every, minutes, keep, dir, async, ...}; null: "
        "none",
        examples=[{"every": 500}],
    )
    resume: str | Annotated[int, Field(ge=0, le=10**12)] = Field(
        default="never",
        description="never | auto: from the newest checkpoint of this job, if there is one | "
        "a step | best: the one that checkpoint.best keeps | a path",
        examples=["auto"],
    )
    restarts: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="how often the run is started again after a killed worker, a hang or a lost "
        "host",
        examples=[3],
    )
    min_hosts: Ranks | None = Field(
        default=None,
        description="fewest hosts that a restart may use; null: all of them",
        examples=[2],
    )
    init_from: InitFromConfig | None = Field(
        default=None,
        description="weights to start from; null: the model's own",
        examples=["weights.safetensors"],
    )
    compile: bool = Field(default=False, description="torch.compile each repeated block")
    hooks: HooksConfig = Field(
        default_factory=HooksConfig,
        description="functions called by the loop",
        examples=[{"on_step": "hooks.py:on_step"}],
    )
    hosts: (
        str
        | Annotated[list[Annotated[str, AfterValidator(checked_item)]], Field(min_length=1)]
        | None
    ) = Field(
        default=None,
        description="a host file (name slots=N on each line) or a list of name:slots; null: this "
        "host, or Slurm's",
        examples=[["node1:8", "node2:8"]],
    )
    launch: LaunchConfig = Field(
        default_factory=LaunchConfig,
        description="how ranks are started: auto | local | ssh | slurm | env, or {backend, ssh, "
        "python}",
        examples=[{"ssh": "ssh -F cluster.cfg"}],
    )
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig,
        description="tensor and pipeline parallelism",
        examples=[{"tp": 4, "pp": 2}],
    )
    slots: Annotated[int, Field(gt=0, le=MAX_SLOTS)] | Literal["auto"] = Field(
        default="auto", description="ranks on a host; auto: its GPUs, else 1", examples=[8]
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], BeforeValidator(_checked_device)] = Field(
        default="auto", description="auto: cuda where there is one, ROCm's GPUs included"
    )
    threads: Annotated[int, Field(gt=0, le=1024)] | Literal["auto"] = Field(
        default="auto", description="CPU threads per rank; auto: usable cores / ranks", examples=[4]
    )
    bind: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: each rank keeps to cores of its own near its GPU, unless you bind by "
        "hand",
    )
    log: LogConfig = Field(
        default_factory=LogConfig, description="printed output", examples=[{"every": 1}]
    )
    profile: ProfileConfig | None = Field(
        default=None,
        description="steps that torch's profiler traces: [first, last] or {steps, ranks}; null: "
        "none",
        examples=[{"steps": [10, 12], "ranks": [0]}],
    )
    env: dict[str, str | None] = Field(
        default_factory=dict,
        description="environment of the workers; null: required, taken from the shell",
        examples=[{"NCCL_DEBUG": "INFO"}],
    )
    guards: GuardsConfig = Field(
        default_factory=GuardsConfig,
        description="what stops a run that goes wrong",
        examples=[{"max_nonfinite": 10}],
    )
    limits: LimitsConfig = Field(
        default_factory=LimitsConfig,
        description="largest memory of a host, and time limits of waiting",
        examples=[{"start_s": 600}],
    )

    @field_validator("env")
    @classmethod
    def _refuse_what_no_environment_holds(cls, env: dict[str, str | None]) -> dict[str, str | None]:
        """Values may be secrets: messages name the variable alone."""
        for name, value in env.items():
            shown = repr(name[:60])
            if not name or "=" in name or "\0" in name:
                raise ValueError(f"{shown} is no name of a variable: write letters, digits and _")
            if value is not None and "\0" in value:
                raise ValueError(f"the value of {shown} holds a NUL, which no variable can")
            num_bytes = len(f"{name}={value or ''}".encode())
            if num_bytes > _MAX_VARIABLE_BYTES:
                raise ValueError(
                    f"the value of {shown} makes a variable of {num_bytes} bytes, of which Linux "
                    f"takes at most {_MAX_VARIABLE_BYTES}: write it to a file, and give its path"
                )
        return env

    def launch_facts(self, device: Literal["cpu", "cuda"], num_ranks: int) -> LaunchFacts:
        """Return what sections resolve their `auto` from, on this many ranks of a kind."""
        model_ranks = self.parallel.model_ranks
        return LaunchFacts(device, num_ranks, model_ranks, self.steps, self.epochs)

    def resolve(self, known: LaunchFacts) -> tuple[Self, tuple[AutoValue, ...]]:
        """Return the job with each section resolved, and why each value is what it is.

        Open stay the keys beside sections (`slots`, `device`, `threads`, `bind`), which hosts
        decide.

        Raises:
            JobError: as for `resolve` of each section.
        """
        changed: dict[str, Section] = {}  # the others stay as they are, also in what was given
        reasons: list[AutoValue] = []
        for name in dict.fromkeys((*_RESOLVED_FIRST, *type(self).model_fields)):
            section = getattr(self, name)
            if isinstance(section, Section):
                resolved, why = section.resolve(known)
                reasons += why
                if resolved is not section:
                    changed[name] = resolved
        return self.model_copy(update=changed), tuple(reasons)

    @property
    def changes_numerics(self) -> str:
        """The key by which updates are by gradients of older parameters; "" : none is."""
        if self.sync == "async_server" and self.staleness != 0:
            return f"sync: async_server, staleness {self.staleness}"
        if self.parallel.facts.updates_each:
            return f"parallel.schedule: {self.parallel.schedule}"
        return ""

    @property
    def uses_disk(self) -> bool:
        """True if states or activations live on a disk: in `offload.dir`."""
        return "disk" in (*self.offload.tiers, self.activations.offload)

    @model_validator(mode="after")
    def _refuse_combinations(self) -> Self:
        combinations.refuse_server_with_shards(self.sync, self.zero)
        combinations.refuse_parameters_elsewhere_below_stage_3(self.offload, self.zero)
        combinations.refuse_layer_wise_updates_on_disk(self.optim, self.offload)
        combinations.refuse_server_with_offload(self.sync, self.offload)
        combinations.refuse_server_with_parts_of_the_model(self.sync, self.parallel)
        combinations.refuse_staleness_without_async_server(self.sync, self.staleness)
        if self.sync == "async_server":
            combinations.refuse_what_async_server_lacks(
                self.optim, self.precision, self.zero, self.offload, self.parallel
            )
            combinations.refuse_batches_that_async_server_cannot_deal_out(
                self.data, self.guards, self.device
            )
        combinations.refuse_dropped_batches_at_stage_3(self.guards, self.zero)
        combinations.refuse_dropped_batches_of_a_part_of_the_model(self.guards, self.parallel)
        combinations.refuse_late_weights_of_compiled_blocks(self.parallel, self.compile)
        combinations.refuse_tiles_in_parts(self.zero, self.parallel)
        combinations.refuse_partition_without_tensor_groups(self.activations, self.parallel)
        if self.parallel.facts.updates_each:
            combinations.refuse_what_pipedream_lacks(
                self.parallel.schedule, self.optim, self.precision, self.zero, self.offload
            )
        if self.profile is not None:
            combinations.refuse_profile_beyond_the_end(self.profile, self.steps)
        if self.checkpoint is not None and self.checkpoint.best is not None:
            combinations.check_best(self.checkpoint.best, self.eval)
        return self

    @model_validator(mode="after")
    def _require_one_length(self) -> Self:
        given = [key for key in ("steps", "tokens", "epochs") if getattr(self, key) is not None]
        if len(given) != 1:
            what = " and ".join(given) if given else "none of them"
            raise ValueError(f"give exactly one of steps, tokens, epochs (found {what})")
        return self
