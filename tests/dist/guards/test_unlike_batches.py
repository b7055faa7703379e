"""Ranks that compute the same samples and have read different ones are found, and named."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Plain, job, run
from small_jobs import gpt, on_axes, small
from toys import world

TP, PP, ALL = {"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}


class Unlike(Plain):
    """Some ranks read another label in one sample."""

    def __init__(self, ranks: list[int], index: int = 11, length: int = 40) -> None:
        super().__init__(length)
        self.is_other = world()[0] in ranks
        self.index = index

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        if self.is_other and index == self.index:
            sample["labels"] = sample["labels"].flip(0)
        return sample


class Timed(Plain):
    """Draws from the clock."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        clock = torch.Generator().manual_seed(time.perf_counter_ns())
        drawn = torch.randint(13, sample["input_ids"].shape, generator=clock)
        return {**sample, "input_ids": drawn}


def data(**args: Any) -> dict[str, Any]:
    return {"call": "guards/test_unlike_batches.py:Unlike", "args": args}


def ends(ranks: Any, folder: Path, dp: int = 1, **keys: Any) -> str:
    """Return the error with which every rank ends, which is a fault of the job."""
    found = on_axes(small(model=gpt(), **keys), folder, ranks, dp=dp)
    (error,) = {each["error"] for each in found}
    assert {each["code"] for each in found} == {2}
    return str(error)


# Samples 8 to 15 are read in step 2, in micro-batches of 2. Sample 11 is read by the first ranks
# along `data` where there are two, of which each has four samples of a step.
@pytest.mark.parametrize(
    ("parallel", "dp", "others", "words"),
    [
        (TP, 1, [1], "rank 1 (host, cpu, tp 1) read another batch['labels'] in micro-batch 1"),
        (PP, 1, [1], "rank 1 (host, cpu, pp 1) read another batch['labels'] in micro-batch 1"),
        (ALL, 2, [5], "rank 5 (host, cpu, pp 1 dp 0 tp 1) read another batch['labels'] in micro-b"),
        (ALL, 2, [4, 5], "ranks 4 (host, cpu, pp 1 dp 0 tp 0), 5 (host, cpu, pp 1 dp 0 tp 1) read"),
    ],
)
@pytest.mark.thorough
def test_one_batch(
    ranks, tmp_path: Path, parallel: dict[str, int], dp: int, others: list[int], words: str
) -> None:
    error = ends(ranks, tmp_path, dp, parallel=parallel, data=data(ranks=others))
    assert f"data: in step 2 {words}" in error
    assert "than rank 0 (host, cpu, " in error
    assert "though they compute the same samples" in error


def test_every_batch_of_every_rank(ranks, tmp_path: Path) -> None:
    error = ends(ranks, tmp_path, 2, parallel=ALL, data="guards/test_unlike_batches.py:Timed")
    assert "data: in step 1 ranks 1 (host, cpu, pp 0 dp 0 tp 1), " in error
    assert "read another batch['input_ids'] in micro-batch 0 (int64 [2, 6])" in error


@pytest.mark.thorough
def test_an_evaluation(ranks, tmp_path: Path) -> None:
    evaluation = {"data": data(ranks=[1], length=12), "every": 1}
    error = ends(ranks, tmp_path, parallel=PP, eval=evaluation)
    assert "data: in an evaluation rank 1 (host, cpu, pp 1) read another batch['labels']" in error


def test_a_window_of_pipedream(ranks, tmp_path: Path) -> None:
    parallel = {"pp": 2, "schedule": "pipedream"}
    keys = {"optim": {"lr": 1e-2}, "batch": {"global": 2, "micro": 2}, "steps": 8}
    error = ends(ranks, tmp_path, parallel=parallel, data=data(ranks=[1]), **keys)
    assert "data: in steps 1 to 8 rank 1 (host, cpu, pp 1) read another batch['labels']" in error


@pytest.mark.parametrize(("length", "is_told"), [(5, True), (8, False)])
def test_data_of_less_than_a_batch_is_told(
    ranks: Any, tmp_path: Path, length: int, is_told: bool
) -> None:
    data = {"call": "runs.py:Tokens", "args": {"length": length}}
    found = ranks(2).run(run, job(data=data, steps=2, checkpoint=None), str(tmp_path))
    (start,) = (event for event in found[0]["events"] if event["type"] == "start")
    told = "the data has 5 samples and a step takes 8: each step has some of them more than once"
    assert (told in start.get("notes", [])) is is_told
    assert found[0]["error"] == ""
