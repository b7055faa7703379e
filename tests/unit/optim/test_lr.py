"""Learning rates against closed forms and torch's own schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from zrun_core.errors import JobError
from zrun_core.optim.lr import make_schedule
from zrun_core.spine.sections.optim import LrConfig

TOTAL = 20


def factors(total: int | None = TOTAL, num: int = TOTAL, **keys: Any) -> list[float]:
    schedule = make_schedule(LrConfig.model_validate(keys), total)
    return [schedule(step) for step in range(num)]


def torchs(
    make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], num: int = TOTAL
) -> list[float]:
    """The learning rates of one of torch's schedulers from a peak of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for _ in range(num):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_the_default_changes_nothing():
    assert factors(None) == [1.0] * TOTAL


def test_linear_is_torchs():
    oracle = torchs(
        lambda o: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=TOTAL)
    )
    assert factors(schedule="linear", min_factor=0.1) == pytest.approx(oracle)


def test_cosine_is_torchs():
    oracle = torchs(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=TOTAL, eta_min=0.1))
    assert factors(schedule="cosine", min_factor=0.1) == pytest.approx(oracle)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_polynomial_is_torchs(power):
    oracle = torchs(lambda o: lr_scheduler.PolynomialLR(o, total_iters=TOTAL, power=power))
    assert factors(schedule="polynomial", power=power) == pytest.approx(oracle)


def test_warmup_rises_linearly_and_wastes_no_step():
    assert factors(schedule="constant", warmup=4, num=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    oracle = torchs(
        lambda o: lr_scheduler.SequentialLR(
            o,
            [
                lr_scheduler.LambdaLR(o, lambda step: (step + 1) / 4),
                lr_scheduler.CosineAnnealingLR(o, T_max=TOTAL - 4),
            ],
            milestones=[4],
        )
    )
    assert factors(schedule="cosine", warmup=4) == pytest.approx(oracle)


def test_inverse_sqrt_is_one_at_the_end_of_warmup():
    found = factors(None, schedule="inverse_sqrt", warmup=5, num=100)
    assert found[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert found[5:] == [math.sqrt(5 / (step + 1)) for step in range(5, 100)]
    assert factors(None, schedule="inverse_sqrt", min_factor=0.5, num=50)[-1] == 0.5


def test_wsd_is_stable_and_then_falls_to_the_end():
    found = factors(schedule="wsd", warmup=2, decay_steps=5, min_factor=0.2)
    assert found[:16] == [0.5, 1.0, *[1.0] * 14]
    assert found[15:] == pytest.approx([1 - 0.8 * k / 5 for k in range(5)])
    assert factors(schedule="wsd")[15:] == [1.0, *factors(schedule="wsd")[16:]], (
        "auto: the last fifth"
    )
    assert factors(schedule="wsd")[16:] == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_decay_steps_end_the_decay_before_the_run():
    assert factors(schedule="linear", decay_steps=10, min_factor=0.1, num=12)[10:] == pytest.approx(
        [0.1, 0.1]
    )


@given(
    name=st.sampled_from(["constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd"]),
    warmup=st.integers(0, 10),
    low=st.floats(0, 1),
    step=st.integers(0, 1000),
)
def test_factors_stay_between_the_floor_and_one(name, warmup, low, step):
    schedule = make_schedule(LrConfig(schedule=name, warmup=warmup, min_factor=low), 50)
    factor = schedule(step)
    assert factor == schedule(step), "a pure function of the step"
    assert 0 < factor <= 1 if step < warmup else low - 1e-12 <= factor <= 1 + 1e-12


def test_a_function_of_the_users_is_the_schedule():
    schedule = make_schedule(
        LrConfig.model_validate({"schedule": "mine.py:f", "warmup": 5}), None, lambda step: step / 2
    )
    assert [schedule(step) for step in (0, 3)] == [0, 1.5]


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "wsd"])
def test_a_decay_needs_an_end_that_comes_after_warmup(name):
    with pytest.raises(JobError, match="needs the number of steps"):
        factors(None, schedule=name)
    with pytest.raises(
        JobError,
        match=r"30 steps of warm-up are more than the 20 steps.* write lr\.warmup=2 too, "
        r"or .* --smoke 20",
    ):
        factors(schedule=name, warmup=30)
