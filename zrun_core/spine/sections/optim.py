"""The update, and its learning rate over the steps."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from zrun_core.spine.sections.optimizer_args import (
    ARGS_OF,
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
