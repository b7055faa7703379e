"""The loss protocol: from a batch to one number to differentiate, and its weight.

A dict batch calls `model(**batch)`, a tuple or list `model(*batch)`, anything else `model(batch)`;
a loss function of the user's gets `(model, batch)` instead. Over a global batch the loss is the
weighted mean, the sum of `total` over the sum of `weight`, so it does not depend on how the batch
is cut into micro-batches and ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from zrun_core.errors import UserCodeError
from zrun_core.spine.tracebacks import add_location, message_of

LossFunction: TypeAlias = Callable[[nn.Module, Any], Any]


class LossKind(StrEnum):
    """The two ways in which a user's function may state a loss."""

    MEAN = "mean"  # the mean over `weight` samples
    SUM = "sum"  # a sum over `weight` of whatever the user counts, usually tokens


class Loss(NamedTuple):
    """The loss of one micro-batch."""

    value: Tensor  # 0-d, floating
    kind: LossKind
    weight: float | Tensor  # a tensor is 0-d, on the loss's device, and never read: that would sync

    def detached(self) -> Loss:
        """Return the same without its graph."""
        return self._replace(value=self.value.detach())

    @property
    def total(self) -> Tensor:
        """Return the weighted sum to differentiate, 0-d.

        Gradients of micro-batches add up, and are divided by the total weight in the end.
        """
        if self.kind is LossKind.SUM:
            return self.value
        return self.value * self.weight


def compute_loss(
    model: nn.Module, batch: Any, loss_fn: LossFunction | None, num_samples: int
) -> Loss:
    """Run the forward pass of one micro-batch.

    Args:
        batch: one micro-batch, as the data's collate function made it, on the model's device.
        loss_fn: the user's function of (model, batch); None: the model returns the loss.
        num_samples: that the loader drew for the batch: the weight of a mean.

    Raises:
        UserCodeError: the result is not a loss by this protocol, or it has no gradient while
            gradients are enabled.
    """
    if loss_fn is None:
        loss = Loss(_find_loss(_forward(model, batch), "the model"), LossKind.MEAN, num_samples)
    else:
        result = _call(loss_fn, model, batch)
        if isinstance(result, tuple) and not hasattr(result, "loss"):
            loss = _sum_and_weight(result)
        else:
            loss = Loss(_find_loss(result, "the loss function"), LossKind.MEAN, num_samples)
    if torch.is_grad_enabled() and not loss.value.requires_grad:
        raise UserCodeError(
            "loss without gradient: it depends on no parameter that requires one "
            "(a detach(), item() or no_grad() on the way, or every parameter is frozen)"
        )
    return loss


def _call(loss_fn: LossFunction, model: nn.Module, batch: Any) -> Any:
    try:
        return loss_fn(model, batch)
    except TypeError as error:
        if f"not {type(model).__name__}" in message_of(error):  # as in (output, target)
            takes = "a loss function is called with (model, batch), and calls the model itself"
            add_location(error, f": {takes}")
        raise


def _forward(model: nn.Module, batch: Any) -> Any:
    try:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*_arguments(batch))
    except TypeError as error:
        why = _why_not_called(model, batch)
        if why is None:
            raise
        raise UserCodeError(
            "without loss in the job, the model is called with what a batch holds: "
            f"{why}; write loss: FILE.py:FUNCTION, a function of (model, batch), "
            "or have forward take that and return the loss"
        ) from error


def _arguments(batch: Any) -> Sequence[Any]:
    return batch if isinstance(batch, tuple | list) else (batch,)


def _why_not_called(model: nn.Module, batch: Any) -> str | None:
    """Say what in a batch the model's forward does not take; None if it takes all of it."""
    signature = inspect.signature(model.forward)
    try:
        if isinstance(batch, Mapping):
            signature.bind(**batch)
        else:
            signature.bind(*_arguments(batch))
    except TypeError as error:
        return f"{error} (forward takes {', '.join(signature.parameters) or 'nothing'})"
    return None


def _find_loss(result: Any, source: str) -> Tensor:
    """Find the loss in what `source` returned.

    It is the result itself, its `.loss` or `["loss"]`, or a tuple's only 0-d floating tensor.
    """
    where = f"what {source} returned"
    if not isinstance(result, Tensor):
        if isinstance(result, Mapping) and "loss" in result:
            result = result["loss"]
            where = f'["loss"] of {where}'
        elif hasattr(result, "loss"):
            result = result.loss
            where = f".loss of {where}"
        elif isinstance(result, tuple):
            result = _only_scalar(result, where)
            where = f"the scalar in {where}"
    if not isinstance(result, Tensor):
        if result is None:
            is_part = where.startswith((".", "["))
            question = "was the model given labels?" if is_part else "does it lack a return?"
            raise UserCodeError(f"no loss: {where} is None: {question}")
        raise UserCodeError(f"no loss: {where} is {type(result).__name__}, not a tensor")
    return _checked(result, where)


def _only_scalar(values: tuple[Any, ...], where: str) -> Tensor:
    scalars = [
        v for v in values if isinstance(v, Tensor) and v.dim() == 0 and v.is_floating_point()
    ]
    if len(scalars) != 1:
        raise UserCodeError(
            f"no loss: {where} is a tuple with {len(scalars)} scalar floating tensors where "
            "exactly one is needed"
        )
    return scalars[0]


def _sum_and_weight(result: tuple[Any, ...]) -> Loss:
    if len(result) != 2 or not isinstance(result[0], Tensor):
        raise UserCodeError(
            f"the loss function returned a tuple of {len(result)}: return the mean loss, or "
            "(sum, weight)"
        )
    value, weight = result
    _checked(value, "the sum")
    if isinstance(weight, Tensor):
        if weight.dim() != 0:
            raise UserCodeError(
                f"the loss function's weight has shape {tuple(weight.shape)}: it must be one number"
            )
        return Loss(value, LossKind.SUM, weight.detach().to(value.device))
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise UserCodeError(
            f"the loss function returned a tensor and {_article(weight)}: return the mean loss "
            "alone, or (sum, weight) with a number or a 0-d tensor for the weight; other numbers "
            "come from eval.metrics, or from context.metric() in a hook"
        )
    if not (math.isfinite(weight) and weight >= 0):
        raise UserCodeError(
            f"the loss function's weight is {weight}: it must be a finite number, 0 or more"
        )
    return Loss(value, LossKind.SUM, float(weight))


def _article(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def _checked(loss: Tensor, where: str) -> Tensor:
    if loss.dim() != 0:
        raise UserCodeError(
            f"the loss is not a scalar: {where} has shape {tuple(loss.shape)}; take its mean()"
        )
    if not loss.is_floating_point():
        raise UserCodeError(f"the loss is not floating: {where} has dtype {loss.dtype}")
    return loss
