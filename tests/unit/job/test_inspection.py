"""`zrun check` builds a model as ranks do, and refuses what they would."""

from __future__ import annotations

from pathlib import Path

import pytest

from zrun.job.structure import _inspect
from zrun_core.errors import JobError
from zrun_core.spine.config import JobConfig
from zrun_core.user_code import user
from zrun_core.user_code.meta_init import build_on_meta

CODE = """
import torch
from torch import nn


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight


def with_values_of_its_own():
    return nn.Sequential(nn.Linear(4, 4), Scale())


def plain():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def data():
    return [torch.ones(4)] * 4
"""


def job(model: str, init: str) -> JobConfig:
    keys = {"name": "t", "model": f"inspected.py:{model}", "data": "inspected.py:data", "steps": 1}
    return JobConfig.model_validate({**keys, "batch": 4, "init": init})


def test_values_that_nothing_could_make_are_refused_in_the_words_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "inspected.py").write_text(CODE)
    refused = job("with_values_of_its_own", "meta")
    with pytest.raises(JobError, match=r"init: meta: 1 \(Scale\) has no reset_parameters") as told:
        _inspect(refused, tmp_path, None)
    with pytest.raises(JobError) as by_rank:
        build_on_meta(lambda: user.build_model(refused.model, tmp_path), refused.seed)
    assert str(told.value) == str(by_rank.value)
    assert _inspect(job("with_values_of_its_own", "factory"), tmp_path, None).num_parameters == 24
    assert _inspect(job("plain", "meta"), tmp_path, None).num_parameters == 28
