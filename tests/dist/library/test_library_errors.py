"""What goes wrong in a user's own loop is told in one line, and nobody waits for ever."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from own_loop import sharded, start
from test_library import Scores, build_scores, inputs
from torch import nn
from torch.utils.checkpoint import checkpoint

import zrun_core
from zrun_core.errors import ZrunError


def says(action: Any) -> str:
    with pytest.raises(ZrunError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def misuse(stage: int) -> dict[str, str]:
    start()
    told = {}
    plain = build_scores()
    told["early"] = says(lambda: zrun_core.optimizer(plain))
    torchs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model = zrun_core.shard(plain, zero=stage)
    x = inputs()[0]
    told["again"] = says(lambda: zrun_core.shard(model))
    other = nn.Linear(3, 5)
    told["foreign"] = says(
        lambda: zrun_core.optimizer(model, groups=[{"params": other.parameters()}])
    )
    told["twice"] = says(
        lambda: zrun_core.optimizer(model, groups=[{"params": [model.last.bias, model.last.bias]}])
    )
    told["left out"] = says(
        lambda: zrun_core.optimizer(model, groups=[{"params": [model.last.bias]}])
    )
    told["no groups"] = says(lambda: zrun_core.optimizer(model, groups=[{"lr": 1.0}]))
    told["name"] = says(lambda: zrun_core.optimizer(model, "adamv"))
    told["argument"] = says(lambda: zrun_core.optimizer(model, "adamw", beta=3))
    told["whole"] = says(lambda: zrun_core.optimizer(model, torch.optim.Adafactor, lr=1e-3))
    optimizer = zrun_core.optimizer(model, "sgd", lr=0.1)
    told["second"] = says(lambda: zrun_core.optimizer(model))
    told["no backward"] = says(optimizer.step)
    told["part"] = says(lambda: model.first(x))
    out = model(x)
    told["gathered"] = says(zrun_core.gathered(model).__enter__)
    out.mean().backward()
    told["torch's"] = says(torchs.step)
    torchs_scaler = torch.amp.GradScaler("cpu")
    torchs_scaler.scale(out.mean().detach())
    told["scaler"] = says(lambda: torchs_scaler.step(optimizer))
    told["weight"] = says(lambda: optimizer.step(weight=float("nan")))
    told["state"] = says(optimizer.state_dict)
    optimizer.step()
    told["stepped"] = says(optimizer.step)
    told["zero"] = says(lambda: zrun_core.shard(Scores, zero=4))
    told["precision"] = says(lambda: zrun_core.shard(Scores, precision="fp8"))
    told["no model"] = says(lambda: zrun_core.shard(lambda: 3))
    scaler = zrun_core.GradScaler()
    told["update"] = says(scaler.update)
    with zrun_core.forward(model), pytest.raises(ZrunError, match="when the model has returned"):
        model.first(x).mean().backward()
    return told


EXPECTED = {
    "early": "call model = zrun_core.shard(model) first",
    "again": "sharded already",
    "foreign": "shape (5, 3) (number 0) that is none of this model's",
    "twice": "last.bias is in two groups",
    "left out": "in no group, first.weight first",
    "no groups": 'groups[0] is no mapping with "params"',
    "name": "did you mean",
    "argument": "did you mean betas?",
    "whole": "cannot be sharded, because it looks at whole tensors",
    "second": "has one already",
    "no backward": "no backward() of this model's outputs since",
    "part": "call the model itself, or enter zrun_core.forward(model)",
    "gathered": "backward() has not followed",
    "torch's": "zrun_core.optimizer(model, torch.optim.AdamW, lr=...)",
    "scaler": "use zrun_core.GradScaler",
    "weight": "a finite number, 0 or more",
    "state": "zrun_core.save",
    "stepped": "no backward() of this model's outputs since",
    "zero": "shard(zero=4)",
    "precision": "shard(precision='fp8')",
    "no model": "returned int",
    "update": "no optimizer has stepped",
}


@pytest.mark.parametrize("stage", [0, 3])
def test_misuse_is_told_in_one_line(ranks, stage):
    for told in ranks(2).run(misuse, stage):
        assert told.keys() == EXPECTED.keys()
        for key, text in EXPECTED.items():
            assert text in told[key], key


class Recomputed(Scores):
    """Of all its calls, backward has nothing but the inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Biased(Scores):
    """Trains biases alone; its last weight is looked at outside of its module."""

    def __init__(self) -> None:
        super().__init__()
        for name, param in self.named_parameters():
            param.requires_grad_(name.endswith("bias"))


def stale_graph(stage: int, build: Callable[[], nn.Module]) -> tuple[str, list[float], list[float]]:
    """A forward, a step, and then the forward's backward; then losses with and without all that."""
    trained = []
    for is_stale in (True, False):
        model = sharded(stage, build)
        optimizer = zrun_core.optimizer(model, "sgd", lr=0.1)
        losses = []
        for x in inputs():
            early = model(x)
            kept = early.detach()
            loss = (model(x) - kept - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if is_stale:
                told = says(early.square().mean().backward)
        trained.append(losses)
    return told, *trained


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", [Scores, Recomputed, Biased])
@pytest.mark.at_most(1)
def test_a_graph_of_before_the_step_is_refused_and_leaves_no_trace(ranks, stage, kind):
    for told, interrupted, plain in ranks(2).run(stale_graph, stage, kind):
        assert "call the model again, and detach() what you keep across steps" in told
        assert interrupted == plain


def stale_part(stage: int) -> str:
    """As `stale_graph`, of a part of the model: it is torch who refuses."""
    model = sharded(stage, build_scores)
    optimizer = zrun_core.optimizer(model, "sgd", lr=0.1)
    x = inputs()[0]
    with zrun_core.forward(model):
        early = model.last(model.first(x)).square().mean()
    model(x).square().mean().backward()
    optimizer.step()
    with pytest.raises(RuntimeError) as caught:
        early.backward()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_backward_through_updated_parameters_is_refused_as_by_torch(ranks, stage):
    for text in ranks(2).run(stale_part, stage):
        assert "modified by an inplace operation" in text


def interrupted(stage: int) -> list[float]:
    """A backward that raises on every rank, and the same step made again."""
    model = sharded(stage, build_scores)
    optimizer = zrun_core.optimizer(model, "sgd", lr=0.005)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("the user's own")

    losses = []
    for x in inputs():
        out = model(x)
        hidden = out.square()
        handle = model.first.weight.register_hook(fail)
        with pytest.raises(ValueError, match="own"):
            hidden.mean().backward()
        handle.remove()
        assert "call zero_grad()" in says(optimizer.step)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_can_be_made_again_after_a_backward_that_raised(ranks, stage):
    model = build_scores()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    plain = []
    for x in inputs():
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    assert ranks(2).run(interrupted, stage)[0] == pytest.approx(plain, abs=2e-6)


def alone() -> str:
    """`gathered` entered on one rank only."""
    run = start()
    model = sharded(3, build_scores)
    if not run.is_main:
        return ""
    return says(zrun_core.gathered(model).__enter__)


@pytest.mark.thorough
def test_gathered_on_one_rank_names_the_others(ranks):
    told, _ = ranks(2).run(alone)
    assert "rank 1 has not called it within 3 s" in told


def never_finite(stage: int, *, late: bool = False) -> tuple[list[bool], list[str], str, bool]:
    """The gradient is spoilt on the last rank; with `late`, totals are read as on a GPU."""
    run = start()
    model = sharded(stage, build_scores)
    optimizer = zrun_core.optimizer(model, "sgd", lr=0.1, max_skips=5)
    optimizer._steps.reads_late |= late
    skipped = []

    def step() -> None:
        (model(inputs()[0]).mean() * (1.0 if run.is_main else float("nan"))).backward()
        optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            step()
            skipped.append(bool(optimizer.skipped))
    told = says(step)
    model(inputs()[0]).mean().backward()  # and it can go on
    optimizer.step()
    return skipped, [str(each.message) for each in caught], told, bool(optimizer.skipped)


@pytest.mark.parametrize("stage", [0, 2])
def test_steps_that_are_never_finite_end_on_every_rank_and_name_the_culprit(ranks, stage):
    first, second = ranks(2).run(never_finite, stage)
    for skipped, _, told, after in (first, second):
        assert skipped == [True] * 4
        assert told.startswith(
            "step(): 5 skipped in a row: "
            "the gradient of last.bias (layer last) is nan on rank 1; look at"
        )
        assert not after
    assert first[1] == [
        "step(): skipped on all ranks: the gradient of last.bias (layer last) is nan",
        "step(): skipped on all ranks: the gradient of last.bias (layer last) is nan on rank 1",
    ]
    assert second[1] == []


def never_finite_late(stage: int) -> tuple[list[bool], list[str], str, bool]:
    return never_finite(stage, late=True)


def test_a_skip_that_is_read_late_names_the_unit_and_the_next_one_the_parameter(ranks):
    """Within the next step its own gradient is there already, whose parameters would be named."""
    first, second = ranks(2).run(never_finite_late, 2)
    for skipped, _, told, after in (first, second):
        assert skipped == [True] * 4
        assert "5 skipped in a row: the gradient of last.bias (layer last) is nan on" in told
        assert not after
    assert [text.removeprefix("step(): skipped on all ranks: ") for text in first[1]] == [
        "a gradient in last is not finite",
        "the gradient of last.bias (layer last) is nan",
    ]
