"""The loss protocol: every shape of batch and of result, and the errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from zrun_core.errors import UserCodeError
from zrun_core.user_code.loss import LossKind, compute_loss


class Echo(nn.Module):
    """Returns `make(scale, inputs)`, with the number of positional and named inputs it was called
    with.
    """

    def __init__(self, make: Any = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.make = make or (lambda scale, *inputs: scale)
        self.called: tuple[int, list[str]] = (0, [])

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.called = (len(inputs), sorted(named))
        return self.make(self.scale, *inputs, *named.values())


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


ONE = torch.ones(3)


@pytest.mark.parametrize(
    ("batch", "called"),
    [
        ({"x": ONE, "y": ONE}, (0, ["x", "y"])),
        ((ONE, ONE), (2, [])),
        ([ONE, ONE, ONE], (3, [])),
        (Pair(ONE, ONE), (2, [])),
        (ONE, (1, [])),
        (SimpleNamespace(x=ONE), (1, [])),
    ],
)
def test_how_a_batch_reaches_the_model(batch: Any, called: tuple[int, list[str]]) -> None:
    model = Echo()
    loss = compute_loss(model, batch, None, num_samples=3)
    assert model.called == called
    assert (loss.value.item(), loss.kind, loss.weight) == (2.0, LossKind.MEAN, 3)
    assert loss.total.item() == 6.0


@pytest.mark.parametrize(
    "make",
    [
        lambda scale, x: scale,
        lambda scale, x: SimpleNamespace(loss=scale, logits=x),
        lambda scale, x: {"loss": scale, "logits": x},
        lambda scale, x: (x, scale),
        lambda scale, x: (scale, torch.tensor(3), None, x),
        lambda scale, x: Output(scale, torch.tensor(0.5)),
    ],
)
def test_where_the_model_returns_its_loss(make: Any) -> None:
    assert compute_loss(Echo(make), ONE, None, 1).value.item() == 2.0


def test_a_loss_function_gets_model_and_batch() -> None:
    model = Echo()
    loss = compute_loss(model, {"x": ONE}, lambda m, batch: m(batch["x"]) * batch["x"].sum(), 4)
    assert (loss.value.item(), loss.kind, loss.weight) == (6.0, "mean", 4)
    assert compute_loss(model, ONE, lambda m, batch: {"loss": m(batch)}, 4).kind is LossKind.MEAN


@pytest.mark.parametrize("weight", [5, 5.0, torch.tensor(5), torch.tensor(5.0, requires_grad=True)])
def test_a_loss_function_may_return_sum_and_weight(weight: Any) -> None:
    loss = compute_loss(Echo(), ONE, lambda m, batch: (m(batch), weight), 4)
    assert loss.kind is LossKind.SUM
    assert float(loss.weight) == 5.0
    assert loss.total.item() == 2.0
    assert not (isinstance(loss.weight, Tensor) and loss.weight.requires_grad)


def test_a_stand_in_weighs_nothing() -> None:
    model = Echo()
    compute_loss(model, ONE, None, 0).total.backward()
    assert model.scale.grad is not None
    assert model.scale.grad.item() == 0.0


def test_cutting_a_ragged_batch_changes_nothing() -> None:
    """Four sequences of 1 to 4 tokens.

    One micro-batch of 4 equals four of 1 when the sum weighs its tokens.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    sequences = [torch.randn(length, 3) for length in (1, 2, 3, 4)]

    def loss_fn(module: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        tokens = torch.cat(batch)  # [tokens, 3]
        return module(tokens).square().sum(), len(tokens)

    def gradient(cuts: list[list[Tensor]]) -> Tensor:
        losses = [compute_loss(model, cut, loss_fn, len(cut)) for cut in cuts]
        total = torch.stack([loss.total for loss in losses]).sum() / sum(
            float(loss.weight) for loss in losses
        )
        return torch.autograd.grad(total, model.weight)[0]

    torch.testing.assert_close(
        gradient([sequences]), gradient([[sequence] for sequence in sequences])
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda scale, x: x * scale,
            "the loss is not a scalar: what the model returned has shape (3,); take its mean()",
        ),
        (
            lambda scale, x: torch.tensor(3),
            "the loss is not floating: what the model returned has dtype torch.int64",
        ),
        (lambda scale, x: None, "no loss: what the model returned is None: does it lack a return?"),
        (lambda scale, x: 2.0, "no loss: what the model returned is float, not a tensor"),
        (
            lambda scale, x: SimpleNamespace(loss=None),
            "no loss: .loss of what the model returned is None: was",
        ),
        (
            lambda scale, x: (scale, scale),
            "is a tuple with 2 scalar floating tensors where exactly one is needed",
        ),
        (lambda scale, x: (x,), "is a tuple with 0 scalar floating tensors"),
        (lambda scale, x: scale.detach(), "loss without gradient"),
    ],
)
def test_what_is_no_loss(make: Any, message: str) -> None:
    with pytest.raises(UserCodeError) as error:
        compute_loss(Echo(make), ONE, None, 1)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda loss: (loss,), "returned a tuple of 1: return the mean loss, or (sum, weight)"),
        (lambda loss: (loss, 1, 2), "returned a tuple of 3"),
        (lambda loss: (loss, {"accuracy": 1.0}), "a tensor and a dict: return the mean loss alone"),
        (lambda loss: (loss, True), "a tensor and a bool"),
        (lambda loss: (loss, -1), "weight is -1"),
        (lambda loss: (loss, float("nan")), "weight is nan"),
        (lambda loss: (loss, ONE), "weight has shape (3,)"),
        (lambda loss: (loss * ONE, 3), "the loss is not a scalar: the sum has shape (3,)"),
    ],
)
def test_what_a_loss_function_may_not_return(result: Any, message: str) -> None:
    with pytest.raises(UserCodeError) as error:
        compute_loss(Echo(), ONE, lambda model, batch: result(model(batch)), 1)
    assert message in str(error.value)


def test_evaluation_needs_no_gradient() -> None:
    with torch.no_grad():
        assert compute_loss(Echo(), ONE, None, 1).value.item() == 2.0
