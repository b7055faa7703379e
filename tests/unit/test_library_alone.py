"""The library in a world of one: what its optimizers compute, and what it says to arguments that are wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import zrun_core
from zrun_core import rng
from zrun_core.library import run as library


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    threads, current = torch.get_num_threads(), library._current
    library._current = None
    zrun_core.init(device="cpu", threads=1)
    yield
    library._current = current
    torch.set_num_threads(threads)


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


def lars(params: list[nn.Parameter], velocities: list[torch.Tensor], lr: float, decay: float) -> None:
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
