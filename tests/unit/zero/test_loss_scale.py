"""The loss scale against torch's GradScaler, and its additions: hysteresis, floor and ceiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.zero.unit.precision import LossScaler, Precision

CPU = torch.device("cpu")


def scaler(**keys: Any) -> LossScaler:
    config = PrecisionConfig.model_validate({"compute": "fp16", "loss_scale": keys})
    return LossScaler(Precision.of(config), CPU)


def scales(ours: LossScaler, overflows: list[bool]) -> list[float]:
    found = []
    for overflow in overflows:
        ours.update(torch.tensor(overflow))
        found.append(float(ours.scale))
    return found


def torchs(overflows: list[bool], init: float, window: int) -> list[float]:
    """GradScaler's scale after each step, on a real parameter and gradient."""
    oracle = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=window)
    param = torch.nn.Parameter(torch.ones(1))
    optimizer, found = torch.optim.SGD([param], lr=0.0), []
    for overflow in overflows:
        oracle.scale((param * 1.0).sum())
        param.grad = torch.tensor([float("inf") if overflow else 1.0])
        oracle.step(optimizer)
        oracle.update()
        found.append(oracle.get_scale())
    return found


@settings(max_examples=30, deadline=None)
@given(overflows=st.lists(st.booleans(), min_size=1, max_size=30), window=st.integers(1, 4))
def test_the_scale_is_grad_scalers(overflows, window):
    init = 2.0**40  # far from the floor
    assert scales(scaler(init=init, window=window), overflows) == torchs(overflows, init, window)


def test_hysteresis_waits_for_overflows_in_a_row():
    found = scales(
        scaler(init=8.0, hysteresis=2, window=100), [True, False, True, True, True, True, False]
    )
    assert found == [8, 8, 8, 4, 4, 2, 2]


def test_an_overflow_starts_the_window_anew():
    assert scales(scaler(init=8.0, window=2), [False, True, False, False, False]) == [8, 4, 4, 8, 8]
    assert scales(scaler(init=8.0, window=2, hysteresis=2), [False, True, False, False]) == [
        8,
        8,
        8,
        16,
    ]


def test_the_scale_stays_between_floor_and_infinity():
    assert scales(scaler(init=2.0, min=1.0), [True, True, True]) == [1, 1, 1]
    assert scales(scaler(init=0.5, min=0.125), [True, True, True]) == [0.25, 0.125, 0.125]
    grown = scales(scaler(init=2.0**126, window=1), [False, False, False, True])
    assert grown == [2.0**127, 2.0**127, 2.0**127, 2.0**126]


def test_other_formats_are_not_scaled():
    for compute in ("fp32", "bf16"):
        ours = LossScaler(Precision.of(PrecisionConfig.model_validate(compute)), CPU)
        assert not ours.enabled
        assert scales(ours, [True, False]) == [1, 1]


def test_state_is_restored():
    first = scaler(init=16.0, window=3, hysteresis=2)
    scales(first, [False, False, True])
    second = scaler(init=16.0, window=3, hysteresis=2)
    second.load_state_dict(first.state_dict())
    rest = [True, False, False, False, True, True]
    assert scales(second, rest) == scales(first, rest)


@pytest.mark.parametrize(
    ("keys", "compute", "reduce"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ({"compute": "fp16", "reduce": "compute"}, torch.float16, torch.float16),
    ],
)
def test_formats(keys, compute, reduce):
    precision = Precision.of(PrecisionConfig.model_validate(keys))
    assert (precision.compute, precision.reduce) == (compute, reduce)
    with precision.autocast(CPU):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        norm = torch.nn.functional.layer_norm(torch.ones(2, 2, dtype=torch.float32), (2,))
    assert product.dtype == compute
    assert norm.dtype == torch.float32
