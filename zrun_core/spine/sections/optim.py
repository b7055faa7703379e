"""The update, and its learning rate over the steps."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from zrun_core.errors import JobError
from zrun_core.spine.sections.auto_values import AutoValue, LaunchFacts
from zrun_core.spine.sections.optimizer_args import (
    ARGS_OF,
    OWN_DEFAULTS,
    WITH_BF16_MOMENTS,
    LambArgs,
    LarsArgs,
    describe_argument_error,
    why_not_sharded,
)
from zrun_core.spine.sections.section import Fraction, Pattern, Positive, Ref, Section, Steps

# Of transformers: the same update, by which kernel it is computed.
_OTHER_WORDS = dict.fromkeys(
    ("adamw_apex_fused", "adamw_hf", "adamw_torch", "adamw_torch_fused"), "adamw"
)
_OF_BITSANDBYTES = re.compile(r"(paged_)?(adamw|lion|rmsprop|ademamix)(_bnb|_torch)?(_(8|32)bit)?")


class OptimConfig(Section):
    """The update: adamw, adam, lion, lamb, lars, any elementwise class of `torch.optim`, or
    `module:attr`. The short form `optim: lion` sets `name`.
    """

    short = ("name", str)

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
        name = name.removeprefix("torch.optim.")
        name = _OTHER_WORDS.get(name, name)
        if "_" in name and _OF_BITSANDBYTES.fullmatch(name):
            raise ValueError(
                f"{name} quantises or pages moments: write adamw or lion, with optim.moments: bf16 "
                "for 2 bytes each, or offload: host for none on the device"
            )
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

    def resolve(self, known: LaunchFacts) -> tuple[Self, tuple[AutoValue, ...]]:
        """Return the section with the hyper-parameters that it leaves to the optimizer."""
        name = self.name.lower()
        defaults = OWN_DEFAULTS.get(name, {})
        found = {key: value for key, value in defaults.items() if getattr(self, key) is None}
        reasons = []
        for key, value in found.items():
            shown = f"{value:g}" if isinstance(value, float) else str(list(value))
            reasons.append(AutoValue(f"optim.{key}", shown, f"{name}'s own"))
        return self.model_copy(update=found), tuple(reasons)


_DECAYING = ("linear", "cosine", "polynomial", "wsd")

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

    def resolve(self, known: LaunchFacts) -> tuple[Self, tuple[AutoValue, ...]]:
        """Return the section with the steps of its decay; auto if these are not known."""
        steps = self.decay_steps
        reasons: tuple[AutoValue, ...] = ()
        if self.decays and steps == "auto":
            fifth = "a fifth of the run" if self.schedule == "wsd" else ""
            if known.steps is not None:
                steps = self.decay_length(known.steps)
                reasons = (AutoValue("lr.decay_steps", str(steps), fifth or "the run's steps"),)
            elif known.epochs is not None:
                what = fifth or "the steps of the run"
                why = f"{what}, known once the data is open: epochs {known.epochs}"
                reasons = (AutoValue("lr.decay_steps", "auto", why),)
        return self.model_copy(update={"decay_steps": steps}), reasons

    @property
    def decays(self) -> bool:
        """True if the rate falls until an end."""
        return self.schedule in _DECAYING

    def decay_end(self, total_steps: int | None) -> int:
        """Return the step at which the decay ends.

        Args:
            total_steps: of the run; None: not known.

        Raises:
            JobError: the end is not known, or comes before that of warm-up.
        """
        end = total_steps
        if self.decay_steps != "auto" and self.schedule != "wsd":
            end = self.decay_steps
        if end is None:
            raise JobError(
                f"lr.schedule: {self.schedule} needs the number of steps, which is not known for "
                "this run: write lr.decay_steps: N, or give the job `steps`, or `epochs` of a "
                "dataset that has a length (`__len__`)"
            )
        if end < self.warmup:
            raise JobError(
                f"lr.warmup: {self.warmup} steps of warm-up are more than the {end} steps of the "
                f"decay: write lr.warmup={max(1, end // 10)} too, or try the whole job in {end} "
                f"steps with zrun train --smoke {end}"
            )
        return end

    def decay_length(self, end: int) -> int:
        """Return what `decay_steps` stands for where the decay ends with step `end`.

        Of wsd the steps that it falls for, the last fifth; else those until its end.
        """
        if self.decay_steps != "auto":
            return self.decay_steps
        return max(1, end // 5) if self.schedule == "wsd" else end
