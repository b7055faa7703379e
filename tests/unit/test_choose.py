"""Optimizers by name: elementwise ones are taken as they are, others are refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zrun_core.config import OptimConfig
from zrun_core.errors import JobError
from zrun_core.optim.choose import Chosen, choose


def chosen(name: str = "adamw", load: Any = None, **keys: Any) -> Chosen:
    return choose(OptimConfig.model_validate({"name": name, **keys}), lambda reference: load)


@pytest.mark.parametrize(
    ("name", "moments", "scales_inside"),
    [
        ("adamw", 2, True),
        ("AdamW", 2, True),
        ("adam", 2, True),
        ("sgd", 0, True),
        ("adagrad", 1, True),
        ("rmsprop", 1, False),
        ("nadam", 2, False),
        ("adamax", 2, False),
        ("adadelta", 2, False),
    ],
)
@pytest.mark.parametrize("lr", [1e-3, 1e-8])
def test_elementwise_optimizers_are_taken(name, moments, scales_inside, lr):
    found = chosen(name, lr=lr)
    assert (found.moments, found.scales_inside) == (moments, scales_inside)
    assert found.kwargs["lr"] == lr


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("muon", "only supports 2D parameters"),
        ("lbfgs", "closure"),
        ("adafactor", "it looks at whole tensors"),
        ("sparseadam", "does not support dense gradients"),
    ],
)
@pytest.mark.parametrize("lr", [1e-2, 1e-8])
def test_others_are_refused_with_the_reason(name, reason, lr):
    with pytest.raises(JobError, match=reason) as caught:
        chosen(name, lr=lr)
    assert name in str(caught.value)
    assert "use an elementwise one, such as adamw" in str(caught.value)


def test_defaults_are_the_classes_own_but_decay_is_the_jobs():
    assert chosen().kwargs == {"lr": 1e-3, "weight_decay": 0.0, "fused": True}
    assert "eps" not in chosen("adagrad").kwargs, "its default is 1e-10"
    assert chosen(betas=[0.8, 0.9], eps=1e-6).kwargs["betas"] == (0.8, 0.9)
    assert chosen(args={"amsgrad": True}).moments == 3


@pytest.mark.parametrize("switch", ["fused", "foreach"])
def test_the_job_may_choose_the_implementation(switch):
    found = chosen(args={switch: False})
    assert found.kwargs[switch] is False
    assert found.kwargs.get("fused") is not True


def test_a_fused_one_that_cannot_wait_for_a_gradient_is_not_used():
    """torch's fused SGD fails if a parameter gets its first gradient after another one has momentum."""
    plain, momentum = chosen("sgd"), chosen("sgd", args={"momentum": 0.9})
    assert plain.kwargs["fused"] is True
    assert "fused" not in momentum.kwargs
    assert (momentum.moments, momentum.scales_inside) == (1, False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "adamv"}, r"no optimizer 'adamv' in torch.optim; did you mean adam"),
        ({"name": "xyzzy"}, "write one of adadelta, adafactor"),
        ({"name": "optimizer"}, "no optimizer 'optimizer'"),
        ({"args": {"amsgrat": True}}, "optim.args.amsgrat: adamw has no such argument; did you mean amsgrad"),
        ({"name": "sgd", "betas": [0.9, 0.99]}, "optim.betas: sgd has no such argument; it takes lr, momentum"),
        ({"name": "sgd", "args": {"momentum": -1.0}}, "Invalid momentum value"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(keys, message):
    with pytest.raises(JobError, match=message):
        chosen(**keys)


class Lamb(torch.optim.Optimizer):
    """The trust ratio of You et al. 2020: a norm of the whole parameter."""

    def __init__(self, params: Any, lr: float = 1e-3, whole_list: bool = False) -> None:
        super().__init__(params, {"lr": lr, "whole_list": whole_list})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            every = torch.cat([p.flatten() for p in params]).norm()
            for param in params:
                norm = every if group["whole_list"] else param.norm()
                param.add_(param.grad * (norm / param.grad.norm()), alpha=-group["lr"])


def signs(params: Any, lr: float) -> torch.optim.Optimizer:
    """A factory instead of a class, elementwise."""
    return torch.optim.Rprop(params, lr=lr)


def test_the_users_own_class_by_reference():
    assert chosen("mine.py:signs", signs).moments == 2
    for lr in (1e-2, 1e-8):
        with pytest.raises(JobError, match=r"mine.py:Lamb cannot be sharded, because it looks at whole tensors"):
            chosen("mine.py:Lamb", Lamb, lr=lr)
    with pytest.raises(JobError, match="whole tensors"):
        chosen("mine.py:Lamb", Lamb, args={"whole_list": True})
    with pytest.raises(JobError, match="not callable"):
        chosen("mine.py:LR", 3)


def test_an_optimizer_over_given_slices():
    param = torch.nn.Parameter(torch.ones(4))
    made = chosen(weight_decay=0.1).make([param], 0.0)
    assert made.param_groups[0]["weight_decay"] == 0.0
    assert chosen(weight_decay=0.1).make([param], None).param_groups[0]["weight_decay"] == 0.1
