"""Tiers of the states between their uses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from zrun_core.spine.sections.section import Bytes, Section, Steps

TierName = Literal["device", "host", "disk"]


class OffloadConfig(Section):
    """Where states live between uses (Ren et al. 2021, "ZeRO-Offload"; Rajbhandari et al. 2021,
    "ZeRO-Infinity"). The short form `offload: host` moves the optimizer and the gradients.
    """

    short = ("optimizer", str)

    optimizer: TierName = Field(
        default="device",
        description="fp32 masters and moments; the update runs on the CPU where they are not on "
        "the device",
        examples=["host"],
    )
    grad: TierName | None = Field(
        default=None, description="gradients; null: where the optimizer is", examples=["host"]
    )
    param: TierName = Field(
        default="device",
        description="parameters between uses; elsewhere than on the device needs zero.stage: 3",
        examples=["device"],
    )
    fraction: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = Field(
        default=1.0,
        description="share of the parameters whose states leave the device; auto: the least that "
        "fits",
        examples=["auto"],
    )
    schedule: Literal["overlap", "serial", "delayed"] = Field(
        default="overlap",
        description="overlap: the update runs beside the next forward | serial: training waits, "
        "same bits | delayed: beside forward and backward, one step late, which changes numbers",
    )
    delay_after: Steps = Field(
        default=40, description="delayed: steps that are not delayed, at the beginning"
    )
    dir: str | None = Field(
        default=None,
        description="folder on the disk that states on disk lie on, relative to the job file; "
        "null: the run directory",
        examples=["/scratch"],
    )
    host_memory: Annotated[Bytes, Field(gt=0)] | None = Field(
        default=None,
        description="bytes of each host's memory for states; null: what is free",
        examples=["96GiB"],
    )
    disk_space: Annotated[Bytes, Field(gt=0)] | None = Field(
        default=None,
        description="bytes of each host's disk for states; null: what is free",
        examples=["500GiB"],
    )

    @property
    def grad_tier(self) -> TierName:
        """Tier of the gradients: that of the optimizer, unless said otherwise."""
        return self.optimizer if self.grad is None else self.grad

    @property
    def tiers(self) -> frozenset[TierName]:
        """Tiers on which states of units live."""
        return frozenset((self.optimizer, self.grad_tier, self.param))

    @property
    def most_away(self) -> float:
        """Largest share that may leave the device: all, where `auto` is still to be estimated."""
        return 1.0 if self.fraction == "auto" else self.fraction

    @property
    def of_states_elsewhere(self) -> dict[str, Any]:
        """The keys that are set and count for states elsewhere only, each with its default."""
        fields = type(self).model_fields
        defaults = {name: fields[name].default for name in ("fraction", "schedule", "delay_after")}
        return {name: value for name, value in defaults.items() if getattr(self, name) != value}

    @model_validator(mode="after")
    def _require_states_to_move(self) -> Self:
        for name in self.of_states_elsewhere:
            if self.tiers == {"device"}:
                raise ValueError(
                    f"{name} changes nothing while every state stays on the device; write "
                    f"optimizer: host too, or leave {name} out"
                )
        return self

    @model_validator(mode="after")
    def _refuse_gradients_without_their_optimizer(self) -> Self:
        if self.grad_tier != "device" and self.optimizer == "device":
            raise ValueError(
                "grad: gradients elsewhere than on the device would have to come back for "
                f"an update there; write optimizer: {self.grad_tier} too"
            )
        return self

    @model_validator(mode="after")
    def _refuse_what_cannot_be_delayed(self) -> Self:
        if self.schedule == "delayed" and (self.optimizer, self.param) != ("host", "device"):
            raise ValueError(
                "schedule: delayed keeps the parameters of the step before on the device "
                "and the optimizer on the host; write optimizer: host and param: device, or "
                "schedule: overlap"
            )
        return self
