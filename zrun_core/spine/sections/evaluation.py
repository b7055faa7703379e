"""Evaluations, and what follows from them: the best step, an early end."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from zrun_core.spine.sections.section import Ref, Samples, Section, Steps


class Goal(Section):
    """A number of the evaluation, and which values of it are better."""

    metric: str = Field(
        default="loss",
        description="loss, or a name of eval.metrics; of several sets set/name",
        examples=["loss"],
    )
    mode: Literal["min", "max"] = Field(
        default="min", description="min: lower values are better | max: higher values are better"
    )


class BestConfig(Goal):
    """The step that is kept because an evaluation of it was the best so far."""

    short = ("metric", str)


class EarlyStopConfig(Goal):
    """An early end of the run, by its evaluations. The short form sets `patience`."""

    short = ("patience", int)

    patience: Steps = Field(
        default=3,
        description="evaluations in a row without a better value, after which the run ends",
    )
    min_delta: Annotated[float, Field(ge=0, le=1e30)] = Field(
        default=0.0,
        description="a value is better only if it is by more than this",
    )


def _form_of_data(value: Any) -> str:
    """Return the tag of a value of `eval.data`: one dataset, or several by name."""
    if not isinstance(value, dict) or not value:
        return "one"
    is_reference = not value.keys().isdisjoint(Ref.model_fields)
    return "one" if is_reference else "several"


class EvalConfig(Section):
    """Evaluation on held-out data."""

    data: Annotated[
        Annotated[Ref, Tag("one")] | Annotated[dict[str, Ref], Tag("several")],
        Discriminator(_form_of_data),
    ] = Field(
        description="returns the validation Dataset; or a mapping of names to several",
        examples=["train.py:build_val_data"],
    )
    metrics: Ref | None = Field(
        default=None,
        description="(model, batch) -> {name: (sum, weight)}, beside the loss",
        examples=["train.py:metrics"],
    )
    every: Steps | None = Field(
        default=None,
        description="optimizer steps between evaluations; null: at the end",
        examples=[500],
    )
    samples: Samples | None = Field(
        default=None, description="samples per evaluation; null: all", examples=[1000]
    )
    first: bool = Field(default=False, description="evaluate before the first step too")
    stop: EarlyStopConfig | None = Field(
        default=None,
        description="end early: evaluations without improvement, or {metric, mode, patience, ...}",
        examples=[{"metric": "loss", "patience": 3}],
    )

    @model_validator(mode="after")
    def _check_stop(self) -> Self:
        if self.stop is not None:
            if self.every is None:
                raise ValueError("eval.stop needs eval.every: without it only the end is evaluated")
            self.check_metric("eval.stop.metric", self.stop.metric)
        return self

    def check_metric(self, key: str, metric: str) -> None:
        """Refuse a metric that no evaluation will have, as far as that is known before one.

        Args:
            metric: "loss" or "accuracy", of several sets "val/loss".

        Raises:
            ValueError: there is no such number.
        """
        losses = [f"{name}/loss" if name else "loss" for name in self.sets]
        if self.metrics is None and metric not in losses:
            problem = f"without eval.metrics there is only {', '.join(losses)}"
        elif isinstance(self.data, dict) and metric.partition("/")[0] not in self.data:
            problem = f"eval.data names several sets; write {losses[0].replace('loss', metric)}"
        else:
            return
        raise ValueError(f"{key}: {metric} is not evaluated: {problem}")

    @field_validator("data")
    @classmethod
    def _check_dataset_names(cls, data: Ref | dict[str, Ref]) -> Ref | dict[str, Ref]:
        if not isinstance(data, dict):
            return data
        for name in data:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}", name):
                what = "write 1 to 32 letters, digits or ._-"
                raise ValueError(f"{name!r} cannot name a dataset: {what}")
        return data

    @property
    def sets(self) -> dict[str, Ref]:
        """The datasets by name; that of a single one is empty."""
        return self.data if isinstance(self.data, dict) else {"": self.data}
