"""Optimizers on shards: torch's own, and LAMB, LARS and Lion against the papers' algorithms on
whole tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from toys import (
    Net,
    build,
    data,
    full_state,
    make_sharded,
    optim_config,
    same_bits,
    train,
    train_ddp,
    world,
)

from zrun_core.distributed.named_vector import NamedVector
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.spine.sections.optimizer_args import NOT_SHARDED

NO_DECAY = ["norm", "bias"]


# The papers, line by line, on whole tensors in float64: each takes (x, g, state, t, lr) and returns
# the next x.

Rule = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], int, float], torch.Tensor]


def lamb(
    *,
    decay: float,
    beta: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    corrects: bool = True,
    phi: tuple[float, float] | None = None,
    clamp: tuple[float, float] | None = None,
    adapts: bool = True,
) -> Rule:
    """You et al. 2020, Algorithm 2."""

    def rule(
        x: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor], t: int, lr: float
    ) -> torch.Tensor:
        state["m"] = m = beta[0] * state.get("m", torch.zeros_like(x)) + (1 - beta[0]) * g
        state["v"] = v = beta[1] * state.get("v", torch.zeros_like(x)) + (1 - beta[1]) * g * g
        if corrects:
            m, v = m / (1 - beta[0] ** t), v / (1 - beta[1] ** t)
        r = m / (torch.sqrt(v) + eps)
        direction = r + decay * x
        if not adapts:
            return x - lr * direction
        size, length = float(x.norm()), float(direction.norm())
        if phi is not None:
            size = min(max(size, phi[0]), phi[1])
        ratio = size / length if size > 0 and length > 0 else 1.0
        if clamp is not None:
            ratio = min(max(ratio, clamp[0]), clamp[1])
        return x - lr * ratio * direction

    return rule


def lars(*, decay: float, momentum: float = 0.9, eta: float = 1e-3, adapts: bool = True) -> Rule:
    """You et al. 2017, Algorithm 1."""

    def rule(
        x: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor], t: int, lr: float
    ) -> torch.Tensor:
        size, slope = float(x.norm()), float(g.norm())
        local = eta * size / (slope + decay * size) if adapts and size > 0 and slope > 0 else 1.0
        state["v"] = momentum * state.get("v", torch.zeros_like(x)) + lr * local * (g + decay * x)
        return x - state["v"]

    return rule


def lion(*, decay: float, beta: tuple[float, float] = (0.9, 0.99)) -> Rule:
    """Chen et al. 2023, Algorithm 2."""

    def rule(
        x: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor], t: int, lr: float
    ) -> torch.Tensor:
        m = state.get("m", torch.zeros_like(x))
        update = torch.sign(beta[0] * m + (1 - beta[0]) * g)
        state["m"] = beta[1] * m + (1 - beta[1]) * g
        return x - lr * (update + decay * x)

    return rule


def adamw(*, decay: float, beta: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> Rule:
    """Loshchilov and Hutter 2019, Algorithm 2."""

    def rule(
        x: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor], t: int, lr: float
    ) -> torch.Tensor:
        state["m"] = beta[0] * state.get("m", torch.zeros_like(x)) + (1 - beta[0]) * g
        state["v"] = beta[1] * state.get("v", torch.zeros_like(x)) + (1 - beta[1]) * g * g
        m, v = state["m"] / (1 - beta[0] ** t), state["v"] / (1 - beta[1] ** t)
        return x - lr * (m / (torch.sqrt(v) + eps) + decay * x)

    return rule


def train_by(
    rule_of: Callable[[str], Rule],
    *,
    clip: float | None = None,
    lr: float = 1e-2,
    in_bf16: bool = False,
) -> list[float]:
    """The plain loop on one process, in float64; `in_bf16` rounds the moments after each step."""
    model = build().double()
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name, _ in model.named_parameters()}
    losses = []
    for t, (x, y) in enumerate(data(6), 1):
        model.zero_grad()
        loss = nn.functional.mse_loss(forward64(model, x.double()), y.double())
        loss.backward()
        losses.append(loss.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        with torch.no_grad():
            for name, param in model.named_parameters():
                assert param.grad is not None
                param.copy_(rule_of(name)(param, param.grad, states[name], t, lr))
                if in_bf16:
                    states[name] = {
                        key: value.bfloat16().double() for key, value in states[name].items()
                    }
    return losses


def forward64(model: Net, x: torch.Tensor) -> torch.Tensor:
    x = model.first(x)
    for block in model.blocks:
        x = block(x)
    return model.last(x)


def overflow(stage: int, name: str) -> dict[str, Any]:
    """The third of four steps overflows on the last rank; parameters before and after each step."""
    precision = {"compute": "fp16", "loss_scale": {"init": 1024.0}}
    sharded = make_sharded(build(), stage, precision=precision, optim={"name": name})
    rank, size = world()
    states = [full_state(sharded)]
    for number, (x, y) in enumerate(data(4)):
        sharded.begin_step()
        with sharded.forward() as micro:
            loss = sharded.module(x.chunk(size)[rank].half(), y.chunk(size)[rank])
        bad = number == 2 and rank == size - 1
        sharded.backward(loss * (float("inf") if bad else 1 / size), micro, boundary=True)
        sums = NamedVector.of(sharded.comm.device, weight=1.0)
        sharded.step(1e-3, sums, lambda sums: sums["weight"] / size)
        states.append(full_state(sharded))
    changed = [any((a[name] != b[name]).any() for name in a) for a, b in pairwise(states)]
    return {
        "changed": changed,
        "state": {name: value.float().numpy() for name, value in states[-1].items()},
    }


@pytest.mark.parametrize("name", ["lamb", "lars", "lion"])
@pytest.mark.at_most(1)
def test_a_step_that_overflows_changes_nothing(ranks, name):
    runs = [ranks(2).run(overflow, stage, name) for stage in range(4)]
    for run in runs:
        for each in run:
            assert each["changed"] == [True, True, False, True]
            assert all(
                (value == runs[0][0]["state"][key]).all() for key, value in each["state"].items()
            )


def exempt(name: str) -> bool:
    return any(word in name for word in NO_DECAY)


CASES: dict[str, tuple[dict[str, Any], Callable[[str], Rule]]] = {
    "lamb": ({"name": "lamb"}, lambda name: lamb(decay=0.1)),
    "lamb without correction": (
        {"name": "lamb", "args": {"bias_correction": False}},
        lambda name: lamb(decay=0.1, corrects=False),
    ),
    "lamb with phi": (
        {"name": "lamb", "args": {"norm_clamp": [0.5, 2.0]}},
        lambda name: lamb(decay=0.1, phi=(0.5, 2.0)),
    ),
    "lamb with a clamped ratio": (
        {"name": "lamb", "betas": [0.8, 0.95], "eps": 1e-3, "args": {"ratio_clamp": [0.2, 0.4]}},
        lambda name: lamb(decay=0.1, beta=(0.8, 0.95), eps=1e-3, clamp=(0.2, 0.4)),
    ),
    "lamb with exempt layers": (
        {"name": "lamb", "no_decay": NO_DECAY},
        lambda name: lamb(decay=0.1 * (not exempt(name)), adapts=not exempt(name)),
    ),
    "lamb that adapts exempt layers": (
        {"name": "lamb", "no_decay": NO_DECAY, "args": {"adapt_no_decay": True}},
        lambda name: lamb(decay=0.1 * (not exempt(name))),
    ),
    "lars": (
        {"name": "lars", "args": {"trust_coefficient": 0.1}},
        lambda name: lars(decay=0.1, eta=0.1),
    ),
    "lars with exempt layers": (
        {"name": "lars", "no_decay": NO_DECAY, "args": {"momentum": 0.5, "trust_coefficient": 0.1}},
        lambda name: lars(
            decay=0.1 * (not exempt(name)), momentum=0.5, eta=0.1, adapts=not exempt(name)
        ),
    ),
    "lion": ({"name": "lion"}, lambda name: lion(decay=0.1)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.at_most(1)
def test_the_papers_algorithm_at_every_stage(ranks, case):
    optim, rule_of = CASES[case]
    lr, tolerance = (
        (1e-3, 2e-4) if case == "lion" else (1e-2, 2e-5)
    )  # a sign may turn where a moment is near zero
    expected = train_by(rule_of, lr=lr)
    runs = [ranks(3).run(train, stage, {"optim": optim}, 1, lr) for stage in range(4)]
    assert runs[0][0]["losses"] == pytest.approx(expected, rel=tolerance)
    for run in runs:
        for each in run:
            same_bits(each, runs[0][0])


@pytest.mark.parametrize("rule", [adamw, lamb, lion])
def test_moments_in_bf16_are_rounded_after_each_step(ranks, rule):
    lr = 1e-3 if rule is lion else 1e-2
    exact, rounded = (
        train_by(lambda name: rule(decay=0.1), lr=lr, in_bf16=in_bf16) for in_bf16 in (False, True)
    )
    ours = ranks(2).run(train, 2, {"optim": {"name": rule.__name__, "moments": "bf16"}}, 1, lr)[0][
        "losses"
    ]
    assert ours == pytest.approx(rounded, rel=2e-4)
    assert max(abs(a - b) for a, b in zip(ours, rounded, strict=True)) < 0.3 * max(
        abs(a - b) for a, b in zip(exact, rounded, strict=True)
    )


TORCHS: list[dict[str, Any]] = [
    {"name": "adadelta"},
    {"name": "adagrad", "args": {"initial_accumulator_value": 0.1, "lr_decay": 0.01}},
    {"name": "adam", "args": {"amsgrad": True}},
    {"name": "adamax"},
    {"name": "adamw"},
    {"name": "asgd"},
    {"name": "nadam"},
    {"name": "radam"},
    {"name": "rmsprop", "args": {"momentum": 0.9, "centered": True}},
    {"name": "rprop", "weight_decay": None},
    {"name": "sgd"},
    {"name": "sgd", "args": {"momentum": 0.9, "nesterov": True}},
]


def test_no_class_of_torch_is_forgotten():
    classes = {
        n.lower() for n, c in vars(torch.optim).items() if inspect.isclass(c) and n != "Optimizer"
    }
    assert classes - NOT_SHARDED.keys() == {case["name"] for case in TORCHS}


@pytest.mark.parametrize("optim", TORCHS, ids=lambda optim: " ".join(map(str, optim.values())))
@pytest.mark.at_most(1)
def test_torchs_own_are_bit_equal_to_the_plain_model_at_every_stage(ranks, optim):
    found = resolve_optimizer(optim_config(**optim), lambda name: None)
    plain = ranks(2).run(
        train_ddp, type(found.make([*build().parameters()])).__name__, dict(found.kwargs)
    )[0]
    for stage in range(4):
        for run in ranks(2).run(train, stage, {"optim": optim}):
            same_bits(run, plain)


OURS = [
    {"name": "lamb", "clip": 0.05},
    {"name": "lars", "clip": 0.05},
    {"name": "lion", "clip": 0.05},
]
IN_BF16 = [{"name": name, "moments": "bf16"} for name in ("adam", "adamw", "lamb", "lion")]


@pytest.mark.parametrize(
    "precision", ["fp32", {"compute": "bf16", "reduce": "compute"}], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize(
    "optim", OURS + IN_BF16, ids=lambda optim: " ".join(map(str, optim.values()))
)
@pytest.mark.at_most(3)
def test_stages_are_bit_equal_and_take_what_is_planned(ranks, optim, precision):
    options = {"optim": optim, "precision": precision}
    runs = [ranks(2).run(train, stage, options) for stage in range(4)]
    for run in runs:
        for each in run:
            same_bits(each, runs[0][0])


def test_clipping_comes_before_the_ratio(ranks):
    expected = train_by(lambda name: lamb(decay=0.1), clip=0.05)
    assert ranks(2).run(train, 2, {"optim": OURS[0]})[0]["losses"] == pytest.approx(
        expected, rel=2e-5
    )
