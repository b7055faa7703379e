"""Number formats, and the loss scale of fp16."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from zrun_core.spine.sections.section import Positive, Section, Steps

DtypeName = Literal["fp32", "bf16", "fp16"]
# What torch, Lightning and accelerate call them.
_OTHER_WORDS = {
    "no": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "16": "fp16",
    "16-mixed": "fp16",
}


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

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Take a number of bits too: `precision: 16`."""
        return super().expand(str(value) if type(value) is int else value)

    @field_validator("compute", mode="before")
    @classmethod
    def _take_other_words(cls, name: Any) -> Any:
        plain = name.removeprefix("torch.") if isinstance(name, str) else name
        return _OTHER_WORDS.get(plain, plain) if isinstance(plain, str) else plain
