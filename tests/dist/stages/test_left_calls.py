"""Calls that a stage leaves behind its last block: their parameters come and go as others' do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pipeline_zoo import DIM, Mlp
from runs import PoolWorker, job
from torch import nn
from verifying import recorded, verdict_of

from zrun_core.train.trainer import Trainer

KEYS = {
    "model": "stages/test_left_calls.py:Scaled",
    "data": "zoo.py:vectors",
    "optim": {"name": "sgd", "lr": 0.5},
    "steps": 3,
    "batch": {"global": 8, "micro": 2},
    "hooks": {},
    "checkpoint": None,
}


class Scaled(nn.Module):
    """A parameter of the root scales what goes into the blocks: its backward needs its value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))
        self.head = nn.Linear(DIM, 1)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, domain: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x), y)


def left(keys: dict[str, Any], run_dir: str, dims: dict[str, int]) -> dict[str, Any]:
    """Train, recorded; return what is under way after the last step, too."""
    trainers: list[Trainer] = []
    prepare = PoolWorker.prepare

    def watched(self: PoolWorker) -> Trainer:
        trainers.append(prepare(self))
        return trainers[0]

    with patch.object(PoolWorker, "prepare", watched):
        found = recorded(keys, run_dir, dims)
    if not trainers:  # it has failed before it trained
        return found
    sharded = trainers[0].sharded
    return {
        **found,
        "calls": len(sharded.gatherer.calls.under_way),
        "units": {unit.name: (unit.num_active, unit.pins) for unit in sharded.units},
    }


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.parametrize(
    ("dp", "offload"), [(1, {"param": "disk"}), (2, {})], ids=["from the disk", "sharded"]
)
@pytest.mark.at_most(3)
def test_the_root_of_a_stage_that_is_not_the_last(
    ranks, tmp_path: Path, dp: int, offload: dict[str, str], schedule: str
) -> None:
    parallel = {"pp": 2, "schedule": schedule}
    if schedule == "interleaved":
        parallel["virtual"] = 2
    keys = job(**KEYS, zero=3, parallel=parallel, offload=offload)
    dims = {"dp": dp, "tp": 1, "pp": 2}
    found = ranks(math.prod(dims.values())).run(left, keys, str(tmp_path), dims)
    for each in found:
        assert not each["error"], each["error"]
        assert each["calls"] == 0
        assert set(each["units"].values()) == {(0, 0)}, each["units"]
    verdict = verdict_of(tmp_path)
    assert verdict.difference is None, verdict.difference.in_words
    (end,) = (event for each in found for event in each["events"] if event["type"] == "end")
    sent = end["traffic"]["all_gather"] if dp > 1 else {}
    assert sent.get("measured_bytes") == sent.get("expected_bytes")
