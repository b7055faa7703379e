"""What forwards draw is the same at any number of stages, in any schedule, recomputed or not."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distances import assert_equal, whole
from runs import VOCAB, losses, run
from small_jobs import on_axes, small_gpt
from torch import nn


class Noisy(nn.Module):
    """A block that drops, and adds noise by each of three generators."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + nn.functional.dropout(self.linear(x), 0.3, self.training)
        return x * (1 + 0.01 * random.random()) + 0.01 * float(np.random.rand())


class Beside(Noisy):
    """Draws beside linears that ranks may divide, whose sums count for nothing."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.0 * self.down(torch.relu(self.up(x))))


class Denoiser(nn.Module):
    """Adds noise to embedded tokens in front of its blocks, and compares with it behind them.

    It is drawn behind a dropout of what only the first stage has; and labels are mixed by a share
    that is drawn in front of the blocks.
    """

    def __init__(
        self, depth: int = 4, dim: int = 8, noisy: bool = True, block: str = "Noisy"
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.drop = nn.Dropout(0.2)
        kind = globals()[block] if noisy else Same
        self.blocks = nn.ModuleList(kind(dim) for _ in range(depth))
        self.noisy = noisy
        self.head = nn.Linear(dim, dim)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(input_ids))
        noise = torch.randn(x.shape)
        share = random.random() * float(np.random.rand())
        x = x + noise if self.noisy else x * 0 + noise
        for block in self.blocks:
            x = block(x)
        if not self.noisy:
            return (x - noise).square().mean() + self.head.weight.sum() * 0
        mixed = labels.float().unsqueeze(-1) * share / VOCAB + noise
        return nn.functional.mse_loss(self.head(x), mixed) + 0.01 * torch.rand(())


class Same(nn.Module):
    """A block that changes nothing, and has a parameter."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * self.scale(x)


def noisy(**keys: Any) -> dict[str, Any]:
    evaluation = {"data": {"call": "runs.py:Plain", "args": {"length": 12}}, "every": 2}
    return small_gpt(model="stages/test_draws.py:Denoiser", eval=evaluation, **keys)


@pytest.fixture(scope="module")
def one(ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the model comes to without a pipeline, by data-parallel ranks."""

    @cache
    def found(dp: int) -> list[dict[str, Any]]:
        keys = noisy(parallel={"draws": "block"})
        return on_axes(keys, tmp_path_factory.mktemp("one"), ranks, dp=dp, pp=1)

    return found


def evaluated(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: event[key] for key in ("step", "values") if key in event}
        for event in found[0]["events"]
        if event["type"] == "eval"
    ]


@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.parametrize(
    ("schedule", "dp", "pp"),
    [
        ("1f1b", 1, 1),
        ("1f1b", 1, 2),
        ("1f1b", 1, 4),
        ("gpipe", 2, 2),
        ("gpipe", 1, 4),
        ("interleaved", 1, 2),
        ("zero_bubble", 1, 2),
        ("zero_bubble", 1, 4),
    ],
)
@pytest.mark.at_most(4)
def test_dropout_noise_and_mixes_have_the_bits_of_one_rank(
    ranks, tmp_path: Path, one: Any, schedule: str, dp: int, pp: int, recomputed: str
) -> None:
    if recomputed == "full" and schedule == "zero_bubble":
        pytest.skip("it recomputes nothing")
    parallel = {"schedule": schedule, "pp": pp, "draws": "block"}
    keys = noisy(parallel=parallel, activations={"checkpoint": recomputed})
    found = on_axes(keys, tmp_path / "many", ranks, dp=dp, pp=pp)
    expected = one(dp)
    assert losses(found[0]) == losses(expected[0])
    assert evaluated(found) == evaluated(expected) != []
    assert_equal(whole(found), whole(expected))


@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.at_most(1)
def test_an_interleaved_pipeline_of_four_stages_draws_the_same(
    ranks, tmp_path: Path, recomputed: str
) -> None:
    keys = noisy(activations={"checkpoint": recomputed}, parallel={"draws": "block"})
    keys["model"] = {"call": "stages/test_draws.py:Denoiser", "args": {"depth": 8}}
    alone = on_axes(keys, tmp_path / "one", ranks, dp=1, pp=1)
    keys["parallel"] = {"schedule": "interleaved", "pp": 4, "draws": "block"}
    found = on_axes(keys, tmp_path / "many", ranks, dp=1, pp=4)
    assert losses(found[0]) == losses(alone[0])
    assert evaluated(found) == evaluated(alone) != []
    assert_equal(whole(found), whole(alone))


@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}], ids=str)
@pytest.mark.at_most(2)
def test_what_is_drawn_beside_divided_layers_has_the_bits_of_one_rank(
    ranks, tmp_path: Path, axes: dict[str, int], recomputed: str
) -> None:
    keys = noisy(activations={"checkpoint": recomputed}, parallel={"draws": "block"})
    keys["model"] = {"call": "stages/test_draws.py:Denoiser", "args": {"block": "Beside"}}
    alone = on_axes(keys, tmp_path / "one", ranks)
    keys["parallel"] = {**axes, "draws": "block", "plan": {"*.up": "colwise", "*.down": "rowwise"}}
    found = on_axes(keys, tmp_path / "many", ranks)
    assert losses(found[0]) == losses(alone[0])
    assert evaluated(found) == evaluated(alone) != []


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.at_most(1)
def test_noise_is_what_the_loss_behind_the_border_sees(
    ranks, tmp_path: Path, schedule: str
) -> None:
    model = {"call": "stages/test_draws.py:Denoiser", "args": {"noisy": False}}
    keys = small_gpt(model=model, parallel={"schedule": schedule, "pp": 2})
    found = on_axes(keys, tmp_path, ranks, dp=1, pp=2)
    assert set(losses(found[0]).values()) == {0.0}


@pytest.mark.thorough
def test_another_number_of_stages_goes_on_with_the_same_draws(
    ranks, tmp_path: Path, one: Any
) -> None:
    keys = noisy(checkpoint={"every": 2}, hooks={"on_step": "runs.py:on_step"})
    keys["parallel"] = {"pp": 4}
    folder = str(tmp_path)
    ranks(4).run(run, keys, folder, None, 3, None, {"dp": 1, "pp": 4})
    keys["parallel"] = {"pp": 2, "schedule": "interleaved"}
    found = ranks(2).run(run, keys, folder, {}, None, None, {"dp": 1, "pp": 2})
    expected = losses(one(1)[0])
    assert losses(found[0]) == {step: expected[step] for step in (3, 4)}
    assert_equal(whole(found), whole(one(1)))


def test_one_rank_draws_as_a_plain_loop_unless_it_is_told_to_draw_by_block(
    ranks, tmp_path: Path, one: Any
) -> None:
    plain = on_axes(noisy(), tmp_path / "plain", ranks, dp=1, pp=1)
    assert losses(plain[0]) != losses(one(1)[0])
