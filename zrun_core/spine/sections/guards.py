"""Guards and limits, which stop a run whose numbers, memory or times go wrong."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zrun_core.spine.sections.section import Bytes, Seconds, Section, Steps


class GuardsConfig(Section):
    """What stops a run whose numbers, replicas or memory go wrong."""

    max_skips: Steps = Field(
        default=50, description="skipped steps in a row before the run saves and stops (exit 7)"
    )
    max_nonfinite: Steps = Field(
        default=3,
        description="the same for skips that a lower loss scale cannot cure: nan losses, any skip "
        "without fp16",
    )
    replica_every: int = Field(
        default=100,
        ge=0,
        le=10**12,
        description="optimizer steps between comparisons of replicas (exit 10); 0: never",
    )
    check_values: bool = Field(
        default=True,
        description="with tp or pp, compare before the first step what the parts of the model "
        "compute with what the whole one does (exit 2)",
    )
    trust: list[str] = Field(
        default=[],
        description="modules, as blocks.2 or *.mlp, or loss: trained also where that comparison "
        "says that they compute something else, which each start tells",
        examples=[["blocks.2"]],
    )
    on_oom: Literal["stop", "skip"] = Field(
        default="stop",
        description="stop | skip: all ranks drop a batch when one of them runs out of memory",
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
        default=600.0,
        description="seconds without progress in an evaluation, a hook or the writing of a profile",
    )
    save_s: Seconds = Field(default=1800.0, description="seconds without progress in a save")
    stop_s: Seconds = Field(
        default=30.0,
        description="seconds to finish the step after a signal, then the run stops at once; a "
        "save has limits.save_s",
    )
