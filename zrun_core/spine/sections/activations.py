"""Recomputed activations, and their inputs until then."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from zrun_core.spine.sections.offload import TierName
from zrun_core.spine.sections.section import Section


class ActivationsConfig(Section):
    """Which activations are recomputed in backward (Chen et al. 2016; Korthikanti et al. 2022).

    The short form `activations: full` sets `checkpoint`.
    """

    short = ("checkpoint", str)

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
    partition: bool = Field(
        default=False,
        description="with parallel.tp: each rank of a tensor group keeps a slice of the input of a "
        "recomputed block, and all of them gather it in backward (Rajbhandari et al. 2020, P_a)",
    )

    @model_validator(mode="after")
    def _require_recomputed_blocks(self) -> Self:
        if self.offload != "device" and self.checkpoint == "none":
            raise ValueError(
                "activations.offload moves the inputs of recomputed blocks, and none is "
                "recomputed; write checkpoint: full, or leave offload out"
            )
        if self.partition and self.checkpoint == "none":
            raise ValueError(
                "activations.partition divides the inputs of recomputed blocks, and none is "
                "recomputed; write checkpoint: full, or leave partition out"
            )
        return self
