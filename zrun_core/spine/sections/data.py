"""Training data, and the samples of a step."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from zrun_core.errors import JobError
from zrun_core.sizes import several
from zrun_core.spine.sections.auto_values import AutoValue, LaunchFacts
from zrun_core.spine.sections.section import Ref, Samples, Section

_MAX_ACCUMULATION = 100_000  # micro-batches of a rank in one step


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

    def resolve(self, known: LaunchFacts) -> tuple[Self, tuple[AutoValue, ...]]:
        """Return the batch in numbers.

        Raises:
            JobError: as for `over`.
        """
        found = self.over(known.dp)
        ranks = several(known.dp, "rank")
        reasons = []
        if self.global_ == "auto":
            why = f"micro {found.micro} x {ranks}"
            reasons.append(AutoValue("batch.global", str(found.global_), why))
        if self.micro == "auto":
            why = f"global {found.global_} / {ranks}, no accumulation"
            reasons.append(AutoValue("batch.micro", str(found.micro), why))
        return found, tuple(reasons)

    def over(self, ranks: int) -> Self:
        """Return the batch in numbers for this many data-parallel ranks.

        Raises:
            JobError: the global batch is not micro * a whole number * ranks.
        """
        if self.global_ == "auto":
            assert self.micro != "auto"
            return self.model_copy(update={"global_": self.micro * ranks, "micro": self.micro})
        per_rank, rest = divmod(self.global_, ranks)
        if rest:
            each = ranks if self.micro == "auto" else ranks * self.micro
            below = self.global_ - self.global_ % each
            above = below + each
            nearest = f"{below} or {above}" if below else f"{above}"
            raise JobError(
                f"batch.global: {self.global_} samples do not divide over {ranks} data-parallel "
                f"ranks: write {nearest}"
            )
        micro = per_rank if self.micro == "auto" else self.micro
        accumulation, rest = divmod(per_rank, micro)
        if rest or accumulation == 0:
            nearest_micro = min(_divisors(per_rank), key=lambda divisor: abs(divisor - micro))
            nearest_global = ranks * micro * max(1, round(per_rank / micro))
            raise JobError(
                f"batch.micro: global {self.global_} / ({ranks} ranks x micro {micro}) = "
                f"{self.global_ / ranks / micro:.3g} is not a whole number of micro-batches: write "
                f"micro: {nearest_micro} or global: {nearest_global}"
            )
        if accumulation > _MAX_ACCUMULATION:
            raise JobError(
                f"batch.micro: global {self.global_} / ({ranks} ranks x micro {micro}) = "
                f"{accumulation} forward passes for one step, and a rank keeps the samples of them "
                f"all: at most {_MAX_ACCUMULATION}; write a larger micro, or a smaller global"
            )
        return self.model_copy(update={"global_": self.global_, "micro": micro})


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in small]
