"""Pipelines with what else a job may ask for: each has the bits of the same job without stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from distances import assert_equal, whole
from runs import losses
from small_jobs import on_axes, small_gpt

RECOMPUTED = {"activations": {"checkpoint": "full"}}
FEATURES: dict[str, dict[str, Any]] = {
    "bf16, hybrid": {"precision": "bf16", "zero": {"stage": 3, "shard_group": 1}},
    "fp16, overflows": {
        "precision": {"compute": "fp16", "loss_scale": {"init": 2.0**24}},
        "zero": 2,
    },
    "recomputed": {**RECOMPUTED, "zero": 3},
    "every second block recomputed": {"activations": {"checkpoint": "every_n", "n": 2}},
    "selective": {"activations": {"checkpoint": "selective"}, "zero": 3},
    "lamb": {"optim": {"name": "lamb", "lr": 1e-2, "clip": 1.0}, "zero": 2},
    "states on disk": {
        "offload": {"optimizer": "disk", "grad": "disk", "param": "disk"},
        "zero": 3,
    },
    "optimizer on disk": {"offload": {"optimizer": "disk"}, "zero": 1},
    "inputs on disk": {"activations": {"checkpoint": "full", "offload": "disk"}, "zero": 3},
}


@pytest.fixture(scope="module")
def plain(ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return what the job with a feature comes to without stages."""

    @cache
    def found(name: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("plain")
        return on_axes(small_gpt(**FEATURES[name]), folder, ranks, dp=2, pp=1)

    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.at_most(2)
def test_features(ranks, tmp_path: Path, plain: Any, name: str, schedule: str) -> None:
    keys = small_gpt(**FEATURES[name], parallel={"schedule": schedule, "pp": 2})
    found = on_axes(keys, tmp_path / "many", ranks, dp=2, pp=2)
    assert losses(found[0]) == losses(plain(name)[0])
    assert_equal(whole(found), whole(plain(name)))
