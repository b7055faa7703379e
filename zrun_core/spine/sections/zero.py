"""Sharded model states, their units, and tiles."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from zrun_core.sizes import format_size
from zrun_core.spine.sections.auto_values import AutoValue, LaunchFacts
from zrun_core.spine.sections.section import Bytes, Pattern, Ranks, Section


class TileConfig(Section):
    """Linears that run in tiles, one after the other, each gathered by itself (Rajbhandari et al.
    2021, "ZeRO-Infinity", section 5.1.3). The short form `tile: 64MiB` sets `bytes`.
    """

    short = ("bytes", int)

    bytes: Annotated[Bytes, Field(gt=0)] = Field(
        description="largest weight of a tile, in the format of computation; smaller linears stay "
        "whole",
        examples=["64MiB"],
    )
    modules: list[Pattern] = Field(
        default_factory=list,
        description="regexes of names of the linears that are tiled; empty: all that can be",
        examples=[["lm_head"]],
    )

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Return the long form of a size, which may be a number with a unit."""
        return {"bytes": value} if type(value) is str else super().expand(value)


class ZeroConfig(Section):
    """Which model states are sharded (Rajbhandari et al. 2020): 0 none, 1 optimizer, 2 + gradients,
    3 + parameters.
    """

    short = ("stage", int)

    stage: Literal[0, 1, 2, 3] = Field(
        default=0, description="0 none, 1 optimizer, 2 + gradients, 3 + parameters", examples=[2]
    )
    bucket: Bytes | Literal["auto"] = Field(
        default="auto",
        description="largest flat unit in bytes of parameters; auto: 64MiB, 12MiB on cpu",
        examples=["64MiB"],
    )
    units: list[Pattern] = Field(
        default_factory=list,
        description="regexes of module names that become flat units of their own",
        examples=[[r"layers\.\d+"]],
    )
    leaf: list[Pattern] = Field(
        default_factory=list,
        description="regexes of modules gathered and reduced as a whole: those that choose what "
        "runs inside",
        examples=[[r"blocks\.\d+\.moe"]],
    )
    shard_group: Ranks | Literal["all", "node"] = Field(
        default="all",
        description="ranks that share one copy of the states; copies are replicated across such "
        "groups",
        examples=["node"],
    )
    persist_below: Bytes = Field(
        default=0,
        description="stage 3: parameters smaller than this many bytes stay whole on every rank",
        examples=["100kB"],
    )
    prefetch: int = Field(
        default=1, ge=0, le=16, description="stage 3: units gathered ahead of their use"
    )
    tile: TileConfig | None = Field(
        default=None,
        description="linears with a larger weight run in tiles of at most these bytes, each a unit "
        "of its own: bytes, or {bytes, modules}; null: none",
        examples=["64MiB"],
    )

    @model_validator(mode="after")
    def _refuse_tiles_that_stay_whole(self) -> Self:
        if self.tile is not None and self.tile.bytes < self.persist_below:
            raise ValueError(
                f"zero.tile: tiles of {format_size(self.tile.bytes)} would stay whole on every "
                f"rank by persist_below: {format_size(self.persist_below)}; write a smaller one"
            )
        return self

    def resolve(self, known: LaunchFacts) -> tuple[Self, tuple[AutoValue, ...]]:
        """Return the section with the bytes of its largest unit."""
        bucket = self.bucket_on(known.device)
        reasons: tuple[AutoValue, ...] = ()
        if self.bucket == "auto":
            reasons = (AutoValue("zero.bucket", format_size(bucket), f"on {known.device}"),)
        return self.model_copy(update={"bucket": bucket}), reasons

    def bucket_on(self, device: str) -> int:
        """Return the bytes of the largest flat unit on `device`, "cpu" or "cuda".

        On a CPU, small units keep the rings small and cost no bandwidth. The size does not depend
        on the stage, so that all stages compute the gradient norm over the same parts, and agree to
        the bit when they clip.
        """
        if self.bucket != "auto":
            return self.bucket
        if device == "cpu":
            return 12 << 20
        return 64 << 20
