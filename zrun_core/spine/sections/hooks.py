"""The user's functions that the loop calls."""

from __future__ import annotations

from pydantic import Field

from zrun_core.spine.sections.section import Ref, Section


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
