"""Two models, losses and optimizers and one scaler in a step, against torch's own GradScaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from toys import world

import zrun_core

STEPS = 8


def generator() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32)
    )


def discriminator() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(real [4, 32], noise [4, 8]) of this rank."""
    rank, size = world()
    source = torch.Generator().manual_seed(step)
    real, noise = torch.randn(8, 32, generator=source) + 1, torch.randn(8, 8, generator=source)
    return real.chunk(size)[rank], noise.chunk(size)[rank]


def ours(stage: int, precision: str, bad: dict[str, int]) -> dict[str, Any]:
    """`bad` names the step in which the loss of a model overflows, on the last rank."""
    run = zrun_core.init(threads=1, patience_s=3.0)
    zero = {"stage": stage, "bucket": 1 << 13}
    made = zrun_core.shard(generator, zero=zero, precision=precision)
    judge = zrun_core.shard(discriminator, zero=zero, precision=precision)
    for_made = zrun_core.optimizer(made, "adamw", lr=1e-3)
    for_judge = zrun_core.optimizer(judge, "adamw", lr=1e-3)
    scaler = zrun_core.GradScaler(init_scale=1024.0, growth_interval=3, enabled=precision == "fp16")
    record: dict[str, Any] = {"losses": [], "scales": [], "skipped": []}
    for step in range(STEPS):
        real, noise = batch(step)
        fake = made(noise)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        judge_loss = bce(judge(real), ones) + bce(judge(fake.detach()), zeros)
        for_judge.zero_grad()
        scaler.scale(spoil(judge_loss, step == bad.get("judge"))).backward()
        scaler.step(for_judge)

        made_loss = bce(judge(fake), ones)
        for_made.zero_grad()
        scaler.scale(spoil(made_loss, step == bad.get("made"))).backward()
        scaler.step(for_made)
        scaler.update()
        record["losses"] += [run.mean(judge_loss), run.mean(made_loss)]
        record["scales"].append(scaler.get_scale())
        record["skipped"].append((bool(for_judge.skipped), bool(for_made.skipped)))
    return record


def spoil(loss: torch.Tensor, now: bool) -> torch.Tensor:
    rank, size = world()
    return loss * float("inf") if now and rank == size - 1 else loss


def theirs(precision: str, bad: dict[str, int]) -> dict[str, Any]:
    """The plain loop: fp32 parameters, autocast, gradients averaged over ranks before each step."""
    half = precision == "fp16"
    made, judge = generator(), discriminator()
    for_made = torch.optim.AdamW(made.parameters(), lr=1e-3, fused=True)
    for_judge = torch.optim.AdamW(judge.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=half)
    record: dict[str, Any] = {"losses": [], "scales": [], "skipped": []}

    def step_of(optimizer: torch.optim.Optimizer, model: nn.Module, loss: torch.Tensor) -> bool:
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        for param in model.parameters():
            if dist.is_initialized():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        before = next(model.parameters()).detach().clone()
        scaler.step(optimizer)
        return torch.equal(before, next(model.parameters()))

    for step in range(STEPS):
        real, noise = batch(step)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        with torch.autocast("cpu", torch.float16, enabled=half, cache_enabled=False):
            fake = made(noise)
            judge_loss = bce(judge(real), ones) + bce(judge(fake.detach()), zeros)
        judged = step_of(for_judge, judge, spoil(judge_loss, step == bad.get("judge")))
        with torch.autocast("cpu", torch.float16, enabled=half, cache_enabled=False):
            made_loss = bce(judge(fake), ones)
        made_skipped = step_of(for_made, made, spoil(made_loss, step == bad.get("made")))
        scaler.update()
        means = torch.stack([judge_loss.detach(), made_loss.detach()]).double()
        if dist.is_initialized():
            dist.all_reduce(means)
            means /= dist.get_world_size()
        record["losses"] += means.tolist()
        record["scales"].append(scaler.get_scale())
        record["skipped"].append((judged, made_skipped))
    return record


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.at_most(2)
def test_fp32_losses_are_those_of_the_plain_loop_to_the_bit(ranks, stage):
    assert ranks(2).run(ours, stage, "fp32", {}) == ranks(2).run(theirs, "fp32", {})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.at_most(2)
def test_an_overflow_skips_one_optimizer_and_halves_the_scale_once(ranks, stage):
    bad = {"judge": 2, "made": 4}
    plain = ranks(2).run(theirs, "fp16", bad)[0]
    for found in ranks(2).run(ours, stage, "fp16", bad):
        assert found["skipped"] == plain["skipped"]
        assert found["skipped"][2:5] == [(True, False), (False, False), (False, True)]
        assert found["scales"] == plain["scales"]
        assert found["losses"] == pytest.approx(plain["losses"], abs=1e-4)


def test_an_overflow_of_both_halves_the_scale_once(ranks):
    found, plain = (
        ranks(2).run(ours, 2, "fp16", {"judge": 1, "made": 1})[0],
        ranks(2).run(theirs, "fp16", {"judge": 1, "made": 1})[0],
    )
    assert found["skipped"][1] == (True, True)
    assert found["scales"] == plain["scales"]
    assert found["scales"][1] == 512.0
