"""What a traced micro-batch is made of: samples that were looked at, and what the job says."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import plan_models
import pytest
import torch

from zrun_core.errors import JobError
from zrun_core.plan.trace import sample_batches
from zrun_core.spine.config import JobConfig

HERE = Path(plan_models.__file__).parent


def job(data: Any, **more: Any) -> JobConfig:
    call, args = data if isinstance(data, tuple) else (data, {})
    return JobConfig.model_validate(
        {
            "name": "t",
            "model": "plan_models.py:Deep",
            "steps": 1,
            "batch": {"micro": 4},
            "data": {"call": call, "args": args, **more},
        }
    )


def ragged(number: int = 8, **more: Any) -> sample_batches.SampleBatches:
    asked = job(
        ("plan_models.py:Ragged", {"count": number}),
        collate="plan_models.py:padded",
        **more,
    )
    return sample_batches.samples_of(asked, HERE)


def test_lists_of_numbers_are_as_large_as_their_batch() -> None:
    found = ragged()
    assert found.batch(3)["input_ids"].shape == (3, 20)
    assert found.real_batch(3)["input_ids"].shape == (3, 20)  # the longest is among them
    assert found.is_ragged
    assert "samples differ in size: planned with the longest of all 8: 20 tokens" in found.note


def test_the_longest_may_lie_anywhere() -> None:
    found = ragged(1000)
    assert found.batch(1)["input_ids"].shape == (1, 20)
    assert "the longest of 64 samples from all over the 1,000: 20 tokens" in found.note
    assert {len(sample) for sample in found.first} == {2, 3, 4, 5, 6, 20}  # whatever their order
    assert "data.longest" in found.note


def test_a_job_says_how_long_its_longest_sample_is() -> None:
    found = ragged(longest=50)
    for batch in (found.batch(2), found.real_batch(2)):
        assert [tensor.shape for tensor in batch.values()] == [(2, 50), (2, 50), (2, 50, 50)]
        assert set(batch["input_ids"].flatten().tolist()) == {1} or batch["input_ids"][1].min() == 0
    assert found.note == "planned with samples of 50 tokens (data.longest)"
    text = ("zrun_core.data.text:text", {"paths": "nothing-*", "seq_len": 32})
    fixed = sample_batches.samples_of(job(text, longest=48), HERE)
    assert fixed.batch(2)["input_ids"].shape == (2, 48)
    with pytest.raises(JobError, match=r"data\.longest: 50: all samples .* have the same size"):
        sample_batches.samples_of(job("plan_models.py:Vectors", longest=50), HERE)


def test_samples_of_one_size_need_no_note() -> None:
    found = sample_batches.samples_of(job("plan_models.py:Vectors"), HERE)
    assert (found.note, found.is_ragged, found.stretch) == ("", False, 1.0)
    assert found.usual_share(2) == 1.0


def test_usual_batches_have_less_work_than_those_of_the_longest() -> None:
    found = ragged()
    pairs = [found.collate(list(found.first[at : at + 2])) for at in range(0, 8, 2)]
    usual = sum(tensor.nbytes for batch in pairs for tensor in batch.values()) / len(pairs)
    most = sum(tensor.nbytes for tensor in found.batch(2).values())
    assert found.usual_share(2) == pytest.approx(usual / most)
    assert 0 < found.usual_share(2) < 1
    assert found.usual_share(1) < found.usual_share(2) < found.usual_share(8) == 1.0
    assert found.usual_share(9) == 1.0, "nobody has read so many"


def test_what_has_no_end_is_looked_at_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = (torch.ones(number) for number in count(1))
    found, _, which = sample_batches._look(endless)
    assert (len(found), which) == (64, "the first 64 samples")
    monkeypatch.setattr(sample_batches, "_LOOK_FOR_S", 0.0)
    found, _, which = sample_batches._look(endless)
    assert (len(found), which) == (1, "the first 1 samples, which took 0 s")
