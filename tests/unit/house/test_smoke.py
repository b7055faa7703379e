"""A trial of a job: what changes, what stays, and what is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zrun.job.document import Document
from zrun.job.overrides import apply
from zrun.job.smoke import smoke_of
from zrun.job.validate import validate
from zrun_core.errors import JobError
from zrun_core.spine.config import JobConfig


def job(**keys: Any) -> JobConfig:
    return JobConfig.model_validate(
        {"name": "t", "model": "m:f", "data": "m:d", "steps": 1000, "batch": 8} | keys
    )


def overrides(number: int, **keys: Any) -> set[str]:
    return set(smoke_of(job(**keys), number).overrides)


def test_the_schedule_shrinks_as_the_steps_do() -> None:
    lr = {"schedule": "cosine", "warmup": 100, "decay_steps": 800}
    assert {"steps=20", "lr.warmup=2", "lr.decay_steps=16"} <= overrides(20, lr=lr)
    assert "lr.warmup=1" in overrides(2, lr=lr)
    assert not {
        key for key in overrides(20, lr="cosine") if key.startswith("lr.")
    }  # follows the steps by itself


@pytest.mark.parametrize(
    ("lr", "expected"),
    [
        ({"schedule": "cosine", "warmup": 100}, {"lr.warmup=2"}),
        (
            {"schedule": "cosine", "warmup": 100, "decay_steps": 1000},
            {"lr.warmup=2", "lr.decay_steps=20"},
        ),
        (
            {"schedule": "wsd", "warmup": 1, "decay_steps": 1000},
            {"lr.warmup=1", "lr.decay_steps=4"},
        ),
    ],
)
def test_jobs_whose_length_the_data_knows(lr: dict[str, Any], expected: set[str]) -> None:
    for length in ({"epochs": 3}, {"tokens": 10**6}):
        found = overrides(20, steps=None, lr=lr, **length)
        assert {key for key in found if key.startswith("lr.")} == expected
        assert {"steps=20", f"{next(iter(length))}=null"} <= found


def test_nothing_lasts() -> None:
    keys = {
        "eval": {"data": "m:d", "every": 5, "first": True},
        "checkpoint": 5,
        "restarts": 3,
        "resume": "auto",
    }
    found = smoke_of(job(**keys), 20)
    assert set(found.overrides) == {
        "name=t-smoke",
        "steps=20",
        "resume=never",
        "restarts=0",
        "checkpoint=null",
        "eval.every=20",
        "eval.first=false",
        "eval.samples=64",
    }
    assert (
        found.told
        == "smoke run in runs/t-smoke: steps 20 of 1000, one evaluation of 64 samples, no saves"
    )
    assert "eval.samples=9" in overrides(20, eval={"data": "m:d", "samples": 9})
    checks = {
        "eval": {"data": "m:d", "every": 5, "stop": 3},
        "checkpoint": {"every": 5, "best": "loss"},
    }
    given = {"name": "t", "model": "m:f", "data": "m:d", "steps": 1000, "batch": 8} | checks
    document = Document.parse(json.dumps(given), "job.yaml", {})
    apply(document, smoke_of(job(**checks), 20).overrides, {})
    assert validate(document).steps == 20
    long = smoke_of(job(name="n" * 128), 20).overrides[0]
    assert len(long.removeprefix("name=")) == 128


def test_a_trial_is_shorter_than_its_job() -> None:
    with pytest.raises(JobError, match="--smoke 1000: the job has 1000 steps itself"):
        smoke_of(job(), 1000)
