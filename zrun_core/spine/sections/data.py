"""Training data, and the samples of a step."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from zrun_core.spine.sections.section import Ref, Samples, Section


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
        description="tokens of the longest sample, for zrun estimate; default: the longest of "
        "those that it reads",
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
