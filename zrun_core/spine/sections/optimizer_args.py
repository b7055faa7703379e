"""Optimizers that a job may name: their arguments, their defaults, those that cannot be sharded."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from zrun_core.spine.sections.section import Fraction, Positive, Section


def _check_bounds(bounds: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= bounds[0] <= bounds[1] <= 1e30:
        raise ValueError(
            f"{list(bounds)} is no range: write [low, high] with 0 <= low <= high <= 1e30"
        )
    return bounds


Bounds = Annotated[tuple[float, float], AfterValidator(_check_bounds)]


class LambArgs(Section):
    """`optim.args` of lamb (You et al. 2020, Algorithm 2)."""

    bias_correction: bool = Field(
        default=True, description="divide the moments by 1 - beta^step, as the paper does"
    )
    norm_clamp: Bounds | None = Field(
        default=None, description="[low, high] of a layer's norm: the paper's phi"
    )
    ratio_clamp: Bounds | None = Field(default=None, description="[low, high] of the trust ratio")
    adapt_no_decay: bool = Field(
        default=False, description="also adapt the parameters that optim.no_decay names"
    )


class LarsArgs(Section):
    """`optim.args` of lars (You et al. 2017, Algorithm 1)."""

    momentum: Fraction = Field(default=0.9, description="decay of the velocity")
    trust_coefficient: Positive = Field(
        default=1e-3, description="the trust coefficient: the paper's eta"
    )
    ratio_clamp: Bounds | None = Field(default=None, description="[low, high] of the local rate")
    adapt_no_decay: bool = Field(
        default=False, description="also adapt the parameters that optim.no_decay names"
    )


class LionArgs(Section):
    """`optim.args` of lion (Chen et al. 2023, Algorithm 2): it has none."""


ARGS_OF: dict[str, type[Section]] = {"lamb": LambArgs, "lars": LarsArgs, "lion": LionArgs}
LAYER_WISE = ("lamb", "lars")  # an update needs the norms of all layers first
# What null stands for, of optimizers that we know: it is printed before a run.
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "lamb": {"betas": (0.9, 0.999), "eps": 1e-6},
    "lion": {"betas": (0.9, 0.99)},
}
WITH_BF16_MOMENTS = ("adam", "adamw", "lamb", "lion")
BF16_KEY = "optim.moments: bf16"  # how a job asks for moments in bf16
_SMALL_STATE = (
    "write adamw with {moments} (4 bytes of state per parameter) or lion (4, or 2 with bf16)"
)
_WHOLE_MATRICES = "adamw, or lamb where large batches are the reason"
# Optimizers whose update of an element needs others of its tensor, and what to write instead.
NOT_SHARDED = {
    "adafactor": f"it keeps means over the rows and columns of whole matrices; {_SMALL_STATE}",
    "came": f"it keeps means over the rows and columns of whole matrices; {_SMALL_STATE}",
    "sm3": f"it keeps maxima over the rows and columns of whole matrices; {_SMALL_STATE}",
    "muon": f"it orthogonalises whole matrices; write {_WHOLE_MATRICES}",
    "shampoo": f"it inverts roots of products of whole matrices; write {_WHOLE_MATRICES}",
    "soap": f"it works in eigenbases of whole matrices; write {_WHOLE_MATRICES}",
    "kfac": f"it inverts statistics of whole layers; write {_WHOLE_MATRICES}",
    "galore": f"it projects the gradients of whole matrices; {_SMALL_STATE}",
    "lbfgs": "its line search wants the loss several times per step; write adamw",
    "sparseadam": "it takes sparse gradients only, and gradients are reduced in dense buffers; "
    "write adam",
}


def why_not_sharded(name: str, moments: str = BF16_KEY) -> str | None:
    """Return why an optimizer cannot update slices of parameters; None if it is none of those.

    Args:
        name: of the optimizer, in any case.
        moments: how the user asks for moments in bf16.
    """
    reason = NOT_SHARDED.get(name.lower())
    if reason is None:
        return None
    return f"{name} cannot update slices of parameters: {reason.format(moments=moments)}"


def why_not_on_disk(name: str) -> str:
    """Return why the states of a layer-wise optimizer cannot live on a disk.

    Args:
        name: of the optimizer, as the user wrote it.
    """
    return (
        f"offload.optimizer: disk: {name} proposes the updates of all layers before it applies "
        "any, so each step would read its states from the disk twice; write optimizer: host, or "
        "optim.name: adamw"
    )


def describe_argument_error(name: str, section: type[Section], detail: Any) -> str:
    """Return a message for a mistake in `optim.args`.

    Args:
        detail: one of pydantic's errors of them.
    """
    key = str(detail["loc"][0])
    if detail["type"] != "extra_forbidden":
        return f"{key}: {detail['msg'].removeprefix('Value error, ')}, found {detail['input']!r}"
    near = difflib.get_close_matches(key, section.model_fields, 1)
    if near:
        hint = f"did you mean {near[0]}?"
    elif section.model_fields:
        hint = f"it takes {', '.join(section.model_fields)}"
    else:
        hint = "it takes none"
    return f"{name} has no argument {key!r}; {hint}"
