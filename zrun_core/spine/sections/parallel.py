"""Axes along which the ranks divide the model, and schedules of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator

from zrun_core.errors import JobError
from zrun_core.sizes import several
from zrun_core.spine.sections.auto_values import AutoValue, LaunchFacts
from zrun_core.spine.sections.schedules import PLAIN, SCHEDULES, Schedule
from zrun_core.spine.sections.section import Ranks, Section
from zrun_core.spine.sections.tensor_roles import ROLES, Role, read_entry

Axis = Literal["tp", "dp", "pp"]


PipelineSchedule = Literal[
    "1f1b",
    "gpipe",
    "interleaved",
    "zero_bubble",
    "layer_major",
    "pipedream",
    "pipedream_vertical",
]


def _facts(given: Mapping[str, Any]) -> Schedule:
    """Return the facts of the schedule that is given; those of the plain one if it is wrong."""
    return SCHEDULES.get(str(given.get("schedule")), SCHEDULES[PLAIN])


class ParallelConfig(Section):
    """How the ranks divide the model: tp inside of layers, pp between layers, dp over the batch."""

    tp: Ranks = Field(
        default=1, description="ranks that share each layer, on one host", examples=[4]
    )
    pp: Ranks = Field(
        default=1, description="stages of the pipeline, each with a part of the layers"
    )
    dp: Ranks | Literal["auto"] = Field(
        default="auto", description="replicas of the whole; auto: ranks / (tp * pp)", examples=[2]
    )
    order: tuple[Axis, Axis, Axis] = Field(
        default=("tp", "dp", "pp"), description="axes of the ranks' numbers, fastest first"
    )
    allow_cross_node_tp: bool = Field(
        default=False, description="let a tp group span hosts that no NVLink joins, which is slow"
    )
    schedule: PipelineSchedule = Field(
        default=PLAIN,
        description="order of a step's micro-batches. 1f1b: each goes backward as soon as it can, "
        "which keeps the fewest activations | gpipe: all go forward, then all backward | "
        "interleaved: 1f1b of several chunks per stage, with shorter waits and more messages | "
        "zero_bubble: 1f1b whose weights' gradients are made while a stage would wait | pipedream, "
        "pipedream_vertical: stages never wait, and use older weights | layer_major: one stage; "
        "all micro-batches go through a block before the next one comes: parameters are gathered "
        "or fetched twice per step",
        examples=["interleaved"],
    )
    virtual: Annotated[int, Field(gt=0, le=1024)] = Field(
        default=1,
        description="chunks of the model on each stage: 2 or more with interleaved, whose default "
        "is 2",
        examples=[4],
    )
    split: Literal["auto"] | Annotated[list[str], Field(min_length=1)] = Field(
        default="auto",
        description="names of the blocks with which each chunk but the first begins; auto: by what "
        "the blocks compute",
        examples=[["transformer.h.12"]],
    )
    plan: Literal["auto"] | Annotated[dict[str, str], Field(min_length=1)] = Field(
        default="auto",
        description="how tp divides modules that zrun does not know, by patterns of their names: "
        f"{', '.join(Role)}; auto: what zrun knows is all",
        json_schema_extra={
            "values": [[role, f"{what}; {line}"] for role, (what, line) in ROLES.items()]
        },
        examples=[{"*.qkv": "fused 3", "*.out": "rowwise", "*.num_heads": "divide"}],
    )
    sequence: bool = Field(
        default=False,
        description="between the layers that tp divides, each of its ranks has a slice of the "
        "sequence (Korthikanti et al. 2022)",
    )

    draws: Literal["stream", "block"] | None = Field(
        default=None,
        description="where forwards draw random numbers, as for dropout. stream: one after the "
        "other, as a plain loop does | block: each block of each micro-batch from numbers of its "
        "own, which are the same at any pp | null: block in a pipeline, else stream",
        examples=["block"],
    )

    @property
    def facts(self) -> Schedule:
        """What sets the schedule apart from others."""
        return SCHEDULES[self.schedule]

    @property
    def draws_by_block(self) -> bool:
        """True if each block draws from a stream of its own."""
        return self.draws == "block" or (self.draws is None and self.pp > 1)

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Return what is given, with the chunks of an interleaved pipeline."""
        if isinstance(value, dict) and _facts(value).has_chunks:
            return {"virtual": 2, **value}
        return super().expand(value)

    @field_validator("order")
    @classmethod
    def _require_each_axis_once(cls, order: tuple[Axis, Axis, Axis]) -> tuple[Axis, Axis, Axis]:
        if len(set(order)) < len(order):
            raise ValueError(
                f"{list(order)} does not have each axis once: write [tp, dp, pp] or another order "
                "of them"
            )
        return order

    @field_validator("schedule")
    @classmethod
    def _require_its_stages(
        cls, schedule: PipelineSchedule, info: ValidationInfo
    ) -> PipelineSchedule:
        pp = info.data.get("pp")
        facts = SCHEDULES[schedule]
        if facts.goes_in_slices and pp not in (1, None):
            raise ValueError(
                f"{schedule} is an order of the whole model on each rank, and pp {pp} divides it; "
                "write schedule: 1f1b, or pp: 1"
            )
        if facts.needs_stages and pp == 1:
            raise ValueError(f"{schedule} is an order of several stages; write pp: 2 or more")
        return schedule

    @field_validator("virtual")
    @classmethod
    def _require_a_schedule_with_chunks(cls, virtual: int, info: ValidationInfo) -> int:
        if "schedule" not in info.data:
            return virtual
        schedule = info.data["schedule"]
        has_chunks = SCHEDULES[schedule].has_chunks
        if has_chunks and virtual == 1:
            raise ValueError(
                f"{schedule} goes through several chunks on each stage; write virtual: 2 or more, "
                "or schedule: 1f1b"
            )
        if not has_chunks and virtual > 1:
            raise ValueError(
                f"{virtual} chunks on each stage are for interleaved, and {schedule} has 1; write "
                "schedule: interleaved, or virtual: 1"
            )
        return virtual

    @field_validator("split")
    @classmethod
    def _require_every_border(
        cls, split: list[str] | Literal["auto"], info: ValidationInfo
    ) -> list[str] | Literal["auto"]:
        pp = info.data.get("pp")
        virtual = info.data.get("virtual")
        if split == "auto" or pp is None or virtual is None:
            return split
        chunks = pp * virtual
        if len(split) != chunks - 1:
            raise ValueError(
                f"pp {pp} x virtual {virtual} = {chunks} chunks have {chunks - 1} borders, and it "
                f"names {len(split)}; write the first block of each chunk but the first, or split: "
                "auto"
            )
        return split

    @field_validator("plan")
    @classmethod
    def _require_roles(
        cls, plan: dict[str, str] | Literal["auto"], info: ValidationInfo
    ) -> dict[str, str] | Literal["auto"]:
        if plan == "auto":
            return plan
        for pattern, text in plan.items():
            try:
                read_entry(text)
            except ValueError as error:
                raise ValueError(f"{pattern!r}: {error}") from None
        if info.data.get("tp") == 1:
            raise ValueError("tp 1 divides no layers; write tp: 2 or more, or plan: auto")
        return plan

    @field_validator("draws")
    @classmethod
    def _require_what_stages_can(cls, draws: str | None, info: ValidationInfo) -> str | None:
        pp = info.data.get("pp")
        if draws == "stream" and pp not in (1, None):
            raise ValueError(
                f"the stages of pp {pp} draw apart from each other, and cannot draw one after the "
                "other; write draws: block, or leave it out"
            )
        if draws == "block" and _facts(info.data).goes_in_slices:
            raise ValueError(
                f"{info.data['schedule']} has a stream for each micro-batch; leave draws out, or "
                "write another schedule"
            )
        return draws

    @field_validator("sequence")
    @classmethod
    def _require_tensor_ranks(cls, sequence: bool, info: ValidationInfo) -> bool:
        if sequence and info.data.get("tp") == 1:
            raise ValueError(
                "a sequence is divided over the ranks of tp, and tp is 1; write tp: 2 or more, or "
                "leave sequence out"
            )
        return sequence

    @property
    def model_ranks(self) -> int:
        """The ranks that share one copy of the model."""
        return self.tp * self.pp

    def resolve(self, known: LaunchFacts) -> tuple[Self, tuple[AutoValue, ...]]:
        """Return the section with the number of its replicas.

        Where stages begin (`split`), and what `tp` divides beside what zrun knows (`plan`), is seen
        of the model once it is built.

        Raises:
            JobError: tp * pp do not divide the ranks, or tp * pp * dp is another number.
        """
        model = self.model_ranks
        what = f"tp {self.tp} x pp {self.pp}"
        if self.dp != "auto":
            asked = model * self.dp
            if asked != known.num_ranks:
                raise JobError(
                    f"parallel: {what} x dp {self.dp} = {several(asked, 'rank')}, but the hosts "
                    f"have {several(known.num_ranks, 'slot')}: write dp: auto, or slots that give "
                    f"{asked}"
                )
            return self, ()
        if known.num_ranks % model:
            raise JobError(
                f"parallel: {what} = {several(model, 'rank')} do not divide the "
                f"{several(known.num_ranks, 'rank')} of the hosts: write divisors, or slots that "
                f"give a multiple of {model}"
            )
        reasons: tuple[AutoValue, ...] = ()
        if model > 1:
            why = f"{several(known.num_ranks, 'rank')} / ({what})"
            reasons = (AutoValue("parallel.dp", str(known.dp), why),)
        return self.model_copy(update={"dp": known.dp}), reasons
