"""Saves, and weights to start from."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator

from zrun_core.spine.sections.evaluation import BestConfig
from zrun_core.spine.sections.section import Section, Steps, check_pattern


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
