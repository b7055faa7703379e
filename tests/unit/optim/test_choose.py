"""Optimizers by name: elementwise ones are taken, others are refused with the reason."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from zrun_core.checkpoint.manifest_fields import RANK, VALUE
from zrun_core.errors import JobError
from zrun_core.optim.resolve import RESERVED, OptimizerSpec, resolve_optimizer
from zrun_core.spine.sections.optim import OptimConfig
from zrun_core.spine.sections.optimizer_args import NOT_SHARDED, OWN_DEFAULTS


def chosen(name: str = "adamw", load: Any = None, **keys: Any) -> OptimizerSpec:
    return resolve_optimizer(
        OptimConfig.model_validate({"name": name, **keys}), lambda reference: load
    )


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
        ("Muon", "only supports 2D parameters"),
        ("LBFGS", "closure"),
        ("Adafactor", "it looks at whole tensors"),
        ("SparseAdam", "does not support dense gradients"),
    ],
)
@pytest.mark.parametrize("lr", [1e-2, 1e-8])
def test_others_are_refused_with_the_reason(name, reason, lr):
    with pytest.raises(ValueError, match=f"{name} cannot update slices of parameters: it"):
        chosen(name, lr=lr)
    name = f"torch.optim:{name}"  # past the list of those that are known
    with pytest.raises(JobError, match=reason) as caught:
        chosen(name, getattr(torch.optim, name.partition(":")[2]), lr=lr)
    assert name in str(caught.value)
    assert "use an elementwise one, such as adamw" in str(caught.value)


def test_every_class_of_torch_is_taken_or_refused_by_name():
    names = [
        n.lower() for n, c in vars(torch.optim).items() if inspect.isclass(c) and n != "Optimizer"
    ]
    refused = [name for name in names if name in NOT_SHARDED]
    assert sorted(refused) == ["adafactor", "lbfgs", "muon", "sparseadam"]
    for name in set(names) - set(refused):
        assert not chosen(name).layer_wise


@pytest.mark.parametrize(
    ("name", "moments", "keys", "dtype"),
    [
        ("lamb", 2, {}, torch.float32),
        ("LAMB", 2, {"args": {"bias_correction": False, "norm_clamp": [0, 10]}}, torch.float32),
        ("lars", 1, {"args": {"momentum": 0.95}}, torch.float32),
        ("lion", 1, {"betas": [0.95, 0.98]}, torch.float32),
        ("lamb", 2, {"moments": "bf16", "eps": 1e-8}, torch.bfloat16),
        ("lion", 1, {"moments": "bf16"}, torch.bfloat16),
        ("AdamW", 2, {"moments": "bf16", "eps": 1e-8, "args": {"maximize": True}}, torch.bfloat16),
        ("adam", 2, {"moments": "bf16"}, torch.bfloat16),
    ],
)
def test_our_own(name, moments, keys, dtype):
    found = chosen(name, **keys)
    assert (found.moments, found.scales_inside, found.moment_dtype) == (moments, True, dtype)
    assert found.layer_wise is (name.lower() in ("lamb", "lars"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"name": "lamb", "args": {"norm_clam": 1}},
            "lamb has no argument 'norm_clam'; did you mean norm_clamp?",
        ),
        (
            {"name": "lars", "args": {"xyzzy": 1}},
            "it takes momentum, trust_coefficient, ratio_clamp, adapt_no_decay",
        ),
        (
            {"name": "lion", "args": {"amsgrad": True}},
            "lion has no argument 'amsgrad'; it takes none",
        ),
        (
            {"name": "lamb", "args": {"norm_clamp": [2, 1]}},
            r"norm_clamp: \[2.0, 1.0\] is no range: write",
        ),
        (
            {"name": "lamb", "args": {"bias_correction": "perhaps"}},
            "bias_correction: .* boolean.*found 'perhaps'",
        ),
        ({"name": "lars", "args": {"momentum": 1.5}}, "momentum: .* less than 1"),
        ({"name": "lars", "betas": [0.9, 0.99]}, "lars has no betas; leave optim.betas out"),
        ({"name": "lion", "eps": 1e-3}, "lion has no eps; leave optim.eps out"),
        (
            {"name": "sgd", "moments": "bf16"},
            "sgd keeps its state in fp32; bf16 is for adam, adamw, lamb, lion",
        ),
        ({"name": "train.py:Mine", "moments": "bf16"}, "bf16 is for adam"),
        ({"name": "shampoo"}, "shampoo cannot update slices of parameters: .*; write adamw"),
    ],
)
def test_what_does_not_fit_ours_is_said_before_torch_is_there(keys, message):
    with pytest.raises(ValueError, match=message):
        OptimConfig.model_validate(keys)


def test_bf16_moments_take_fewer_arguments():
    with pytest.raises(JobError, match=r"optim.args.amsgrad: adamw has no such argument"):
        chosen(moments="bf16", args={"amsgrad": True})


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
    """torch's fused SGD fails if a parameter gets its first gradient after another one has
    momentum.
    """
    plain, momentum = chosen("sgd"), chosen("sgd", args={"momentum": 0.9})
    assert plain.kwargs["fused"] is True
    assert "fused" not in momentum.kwargs
    assert (momentum.moments, momentum.scales_inside) == (1, False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "adamv"}, r"no optimizer 'adamv'; did you mean adam"),
        ({"name": "xyzzy"}, "write one of adadelta, adagrad"),
        ({"name": "optimizer"}, "no optimizer 'optimizer'"),
        (
            {"args": {"amsgrat": True}},
            "optim.args.amsgrat: adamw has no such argument; did you mean amsgrad",
        ),
        (
            {"name": "sgd", "betas": [0.9, 0.99]},
            "optim.betas: sgd has no such argument; it takes lr, momentum",
        ),
        ({"name": "sgd", "args": {"momentum": -1.0}}, "Invalid momentum value"),
    ],
)
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
        with pytest.raises(
            JobError, match=r"mine.py:Lamb cannot be sharded, because it looks at whole tensors"
        ):
            chosen("mine.py:Lamb", Lamb, lr=lr)
    with pytest.raises(JobError, match="whole tensors"):
        chosen("mine.py:Lamb", Lamb, args={"whole_list": True})
    with pytest.raises(JobError, match="not callable"):
        chosen("mine.py:LR", 3)


class Named(torch.optim.SGD):
    """Keeps the sum of the gradients, under a name of the user's."""

    def __init__(self, params: Any, lr: float, key: str) -> None:
        super().__init__(params, lr=lr)
        self.key = key

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param].setdefault(self.key, torch.zeros_like(param)).add_(param.grad)
                param.sub_(self.state[param][self.key], alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("key", [VALUE, RANK])
def test_a_state_with_a_name_of_checkpoints_is_refused(key):
    assert key in RESERVED
    assert chosen("mine.py:Named", Named, args={"key": "sum"}).moments == 1
    with pytest.raises(JobError, match=f"mine.py:Named keeps a state called '{key}'"):
        chosen("mine.py:Named", Named, args={"key": key})


def test_an_optimizer_over_given_slices():
    param = torch.nn.Parameter(torch.ones(4))
    (group,) = chosen(weight_decay=0.1).make([param]).param_groups
    assert group["params"] == [param]
    assert group["weight_decay"] == 0.1


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb", "lion"])
def test_the_defaults_that_are_told_are_those_of_the_classes(name):
    built = inspect.signature(chosen(name=name).build).parameters
    for key, value in OWN_DEFAULTS[name].items():
        assert built[key].default == value
