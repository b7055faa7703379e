"""The library in a world of one: what its optimizers compute, and errors of wrong arguments."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zrun_core
from zrun_core.distributed import rng
from zrun_core.errors import NumericError, ZrunError
from zrun_core.library import run as library
from zrun_core.library.model import ModelHandle

pytestmark = pytest.mark.usefixtures("alone")


def build() -> nn.Module:
    rng.seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def inputs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)


def backward(model: nn.Module, step: int = 0) -> torch.Tensor:
    x, label = inputs(step)
    loss = nn.functional.cross_entropy(model(x), label)
    loss.backward()
    return loss


def lars(
    params: list[nn.Parameter], velocities: list[torch.Tensor], lr: float, decay: float
) -> None:
    """You et al. 2017, Algorithm 1, in place."""
    for param, velocity in zip(params, velocities, strict=True):
        assert param.grad is not None
        x, g = param.detach(), param.grad
        local = 1e-3 * x.norm() / (g.norm() + decay * x.norm())
        velocity.mul_(0.9).add_(lr * local * (g + decay * x))
        x.sub_(velocity)


@pytest.mark.parametrize("stage", [0, 3])
def test_lars_follows_a_weight_decay_that_changes(stage: int) -> None:
    model, plain = zrun_core.shard(build, zero=stage), build()
    with zrun_core.gathered(model):
        plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    optimizer = zrun_core.optimizer(model, "lars", lr=1.0, weight_decay=0.01)
    params = list(plain.parameters())
    velocities = [torch.zeros_like(param) for param in params]
    for step in range(6):
        optimizer.param_groups[0]["weight_decay"] = decay = 0.01 if step < 3 else 0.3
        backward(model, step)
        optimizer.step()
        plain.zero_grad()
        backward(plain, step)
        lars(params, velocities, 1.0, decay)
    with zrun_core.gathered(model):
        for ours, theirs in zip(model.parameters(), params, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "moments"), [("lion", 1), ("lamb", 2), ("adamw", 2), (torch.optim.Adam, 2)]
)
def test_moments_in_bf16(tmp_path: Path, name: Any, moments: int) -> None:
    model = zrun_core.shard(build)
    optimizer = zrun_core.optimizer(model, name, lr=1e-3, moments="bf16")
    backward(model)
    optimizer.step()
    kept = [
        tensor for tensor in ModelHandle.of(model, "").sharded.optimizer.tensors() if tensor.dim()
    ]
    assert len(kept) == moments * 4
    assert {tensor.dtype for tensor in kept} == {torch.bfloat16}
    zrun_core.save(tmp_path, model, step=1)
    other = zrun_core.shard(build)
    zrun_core.optimizer(other, name, lr=1e-3, moments="bf16")
    assert zrun_core.load(tmp_path, other) is not None
    loaded = [
        tensor for tensor in ModelHandle.of(other, "").sharded.optimizer.tensors() if tensor.dim()
    ]
    assert all((a == b).all() for a, b in zip(kept, loaded, strict=True))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adamw", {"moments": "fp16"}, "optimizer(moments='fp16'): write fp32 or bf16"),
        (
            "lion",
            {"moment_dtype": torch.bfloat16},
            "lion has no argument 'moment_dtype'; did you mean moments?",
        ),
        (
            "sgd",
            {"moments": "bf16"},
            "sgd keeps its state in fp32; bf16 is for adam, adamw, lamb, lion",
        ),
        ("adamw", {"moments": "bf16", "amsgrad": True}, "adamw has no argument 'amsgrad'"),
        (
            "lamb",
            {"norm_clamp": (10, 0)},
            "lamb: norm_clamp: [10.0, 0.0] is no range: write [low, high]",
        ),
        ("lamb", {"norm_clamp": 5.0}, "lamb: norm_clamp: "),
        ("lamb", {"bias_corection": False}, "did you mean bias_correction?"),
        ("lars", {"momentum": 7}, "lars: momentum: "),
        ("lion", {"betas": (0.9,)}, "betas must be two numbers in [0, 1): (0.9,)"),
        ("lion", {"betas": 0.9}, "betas must be two numbers in [0, 1): 0.9"),
        ("lars", {"lr": "a"}, "lr must be a number, 0 or more: 'a'"),
        ("adamw", {"lr": -1}, "adamw(lr=-1): Invalid learning rate: -1"),
        ("adamw", {"lr": "a"}, "adamw(lr='a'): "),
        ("adamw", {"betas": 0.9}, "adamw(betas=0.9): "),
        ("adamw", {"differentiable": True}, "updates of slices cannot be differentiated"),
        ("sgd", {"weight_decay": "a"}, "look at the types of these arguments"),
        (
            "adafactor",
            {},
            "it keeps means over the rows and columns of whole matrices; "
            'write adamw with moments="bf16"',
        ),
        (3, {}, "3 is no optimizer: pass a name, or a class"),
        (dict, {}, "dict cannot update flat slices of parameters"),
        (nn.Linear, {}, "Linear(): "),
        ("adamw", {"groups": 3}, "optimizer(groups=3): write a list of parameter groups"),
        ("adamw", {"clip": "1"}, "optimizer(clip='1'): write a number above 0, or None"),
        ("adamw", {"clip": True}, "optimizer(clip=True)"),
        (
            "adamw",
            {"replica_every": 0.5},
            "optimizer(replica_every=0.5): write 1 or more steps, or None",
        ),
    ],
)
def test_arguments_that_an_optimizer_does_not_take(
    name: Any, options: dict[str, Any], message: str
) -> None:
    model = zrun_core.shard(build)
    with pytest.raises(ZrunError) as caught:
        zrun_core.optimizer(model, name, **options)
    assert message in str(caught.value)
    assert str(caught.value).startswith("optimizer(")
    zrun_core.optimizer(model, "sgd", lr=0.1)  # nothing is half made


@pytest.mark.parametrize(
    ("name", "own", "message"),
    [
        ("lamb", {"norm_clamp": (0, 1)}, "groups[1] has 'norm_clamp', which holds for all groups"),
        ("lion", {"betas": (0.9,)}, "betas must be two numbers"),
        ("adamw", {"lr": -1.0}, "Invalid learning rate: -1.0"),
        ("lars", {"momentum": 7}, "lars: momentum: "),
    ],
)
def test_what_a_group_sets_is_looked_at_too(name: str, own: dict[str, Any], message: str) -> None:
    model = zrun_core.shard(build)
    first, *others = model.parameters()
    with pytest.raises(ZrunError) as caught:
        zrun_core.optimizer(
            model, name, groups=[{"params": others, "name": "mine"}, {"params": first, **own}]
        )
    assert message in str(caught.value)


def test_a_group_with_momentum_may_miss_a_gradient() -> None:
    """torch's fused SGD fails if a parameter gets its first gradient after others have momentum."""
    model = zrun_core.shard(build)
    optimizer = zrun_core.optimizer(
        model, "sgd", groups=[{"params": list(model.parameters()), "momentum": 0.9}], lr=0.1
    )
    with zrun_core.forward(model):
        hidden = model[0](inputs(0)[0])
    hidden.square().mean().backward()  # the last layer gets none
    optimizer.step()
    backward(model)
    optimizer.step()


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, zrun_core.Optimizer]:
    model = zrun_core.shard(build)
    return model, zrun_core.optimizer(model, "sgd", lr=0.1)


WRONG: dict[str, tuple[Callable[[nn.Module, zrun_core.Optimizer], object], str]] = {
    "text for a number": (
        lambda model, optimizer: zrun_core.shard(build, accumulate="4"),
        "shard(accumulate='4'): write how many",
    ),
    "accumulate": (
        lambda model, optimizer: zrun_core.shard(build, accumulate=0),
        "shard(accumulate=0): write how",
    ),
    "weight": (
        lambda model, optimizer: optimizer.step(weight="a"),
        "step(weight='a'): write a number",
    ),
    "less": (
        lambda model, optimizer: optimizer.step(weight=-1),
        "step(weight=-1): write a finite number, 0 or more",
    ),
    "shape": (
        lambda model, optimizer: optimizer.step(weight=torch.ones(2)),
        "step(weight=...): a tensor of shape (2,)",
    ),
    "closure": (lambda model, optimizer: optimizer.step(2.0), "did you mean weight=2.0?"),
    "mean": (
        lambda model, optimizer: library.current().mean(torch.ones(3)),
        "mean(value=...): a tensor of shape (3,)",
    ),
    "share": (
        lambda model, optimizer: library.current().mean(1.0, weight=-2),
        "mean(weight=-2): write",
    ),
    "text": (
        lambda model, optimizer: zrun_core.save("never", model, step="1"),
        "save(step='1'): write how many steps",
    ),
    "half": (
        lambda model, optimizer: zrun_core.save("never", model, step=1.5),
        "save(step=1.5): write how many steps",
    ),
    "true": (
        lambda model, optimizer: zrun_core.save("never", model, step=True),
        "save(step=True): write how many",
    ),
    "below": (
        lambda model, optimizer: zrun_core.save("never", model, step=-1),
        "save(step=-1): write how many",
    ),
    "load": (
        lambda model, optimizer: zrun_core.load("never", model, step="3"),
        "load(step='3'): write a step",
    ),
    "folder": (
        lambda model, optimizer: zrun_core.load(None, model),
        "load(folder=None): write the path of a folder",
    ),
    "path": (
        lambda model, optimizer: zrun_core.save(b"a", model, step=1),
        "save(folder=b'a'): write the path",
    ),
    "number": (
        lambda model, optimizer: zrun_core.save("never", {1: model}, step=1),
        "1 cannot name a model",
    ),
    "twins": (
        lambda model, optimizer: zrun_core.save("never", {"a": model, "b": model}, step=1),
        "a and b are the same model: name it once",
    ),
    "zero": (
        lambda model, optimizer: zrun_core.shard(build, zero="3"),
        "shard(zero='3'): write int or a mapping with",
    ),
    "activations": (
        lambda model, optimizer: zrun_core.shard(build, activations=3),
        "shard(activations=3): write str or a mapping with some of checkpoint",
    ),
    "loss": (
        lambda model, optimizer: zrun_core.GradScaler().scale(3.0),
        "GradScaler.scale(3.0): pass the loss",
    ),
    "scale": (
        lambda model, optimizer: zrun_core.GradScaler(0),
        "GradScaler(init_scale=0): write a number above 0",
    ),
    "nan": (
        lambda model, optimizer: zrun_core.GradScaler(float("nan")),
        "GradScaler(init_scale=nan): write a number",
    ),
    "window": (
        lambda model, optimizer: zrun_core.GradScaler(growth_interval=0.5),
        "GradScaler(growth_interval=0.5): write a number of steps, 1 or more",
    ),
    "torch's": (
        lambda model, optimizer: zrun_core.GradScaler().load_state_dict(
            torch.amp.GradScaler("cpu").state_dict()
        ),
        "this is no state of a zrun_core.GradScaler, which holds scale, good and bad",
    ),
    "state": (
        lambda model, optimizer: zrun_core.GradScaler().load_state_dict(
            {"scale": 0.0, "good": 0, "bad": 0}
        ),
        "GradScaler.load_state_dict(scale=0.0): write a number above 0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_told_in_one_line(
    trained: tuple[nn.Module, zrun_core.Optimizer], case: str
) -> None:
    action, message = WRONG[case]
    backward(trained[0])
    with pytest.raises(ZrunError) as caught:
        action(*trained)
    trained[1].zero_grad()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": "a"}, "init(seed='a'): write a whole number"),
        ({"threads": 0}, "init(threads=0): write a number of threads, 1 or more, or None"),
        ({"timeout_s": -1}, "init(timeout_s=-1): write seconds above 0"),
        ({"patience_s": None}, "init(patience_s=None): write seconds above 0"),
    ],
)
def test_wrong_arguments_of_init(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(library, "_current", None)
    with pytest.raises(ZrunError) as caught:
        zrun_core.init(**options)
    assert message in str(caught.value)


def test_a_rank_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_current", None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "one")
    with pytest.raises(ZrunError, match="RANK='one' is no number: start the script with torchrun"):
        zrun_core.init()


def test_numbers_of_other_kinds_are_numbers(tmp_path: Path) -> None:
    model = zrun_core.shard(build, accumulate=torch.tensor(1))
    optimizer = zrun_core.optimizer(model, "sgd", lr=0.1, clip=np.float32(1.0))
    for weight in (np.float64(1.0), torch.tensor([2]), True):
        backward(model)
        optimizer.step(weight=weight)
    assert zrun_core.save(tmp_path, model, step=np.int64(3))
    loaded = zrun_core.load(tmp_path, model, step=torch.tensor(3))
    assert loaded is not None
    assert loaded.step == 3
    assert library.current().mean(torch.tensor([[2.5]]), weight=np.int32(4)) == 2.5


def test_a_closure_is_called_before_the_update() -> None:
    model, plain = zrun_core.shard(build), zrun_core.shard(build)
    optimizer, other = (zrun_core.optimizer(each, "sgd", lr=0.1) for each in (model, plain))
    with torch.no_grad():
        loss = optimizer.step(lambda: backward(model))
    assert loss == backward(plain)
    assert other.step() is None
    with zrun_core.gathered(model), zrun_core.gathered(plain):
        assert all(
            (a == b).all() for a, b in zip(model.parameters(), plain.parameters(), strict=True)
        )
        assert not all(
            (a == b).all() for a, b in zip(model.parameters(), build().parameters(), strict=True)
        )


@pytest.mark.parametrize(
    ("factor", "weight", "why"),
    [
        (math.inf, 1.0, "the gradient of 2.bias (layer 2) is "),
        (1.0, 0.0, "the weights of all ranks are 0"),
        (1.0, torch.tensor(math.nan), "a weight is not finite"),
    ],
)
def test_too_many_skips_say_why(factor: float, weight: float, why: str) -> None:
    model = zrun_core.shard(build)
    optimizer = zrun_core.optimizer(model, "sgd", lr=0.1, max_skips=1)
    (model(inputs(0)[0]).sum() * factor).backward()
    with pytest.raises(NumericError) as caught:
        optimizer.step(weight=weight)
    assert f"step(): 1 skipped in a row: {why}" in str(caught.value)


def test_skips_that_a_scale_can_help_are_not_told() -> None:
    model = zrun_core.shard(build, precision="fp16")
    optimizer = zrun_core.optimizer(model, "sgd", lr=0.1, max_skips=5)
    scaler = zrun_core.GradScaler(8.0, min_scale=2.0)
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            scaler.scale(model(inputs(0)[0]).sum() * math.inf).backward()
            scaler.step(optimizer)
            scaler.update()
            told.append(len(caught))
    assert scaler.get_scale() == 2.0
    assert told == [0, 0, 1, 2], "the scale fell from 8 to its least, 2"


def test_fp16_without_a_scaler_divides_by_no_scale() -> None:
    norms = {}
    for precision in ("fp32", "fp16"):
        torch.manual_seed(0)
        model = zrun_core.shard(build, precision=precision)
        optimizer = zrun_core.optimizer(model, "sgd", lr=0.1)
        model(inputs(0)[0]).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that small gradients become zero
            optimizer.step()
        norms[precision] = float(optimizer.grad_norm)
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.01)


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_of_gradients_that_are_elsewhere_is_refused(name: str) -> None:
    clip = getattr(torch.nn.utils, name)  # as a script that has imported it before shard()
    plain = nn.Linear(2, 2)
    model = zrun_core.shard(build, zero=2)
    backward(model)
    with pytest.raises(
        ZrunError, match=rf"^{name}\(\): these parameters belong to a sharded model.*clip="
    ):
        clip(model.parameters(), 1.0)
    with pytest.raises(ZrunError, match="nothing would be clipped"):
        getattr(torch.nn.utils, name)(next(iter(model.parameters())), 1.0)
    plain(torch.ones(1, 2)).sum().backward()
    clip(plain.parameters(), 1e-3)
    assert plain.weight.grad is not None
    assert float(plain.weight.grad.norm()) < 1.1e-2, "other models are clipped as ever"


@pytest.mark.parametrize("calls", [4, 3])
def test_a_step_after_several_calls_takes_their_mean_where_accumulation_was_asked_for(
    calls: int,
) -> None:
    model = zrun_core.shard(build, zero=1, accumulate=4)
    optimizer = zrun_core.optimizer(model, "sgd", lr=1.0)
    oracle = build()
    torch.optim.SGD(oracle.parameters(), lr=1.0)
    for step in range(calls):
        backward(model, step)
        (backward_of(oracle, step) / calls).backward()
    optimizer.step()
    with zrun_core.gathered(model), torch.no_grad():
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
            assert theirs.grad is not None
            torch.testing.assert_close(ours, theirs - theirs.grad)


def backward_of(model: nn.Module, step: int) -> torch.Tensor:
    x, label = inputs(step)
    return nn.functional.cross_entropy(model(x), label)


def test_a_weight_that_is_given_counts_all_the_same() -> None:
    model = zrun_core.shard(build, zero=0, accumulate=2)
    optimizer = zrun_core.optimizer(model, "sgd", lr=1.0)
    oracle = build()
    for step in range(2):
        backward(model, step)
        backward_of(oracle, step).backward()
    optimizer.step(weight=1)
    with zrun_core.gathered(model), torch.no_grad():
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
            assert theirs.grad is not None
            torch.testing.assert_close(ours, theirs - theirs.grad)
