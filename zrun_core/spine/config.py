"""The keys of a job file: each with its type, default, unit, bounds and meaning.

    JobConfig                                   the whole file
      batch: BatchConfig                        one class per section, in the order of the file
        micro: Samples | Literal["auto"]        one field per key

`JobConfig.model_validate(mapping)` is the only way in. The loader in `zrun.job` adds file positions
to its errors; `zrun explain`, `zrun init --full` and `zrun config schema` are printed from these
classes, descriptions and docstrings included. Nothing here reads a file or the environment, and
nothing imports torch.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from zrun_core.spine.hostname import MAX_SLOTS, checked_item
from zrun_core.spine.optimizer_args import (
    ARGS_OF,
    LAYER_WISE,
    WITH_BF16_MOMENTS,
    LambArgs,
    LarsArgs,
    describe_argument_error,
    why_not_on_disk,
    why_not_sharded,
)
from zrun_core.spine.section import (
    MAX_RANKS,
    NAME_PATTERN,
    Bytes,
    Fraction,
    Pattern,
    Positive,
    Ranks,
    Ref,
    Samples,
    Seconds,
    Section,
    Steps,
    check_pattern,
)
from zrun_core.spine.sizes import format_size

# The data, the batch and the formats of numbers


class DataConfig(Ref):
    """Training data: a reference that returns a map-style or iterable Dataset, and how it is
    read.
    """

    shuffle: bool = Field(
        default=False, description="permute the samples of each epoch by (seed, epoch)"
    )
    workers: int = Field(
        default=0, ge=0, le=256, description="loader processes per rank; 0 loads in the rank itself"
    )
    collate: Ref | None = Field(
        default=None,
        description="function (list of samples) -> batch; default: torch's",
        examples=["train.py:collate"],
    )
    longest: int | None = Field(
        default=None,
        gt=0,
        le=10**8,
        description="tokens of the longest sample, with which zrun estimate plans; default: those "
        "of the longest that it looks at",
        examples=[512],
    )


class BatchConfig(Section):
    """Samples per optimizer step. accumulation = global / (micro * data-parallel ranks) and must be
    whole.
    """

    model_config = ConfigDict(populate_by_name=True)
    short = ("global", int)

    global_: Samples | Literal["auto"] = Field(
        default="auto",
        alias="global",
        description="samples per optimizer step, over all ranks; auto: micro * ranks",
        examples=[512],
    )
    micro: Samples | Literal["auto"] = Field(
        default="auto",
        description="samples per forward pass on one rank; auto: global / ranks, no accumulation",
        examples=[4],
    )

    @model_validator(mode="after")
    def _require_a_number(self) -> Self:
        if self.global_ == "auto" and self.micro == "auto":
            raise ValueError("give batch.global, batch.micro or both: one of them must be a number")
        return self


DtypeName = Literal["fp32", "bf16", "fp16"]


class LossScaleConfig(Section):
    """Dynamic loss scaling of fp16 (Micikevicius et al. 2018, section 3.2)."""

    init: Annotated[float, Field(gt=0, le=2.0**127)] = Field(
        default=65536.0, description="first scale"
    )
    window: Steps = Field(default=2000, description="good steps before the scale doubles")
    hysteresis: Steps = Field(default=1, description="overflows in a row before the scale halves")
    min: Positive = Field(default=1.0, description="the scale never falls below this")


class PrecisionConfig(Section):
    """Number formats. The short form `precision: bf16` sets `compute`."""

    short = ("compute", str)

    compute: DtypeName = Field(
        default="fp32",
        description="forward and backward; parameters as the model sees them",
        examples=["bf16"],
    )
    reduce: Literal["fp32", "compute"] = Field(
        default="fp32",
        description="gradient accumulation and reduction; compute halves the bytes under bf16 or "
        "fp16",
    )
    master: Literal["fp32"] = Field(
        default="fp32", description="the optimizer's copy of the parameters"
    )
    loss_scale: LossScaleConfig = Field(
        default_factory=LossScaleConfig, description="fp16 only", examples=[{"init": 65536}]
    )


# Sharding and the update


class TileConfig(Section):
    """Linears that run in tiles, one after the other, each gathered by itself (Rajbhandari et al.
    2021, "ZeRO-Infinity", section 5.1.3). The short form `tile: 64MiB` sets `bytes`.
    """

    short = ("bytes", int)

    bytes: Annotated[Bytes, Field(gt=0)] = Field(
        description="largest weight of a tile, in the format of computation; smaller linears stay "
        "whole",
        examples=["64MiB"],
    )
    modules: list[Pattern] = Field(
        default_factory=list,
        description="regexes of names of the linears that are tiled; empty: all that can be",
        examples=[["lm_head"]],
    )

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Return the long form of a size, which may be a number with a unit."""
        return {"bytes": value} if type(value) is str else super().expand(value)


class ZeroConfig(Section):
    """Which model states are sharded (Rajbhandari et al. 2020): 0 none, 1 optimizer, 2 + gradients,
    3 + parameters.
    """

    short = ("stage", int)

    stage: Literal[0, 1, 2, 3] = Field(
        default=0, description="0 none, 1 optimizer, 2 + gradients, 3 + parameters", examples=[2]
    )
    bucket: Bytes | Literal["auto"] = Field(
        default="auto",
        description="largest flat unit in bytes of parameters; auto: 64MiB, 12MiB on cpu",
        examples=["64MiB"],
    )
    units: list[Pattern] = Field(
        default_factory=list,
        description="regexes of module names that become flat units of their own",
        examples=[[r"layers\.\d+"]],
    )
    leaf: list[Pattern] = Field(
        default_factory=list,
        description="regexes of modules gathered and reduced as a whole: those that choose what "
        "runs inside",
        examples=[[r"blocks\.\d+\.moe"]],
    )
    shard_group: Ranks | Literal["all", "node"] = Field(
        default="all",
        description="ranks that share one copy of the states; copies are replicated across such "
        "groups",
        examples=["node"],
    )
    persist_below: Bytes = Field(
        default=0,
        description="stage 3: parameters smaller than this many bytes stay whole on every rank",
        examples=["100kB"],
    )
    prefetch: int = Field(
        default=1, ge=0, le=16, description="stage 3: units gathered ahead of their use"
    )
    tile: TileConfig | None = Field(
        default=None,
        description="linears with a larger weight run in tiles of at most these bytes, each a unit "
        "of its own: bytes, or {bytes, modules}; null: none",
        examples=["64MiB"],
    )

    @model_validator(mode="after")
    def _refuse_tiles_that_stay_whole(self) -> Self:
        if self.tile is not None and self.tile.bytes < self.persist_below:
            raise ValueError(
                f"zero.tile: tiles of {format_size(self.tile.bytes)} would stay whole on every "
                f"rank by persist_below: {format_size(self.persist_below)}; write a smaller one"
            )
        return self


class OptimConfig(Section):
    """The update: adamw, adam, lion, lamb, lars, any elementwise class of `torch.optim`, or
    `module:attr`.
    """

    name: str = Field(
        default="adamw",
        description="adamw | adam | sgd | lion | lamb | lars | an elementwise torch.optim class | "
        "module:attr",
    )
    lr: Positive = Field(default=1e-3, description="peak learning rate")
    betas: tuple[Fraction, Fraction] | None = Field(
        default=None,
        description="moment decays; null: the optimizer's own (adam, lamb: 0.9, 0.999; lion: 0.9, "
        "0.99)",
        examples=[[0.9, 0.95]],
    )
    eps: Positive | None = Field(
        default=None,
        description="epsilon; null: the optimizer's own (adam: 1e-8; lamb: 1e-6)",
        examples=[1e-8],
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        le=1e30,
        description="decay of every parameter that no_decay does not name",
        examples=[0.1],
    )
    no_decay: list[Pattern] = Field(
        default_factory=list,
        description="regexes of parameter names without weight decay, and without a trust ratio "
        "of lamb, lars",
        examples=[["bias", "norm"]],
    )
    clip: Positive | None = Field(
        default=None,
        description="largest global gradient norm; null: never clipped",
        examples=[1.0],
    )
    moments: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="format of adam's, adamw's, lamb's and lion's moments; bf16 changes results",
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="more keyword arguments of the optimizer class; "
        f"lamb: {', '.join(LambArgs.model_fields)}; lars: {', '.join(LarsArgs.model_fields)}",
        examples=[{"amsgrad": True}],
    )

    @field_validator("name")
    @classmethod
    def _refuse_what_cannot_be_sharded(cls, name: str) -> str:
        problem = why_not_sharded(name)
        if problem is not None:
            raise ValueError(problem)
        return name

    @field_validator("moments")
    @classmethod
    def _refuse_bf16_without_moments(cls, moments: str, info: ValidationInfo) -> str:
        name = info.data.get("name", "adamw")
        if moments == "bf16" and name.lower() not in WITH_BF16_MOMENTS:
            raise ValueError(
                f"{name} keeps its state in fp32; bf16 is for {', '.join(WITH_BF16_MOMENTS)}"
            )
        return moments

    @field_validator("args")
    @classmethod
    def _check_known_arguments(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        name = info.data.get("name", "adamw").lower()
        section = ARGS_OF.get(name)
        if section is None:
            return args
        try:
            return section.model_validate(args).model_dump(exclude_unset=True)
        except ValidationError as error:
            problems = [describe_argument_error(name, section, each) for each in error.errors()]
            raise ValueError("; ".join(problems)) from None

    @model_validator(mode="after")
    def _refuse_what_the_optimizer_lacks(self) -> Self:
        lacks = {"lars": ("betas", "eps"), "lion": ("eps",)}.get(self.name.lower(), ())
        for key in lacks:
            if getattr(self, key) is not None:
                raise ValueError(f"{self.name} has no {key}; leave optim.{key} out")
        return self


ScheduleName = Literal["constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd"]


class LrConfig(Section):
    """Learning rate over optimizer steps, as a factor of `optim.lr`.

    The default changes nothing.
    """

    short = ("schedule", str)

    schedule: ScheduleName | Ref = Field(
        default="constant",
        description="constant | linear | cosine | polynomial | inverse_sqrt | wsd | module:attr "
        "(step -> factor)",
        examples=["cosine"],
    )
    warmup: int = Field(
        default=0,
        ge=0,
        le=10**12,
        description="optimizer steps of linear warm-up: step k has optim.lr * k / warmup",
        examples=[100],
    )
    decay_steps: Steps | Literal["auto"] = Field(
        default="auto",
        description="steps until the end of the decay; auto: the run's steps (wsd: length of the "
        "decay)",
        examples=[10000],
    )
    min_factor: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="final factor of optim.lr", examples=[0.1]
    )
    power: Positive = Field(default=1.0, le=1000, description="exponent of the polynomial decay")


# Evaluations


class Goal(Section):
    """A number of the evaluation, and which values of it are better."""

    metric: str = Field(
        default="loss",
        description="loss, or a name of eval.metrics; of several sets set/name",
        examples=["loss"],
    )
    mode: Literal["min", "max"] = Field(
        default="min", description="min: lower values are better | max: higher values are better"
    )


class BestConfig(Goal):
    """The step that is kept because an evaluation of it was the best so far."""

    short = ("metric", str)


class EarlyStopConfig(Goal):
    """An early end of the run, by its evaluations. The short form sets `patience`."""

    short = ("patience", int)

    patience: Steps = Field(
        default=3,
        description="evaluations in a row without a better value, after which the run ends",
    )
    min_delta: Annotated[float, Field(ge=0, le=1e30)] = Field(
        default=0.0,
        description="a value is better only if it is by more than this",
    )


def _form_of_data(value: Any) -> str:
    """Return the tag of a value of `eval.data`: one dataset, or several by name."""
    if not isinstance(value, dict) or not value:
        return "one"
    is_reference = not value.keys().isdisjoint(Ref.model_fields)
    return "one" if is_reference else "several"


class EvalConfig(Section):
    """Evaluation on held-out data."""

    data: Annotated[
        Annotated[Ref, Tag("one")] | Annotated[dict[str, Ref], Tag("several")],
        Discriminator(_form_of_data),
    ] = Field(
        description="returns the validation Dataset; or a mapping of names to several",
        examples=["train.py:build_val_data"],
    )
    metrics: Ref | None = Field(
        default=None,
        description="(model, batch) -> {name: (sum, weight)}, beside the loss",
        examples=["train.py:metrics"],
    )
    every: Steps | None = Field(
        default=None,
        description="optimizer steps between evaluations; null: at the end",
        examples=[500],
    )
    samples: Samples | None = Field(
        default=None, description="samples per evaluation; null: all", examples=[1000]
    )
    first: bool = Field(default=False, description="evaluate before the first step too")
    stop: EarlyStopConfig | None = Field(
        default=None,
        description="end early: evaluations without improvement, or {metric, mode, patience, ...}",
        examples=[{"metric": "loss", "patience": 3}],
    )

    @model_validator(mode="after")
    def _check_stop(self) -> Self:
        if self.stop is not None:
            if self.every is None:
                raise ValueError("eval.stop needs eval.every: without it only the end is evaluated")
            self.check_metric("eval.stop.metric", self.stop.metric)
        return self

    def check_metric(self, key: str, metric: str) -> None:
        """Refuse a metric that no evaluation will have, as far as that is known before one.

        Args:
            key: that names the metric.
            metric: "loss" or "accuracy", of several sets "val/loss".

        Raises:
            ValueError: there is no such number.
        """
        losses = [f"{name}/loss" if name else "loss" for name in self.sets]
        if self.metrics is None and metric not in losses:
            problem = f"without eval.metrics there is only {', '.join(losses)}"
        elif isinstance(self.data, dict) and metric.partition("/")[0] not in self.data:
            problem = f"eval.data names several sets; write {losses[0].replace('loss', metric)}"
        else:
            return
        raise ValueError(f"{key}: {metric} is not evaluated: {problem}")

    @field_validator("data")
    @classmethod
    def _check_dataset_names(cls, data: Ref | dict[str, Ref]) -> Ref | dict[str, Ref]:
        if not isinstance(data, dict):
            return data
        for name in data:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}", name):
                what = "write 1 to 32 letters, digits or ._-"
                raise ValueError(f"{name!r} cannot name a dataset: {what}")
        return data

    @property
    def sets(self) -> dict[str, Ref]:
        """The datasets by name; that of a single one is empty."""
        return self.data if isinstance(self.data, dict) else {"": self.data}


# The rest of the loop: activations, checkpoints, weights to start from, hooks


TierName = Literal["device", "host", "disk"]


class ActivationsConfig(Section):
    """Which activations are recomputed in backward (Chen et al. 2016; Korthikanti et al. 2022)."""

    checkpoint: Literal["none", "full", "every_n", "selective"] = Field(
        default="none",
        description="none | full: every block | every_n: one block in n | selective: keep matrix "
        "products",
        examples=["full"],
    )
    n: int = Field(default=2, gt=0, le=1000, description="every_n: one block in n is recomputed")
    offload: TierName = Field(
        default="device",
        description="where the input of a recomputed block waits for backward; on disk: in "
        "offload.dir",
        examples=["device"],
    )

    @model_validator(mode="after")
    def _require_inputs_to_move(self) -> Self:
        if self.offload != "device" and self.checkpoint == "none":
            raise ValueError(
                "activations.offload moves the inputs of recomputed blocks, and none is "
                "recomputed; write checkpoint: full, or leave offload out"
            )
        return self


class OffloadConfig(Section):
    """Where states live between uses (Ren et al. 2021, "ZeRO-Offload"; Rajbhandari et al. 2021,
    "ZeRO-Infinity"). The short form `offload: host` moves the optimizer and the gradients.
    """

    short = ("optimizer", str)

    optimizer: TierName = Field(
        default="device",
        description="fp32 masters and moments; the update runs on the CPU where they are not on "
        "the device",
        examples=["host"],
    )
    grad: TierName | None = Field(
        default=None, description="gradients; null: where the optimizer is", examples=["host"]
    )
    param: TierName = Field(
        default="device",
        description="parameters between uses; elsewhere than on the device needs zero.stage: 3",
        examples=["device"],
    )
    fraction: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = Field(
        default=1.0,
        description="share of the parameters whose states leave the device; auto: the least that "
        "fits",
        examples=["auto"],
    )
    schedule: Literal["overlap", "serial", "delayed"] = Field(
        default="overlap",
        description="overlap: the update runs beside the next forward | serial: training waits, "
        "same bits | delayed: beside forward and backward, one step late, which changes numbers",
    )
    delay_after: Steps = Field(
        default=40, description="delayed: steps that are not delayed, at the beginning"
    )
    dir: str | None = Field(
        default=None,
        description="folder on the disk that states on disk lie on, relative to the job file; "
        "null: the run directory",
        examples=["/scratch"],
    )
    host_memory: Annotated[Bytes, Field(gt=0)] | None = Field(
        default=None,
        description="bytes of each host's memory for states; null: what is free",
        examples=["96GiB"],
    )
    disk_space: Annotated[Bytes, Field(gt=0)] | None = Field(
        default=None,
        description="bytes of each host's disk for states; null: what is free",
        examples=["500GiB"],
    )

    @property
    def grad_tier(self) -> TierName:
        """Tier of the gradients: that of the optimizer, unless said otherwise."""
        return self.optimizer if self.grad is None else self.grad

    @property
    def tiers(self) -> frozenset[TierName]:
        """Tiers on which states of units live."""
        return frozenset((self.optimizer, self.grad_tier, self.param))

    @property
    def of_states_elsewhere(self) -> dict[str, Any]:
        """The keys that are set and count for states elsewhere only, each with its default."""
        fields = type(self).model_fields
        defaults = {name: fields[name].default for name in ("fraction", "schedule", "delay_after")}
        return {name: value for name, value in defaults.items() if getattr(self, name) != value}

    @model_validator(mode="after")
    def _require_states_to_move(self) -> Self:
        for name in self.of_states_elsewhere:
            if self.tiers == {"device"}:
                raise ValueError(
                    f"{name} changes nothing while every state stays on the device; write "
                    f"optimizer: host too, or leave {name} out"
                )
        return self

    @model_validator(mode="after")
    def _refuse_gradients_without_their_optimizer(self) -> Self:
        if self.grad_tier != "device" and self.optimizer == "device":
            raise ValueError(
                "grad: gradients elsewhere than on the device would have to come back for "
                f"an update there; write optimizer: {self.grad_tier} too"
            )
        return self

    @model_validator(mode="after")
    def _refuse_what_cannot_be_delayed(self) -> Self:
        if self.schedule == "delayed" and (self.optimizer, self.param) != ("host", "device"):
            raise ValueError(
                "schedule: delayed keeps the parameters of the step before on the device "
                "and the optimizer on the host; write optimizer: host and param: device, or "
                "schedule: overlap"
            )
        return self


class CheckpointConfig(Section):
    """Saves of the whole state of a run, from which it goes on bit for bit.

    The short form sets `every`.
    """

    model_config = ConfigDict(populate_by_name=True)
    short = ("every", int)

    every: Steps | None = Field(
        default=None, description="optimizer steps between saves", examples=[500]
    )
    minutes: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        default=None,
        description="minutes between saves, by the clock of the first rank",
        examples=[30],
    )
    keep: int = Field(
        default=2,
        ge=2,
        le=10**6,
        description="newest valid steps that are kept; older ones are removed",
    )
    dir: str | None = Field(
        default=None,
        description="folder of the checkpoints; null: checkpoints in the run directory",
        examples=["/data/gpt"],
    )
    async_: bool = Field(
        default=False,
        alias="async",
        description="write in the background, from a copy in host memory",
    )
    busy: Literal["wait", "skip"] = Field(
        default="wait",
        description="async: what a save does that is due while the last one is being written",
    )
    final: bool = Field(default=True, description="save at the end of the run too")
    on_save_error: Literal["stop", "warn"] = Field(
        default="stop", description="stop (exit 8) | warn: go on, up to two failed saves in a row"
    )
    best: BestConfig | None = Field(
        default=None,
        description="keep the best step by a number of eval too: its name, or {metric, mode}",
        examples=[{"metric": "loss", "mode": "min"}],
    )


class InitFromConfig(Section):
    """Weights to start from: a safetensors file or sharded folder, a `state_dict` of torch, or a
    zrun checkpoint.
    """

    short = ("path", str)

    path: str = Field(
        description="file or folder of the weights", examples=["gpt2/model.safetensors"]
    )
    strict: bool = Field(
        default=True, description="false: what the file lacks stays as the model's code made it"
    )
    map: dict[str, str] = Field(
        default_factory=dict,
        description="regex of a name in the file -> name in the model, with groups as \\1; the "
        "first match counts",
        examples=[{r"transformer\.(.*)": r"\1"}],
    )

    @field_validator("map")
    @classmethod
    def _check_map(cls, names: dict[str, str]) -> dict[str, str]:
        for pattern, replacement in names.items():
            check_pattern(pattern)
            try:
                re.sub(
                    pattern, replacement, ""
                )  # the replacement is read even where nothing matches
            except (re.error, IndexError) as error:
                raise ValueError(f"{replacement!r} cannot replace {pattern!r}: {error}") from None
        return names


class HooksConfig(Section):
    """The user's functions called by the loop on every rank, each as f(context)."""

    on_start: Ref | None = Field(
        default=None,
        description="before the first step, and when the run goes on",
        examples=["hooks.py:on_start"],
    )
    on_step: Ref | None = Field(
        default=None,
        description="after every optimizer step",
        examples=["hooks.py:on_step"],
    )
    on_eval: Ref | None = Field(
        default=None,
        description="after every evaluation",
        examples=["hooks.py:on_eval"],
    )
    on_save: Ref | None = Field(
        default=None, description="once a checkpoint is on the disk", examples=["hooks.py:on_save"]
    )
    on_end: Ref | None = Field(
        default=None,
        description="at the end of a run that did not fail",
        examples=["hooks.py:on_end"],
    )


# Hosts and ranks


class LaunchConfig(Section):
    """How ranks are started, on this host and on others."""

    short = ("backend", str)

    backend: Literal["auto", "local", "ssh", "slurm", "env"] = Field(
        default="auto",
        description="auto | local: this host | ssh | slurm: srun starts them | env: another "
        "launcher has done so",
        examples=["ssh"],
    )
    ssh: str = Field(
        default="ssh",
        description="the ssh client, with options as a shell reads them",
        examples=["ssh -F cluster.cfg"],
    )
    python: str | None = Field(
        default=None,
        description="a Python with zrun on the other hosts; null: the path of the one that runs "
        "zrun here",
        examples=["/opt/venv/bin/python"],
    )

    @field_validator("ssh")
    @classmethod
    def _require_a_command(cls, ssh: str) -> str:
        try:
            words = shlex.split(ssh)
        except ValueError as error:
            raise ValueError(f"{ssh!r}: {error}: close the quote") from None
        if not words or words[0].startswith("-") or not ssh.isprintable():
            raise ValueError(
                f"{ssh!r} names no command; write ssh, or ssh with its options: ssh -F cluster.cfg"
            )
        return ssh

    @field_validator("python")
    @classmethod
    def _require_a_path(cls, python: str | None) -> str | None:
        if python is None:
            return None
        if not python.strip() or python.startswith("-") or not python.isprintable():
            raise ValueError(
                f"{python!r} is not the path of a Python; write for example /opt/venv/bin/python"
            )
        return python


Axis = Literal["tp", "dp", "pp"]


# Schedules that update the weights after each micro-batch of each stage.
PIPEDREAMS = ("pipedream", "pipedream_vertical")
PipelineSchedule = Literal[
    "1f1b",
    "gpipe",
    "interleaved",
    "zero_bubble",
    "layer_major",
    "pipedream",
    "pipedream_vertical",
]


class ParallelConfig(Section):
    """How the ranks divide the model: tp inside of layers, pp between layers, dp over the batch."""

    tp: Ranks = Field(
        default=1, description="ranks that share each layer, on one host", examples=[4]
    )
    pp: Ranks = Field(
        default=1, description="stages of the pipeline, each with a part of the layers"
    )
    dp: Ranks | Literal["auto"] = Field(
        default="auto", description="replicas of the whole; auto: ranks / (tp * pp)", examples=[2]
    )
    order: tuple[Axis, Axis, Axis] = Field(
        default=("tp", "dp", "pp"), description="axes of the ranks' numbers, fastest first"
    )
    allow_cross_node_tp: bool = Field(
        default=False, description="let a tp group span hosts that no NVLink joins, which is slow"
    )
    schedule: PipelineSchedule = Field(
        default="1f1b",
        description="order of a step's micro-batches. 1f1b: each goes backward as soon as it can, "
        "which keeps the fewest activations | gpipe: all go forward, then all backward | "
        "interleaved: 1f1b of several chunks per stage, with shorter waits and more messages | "
        "zero_bubble: 1f1b whose weights' gradients are made while a stage would wait | pipedream, "
        "pipedream_vertical: stages never wait, and use older weights | layer_major: one stage; "
        "all micro-batches go through a block before the next one comes: parameters are gathered "
        "or fetched twice per step",
        examples=["interleaved"],
    )
    virtual: Annotated[int, Field(gt=0, le=1024)] = Field(
        default=1,
        description="chunks of the model on each stage: 2 or more with interleaved, whose default "
        "is 2",
        examples=[4],
    )
    split: Literal["auto"] | Annotated[list[str], Field(min_length=1)] = Field(
        default="auto",
        description="names of the blocks with which each chunk but the first begins; auto: by what "
        "the blocks compute",
        examples=[["transformer.h.12"]],
    )

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Return what is given, with the chunks of an interleaved pipeline."""
        if isinstance(value, dict) and value.get("schedule") == "interleaved":
            return {"virtual": 2, **value}
        return super().expand(value)

    @field_validator("order")
    @classmethod
    def _require_each_axis_once(cls, order: tuple[Axis, Axis, Axis]) -> tuple[Axis, Axis, Axis]:
        if len(set(order)) < len(order):
            raise ValueError(
                f"{list(order)} does not have each axis once: write [tp, dp, pp] or another order "
                "of them"
            )
        return order

    @field_validator("schedule")
    @classmethod
    def _require_its_stages(
        cls, schedule: PipelineSchedule, info: ValidationInfo
    ) -> PipelineSchedule:
        pp = info.data.get("pp")
        if schedule == "layer_major" and pp not in (1, None):
            raise ValueError(
                f"layer_major is an order of the whole model on each rank, and pp {pp} divides it; "
                "write schedule: 1f1b, or pp: 1"
            )
        if schedule in ("interleaved", *PIPEDREAMS) and pp == 1:
            raise ValueError(f"{schedule} is an order of several stages; write pp: 2 or more")
        return schedule

    @field_validator("virtual")
    @classmethod
    def _require_a_schedule_with_chunks(cls, virtual: int, info: ValidationInfo) -> int:
        schedule = info.data.get("schedule")
        if schedule == "interleaved" and virtual == 1:
            raise ValueError(
                "interleaved goes through several chunks on each stage; write virtual: 2 or more, "
                "or schedule: 1f1b"
            )
        if schedule not in ("interleaved", None) and virtual > 1:
            raise ValueError(
                f"{virtual} chunks on each stage are for interleaved, and {schedule} has 1; write "
                "schedule: interleaved, or virtual: 1"
            )
        return virtual

    @field_validator("split")
    @classmethod
    def _require_every_border(
        cls, split: list[str] | Literal["auto"], info: ValidationInfo
    ) -> list[str] | Literal["auto"]:
        pp = info.data.get("pp")
        virtual = info.data.get("virtual")
        if split == "auto" or pp is None or virtual is None:
            return split
        chunks = pp * virtual
        if len(split) != chunks - 1:
            raise ValueError(
                f"pp {pp} x virtual {virtual} = {chunks} chunks have {chunks - 1} borders, and it "
                f"names {len(split)}; write the first block of each chunk but the first, or split: "
                "auto"
            )
        return split


# What is printed, and what ends a run


class LogConfig(Section):
    """What is printed. `events.jsonl` always has every step."""

    every: Steps = Field(default=10, description="optimizer steps between printed lines")
    ranks: list[Annotated[int, Field(ge=0, lt=MAX_RANKS)]] | Literal["all"] = Field(
        default=[0],
        description="ranks whose own output is shown while they train: a list, or all; zrun logs "
        "has that of every one",
        examples=[[0, 7]],
    )


class GuardsConfig(Section):
    """What stops a run whose numbers, replicas or memory go wrong."""

    max_skips: Steps = Field(
        default=50, description="skipped steps in a row before the run saves and stops (exit 7)"
    )
    max_nonfinite: Steps = Field(
        default=3,
        description="the same for skips that no loss scale can help: nan losses, any skip without "
        "fp16",
    )
    replica_every: int = Field(
        default=100,
        ge=0,
        le=10**12,
        description="optimizer steps between comparisons of replicas (exit 10); 0: never",
    )
    on_oom: Literal["stop", "skip"] = Field(
        default="stop",
        description="stop | skip: all ranks drop the batch for which one of them lacks memory",
    )


class LimitsConfig(Section):
    """How much memory may be taken, and times after which waiting is an error."""

    memory: Annotated[Bytes, Field(gt=0)] | None = Field(
        default=None,
        description="bytes of each host's memory that the job may take: more is not started; "
        "null: what is free",
        examples=["16GiB"],
    )
    start_s: Seconds = Field(default=300.0, description="seconds for all ranks to arrive")
    collective_s: Seconds = Field(
        default=600.0, description="seconds one collective may wait for other ranks"
    )
    first_step_s: Seconds = Field(
        default=1800.0,
        description="seconds without progress before the second step: imports, building, compiling",
    )
    hang_s: Seconds | None = Field(
        default=None,
        description="seconds without progress in a later step; null: 5 slow steps, at least 60 s",
        examples=[120],
    )
    eval_s: Seconds = Field(
        default=600.0, description="seconds without progress in an evaluation or a hook"
    )
    save_s: Seconds = Field(default=1800.0, description="seconds without progress in a save")
    stop_s: Seconds = Field(
        default=30.0,
        description="seconds to finish the step after a signal, then the run stops at once; a "
        "save has limits.save_s",
    )


# The job


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
    epochs: Samples | None = Field(
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
    sync: Literal["ring", "server"] = Field(
        default="ring",
        description="zero 0: ring | server: one rank sums, updates and sends parameters; a "
        "baseline to compare with",
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
        description="activation checkpointing",
        examples=[{"checkpoint": "full"}],
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
        description="a restart may do with this many hosts; null: with all or none",
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
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda where there is one"
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
        description="times after which waiting is an error",
        examples=[{"start_s": 600}],
    )

    @model_validator(mode="after")
    def _refuse_server_with_shards(self) -> Self:
        if self.sync == "server" and self.zero.stage:
            raise ValueError(
                f"sync: server keeps all states on one rank, and zero {self.zero.stage} divides "
                "them over all; write zero: 0, or leave sync out"
            )
        return self

    @model_validator(mode="after")
    def _refuse_parameters_elsewhere_below_stage_3(self) -> Self:
        if self.offload.param != "device" and self.zero.stage != 3:
            raise ValueError(
                f"offload.param: {self.offload.param} needs zero.stage: 3, where a unit's "
                "parameters come when it runs and leave after it, on one rank too; write "
                "zero: 3, or leave the parameters on the device"
            )
        return self

    @model_validator(mode="after")
    def _refuse_layer_wise_updates_on_disk(self) -> Self:
        name = self.optim.name.lower()
        if name in LAYER_WISE and self.offload.optimizer == "disk":
            raise ValueError(why_not_on_disk(name))
        return self

    @property
    def uses_disk(self) -> bool:
        """True if states or activations live on a disk: in `offload.dir`."""
        return "disk" in (*self.offload.tiers, self.activations.offload)

    @model_validator(mode="after")
    def _refuse_offload_with_server(self) -> Self:
        if self.sync == "server" and self.offload.tiers != {"device"}:
            raise ValueError("sync: server keeps all states on a device; leave offload or sync out")
        return self

    @model_validator(mode="after")
    def _refuse_server_with_parts_of_the_model(self) -> Self:
        parallel = self.parallel
        if self.sync == "server" and parallel.tp * parallel.pp > 1:
            raise ValueError(
                f"sync: server keeps all states on one rank, and tp {parallel.tp} x pp "
                f"{parallel.pp} = {parallel.tp * parallel.pp} ranks share a model; leave sync or "
                "parallel out"
            )
        return self

    @model_validator(mode="after")
    def _refuse_dropped_batches_at_stage_3(self) -> Self:
        if self.guards.on_oom == "skip" and self.zero.stage == 3:
            raise ValueError(
                "guards.on_oom: skip is impossible at zero.stage 3: the other ranks would wait "
                "for parameters of the one that ran out; write stop, or zero.stage: 2"
            )
        return self

    @model_validator(mode="after")
    def _refuse_dropped_batches_of_a_part_of_the_model(self) -> Self:
        model = self.parallel.tp * self.parallel.pp
        if self.guards.on_oom == "skip" and model > 1:
            raise ValueError(
                f"guards.on_oom: skip is impossible where tp {self.parallel.tp} x pp "
                f"{self.parallel.pp} = {model} ranks share a model: the others would wait for the "
                "one that ran out; write on_oom: stop"
            )
        return self

    @model_validator(mode="after")
    def _refuse_late_weights_of_compiled_blocks(self) -> Self:
        if self.parallel.schedule == "zero_bubble" and self.compile:
            raise ValueError(
                "parallel.schedule: zero_bubble makes the gradients of linears' weights apart from "
                "those of their inputs, and compile: true makes them in one graph; write "
                "schedule: 1f1b, or compile: false"
            )
        return self

    @model_validator(mode="after")
    def _refuse_tiles_in_stages(self) -> Self:
        if self.zero.tile is not None and self.parallel.pp > 1:
            raise ValueError(
                f"zero.tile replaces linears of a whole model, and parallel.pp {self.parallel.pp} "
                "leaves each rank a part of it; leave zero.tile out, or write pp: 1"
            )
        return self

    @model_validator(mode="after")
    def _refuse_what_steps_of_one_micro_batch_lack(self) -> Self:
        if self.parallel.schedule not in PIPEDREAMS:
            return self
        key = f"parallel.schedule: {self.parallel.schedule}"
        if self.optim.clip is not None:
            raise ValueError(
                f"{key}: a stage updates its weights without waiting for the others, and optim."
                "clip needs the gradient norm of all of them; leave optim.clip out, or write "
                "schedule: 1f1b"
            )
        if self.precision.compute == "fp16":
            raise ValueError(
                f"{key}: a stage updates its weights without waiting for the others, and the loss "
                "scale of fp16 needs to know of overflows in all of them; write precision: bf16, "
                "or schedule: 1f1b"
            )
        if self.zero.stage > 1:
            raise ValueError(
                f"{key} keeps versions of the weights whose gradients are summed at each update: "
                f"zero {self.zero.stage} would shard them; write zero: 1, or schedule: 1f1b"
            )
        if self.offload.tiers != {"device"}:
            raise ValueError(
                f"{key} updates each stage between its passes, and states elsewhere are updated "
                "beside them; leave offload out, or write schedule: 1f1b"
            )
        return self

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        if self.checkpoint is not None and self.checkpoint.best is not None:
            if self.eval is None:
                raise ValueError("checkpoint.best needs an evaluation; write eval: {data: ...}")
            self.eval.check_metric("checkpoint.best.metric", self.checkpoint.best.metric)
        return self

    @model_validator(mode="after")
    def _require_one_length(self) -> Self:
        given = [key for key in ("steps", "tokens", "epochs") if getattr(self, key) is not None]
        if len(given) != 1:
            what = " and ".join(given) if given else "none of them"
            raise ValueError(f"give exactly one of steps, tokens, epochs (found {what})")
        return self
