"""Profiles: which steps of which ranks torch's profiler traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, field_validator

from zrun_core.spine.sections.section import MAX_RANKS, Section, Steps

MOST_STEPS = 100  # of one profile: each takes some MB of memory and disk, or many times that


def refuse_too_many(number: int) -> None:
    """Refuse a profile of more steps than a rank can hold the trace of.

    Raises:
        ValueError: these are more.
    """
    if number > MOST_STEPS:
        raise ValueError(
            f"a profile of {number} steps would fill memory and disk: trace at most {MOST_STEPS}, "
            "of which 3 show the same"
        )


class ProfileConfig(Section):
    """A profile: what some ranks do in some steps, by torch's profiler. The short form is `steps`:
    `profile: [10, 12]`.
    """

    short = ("steps", list)

    steps: tuple[Steps, Steps] = Field(
        description="[first, last]: both are traced, and all between them", examples=[[10, 12]]
    )
    ranks: list[Annotated[int, Field(ge=0, lt=MAX_RANKS)]] = Field(
        default=[0], description="ranks that are traced", examples=[[0, 1]]
    )

    @field_validator("steps", mode="before")
    @classmethod
    def _require_two(cls, steps: Any) -> Any:
        if not isinstance(steps, list | tuple) or len(steps) != 2:
            raise ValueError(
                "write the first and the last step, such as [10, 12]; of one step [10, 10]"
            )
        return steps

    @field_validator("steps")
    @classmethod
    def _require_a_range(cls, steps: tuple[int, int]) -> tuple[int, int]:
        first, last = steps
        if last < first:
            raise ValueError(f"[{first}, {last}] ends before it begins: write [{last}, {first}]")
        refuse_too_many(last - first + 1)
        return steps

    @field_validator("ranks")
    @classmethod
    def _name_each_once(cls, ranks: list[int]) -> list[int]:
        if not ranks:
            raise ValueError("name at least one rank, such as [0]")
        if len(set(ranks)) < len(ranks):
            raise ValueError("a rank is named twice")
        return ranks

    @property
    def first(self) -> int:
        """Return the first step that is traced."""
        return self.steps[0]

    @property
    def last(self) -> int:
        """Return the last step that is traced."""
        return self.steps[1]


def why_no_ranks(ranks: Sequence[int], num_ranks: int) -> str | None:
    """Say which of the ranks to be traced do not exist; None: all do."""
    absent = [rank for rank in ranks if rank >= num_ranks]
    if not absent:
        return None
    there = "rank 0 only"
    if num_ranks > 1:
        there = f"ranks 0 to {num_ranks - 1}"
    return f"there is no rank {', '.join(map(str, absent))}: the run has {there}"
