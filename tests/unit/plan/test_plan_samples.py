"""What a traced micro-batch is made of: samples that were looked at, and what the job says."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import plan_models
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

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
    assert (len(found), which) == (1024, "the first {} samples")
    monkeypatch.setattr(sample_batches, "_LOOK_ON_BYTES", 4 * 1200 * 10)
    found, _, _ = sample_batches._look(endless)
    assert len(found) == 64, "they are long by now"
    monkeypatch.setattr(sample_batches, "_LOOK_FOR_S", 0.0)
    found, _, which = sample_batches._look(endless)
    assert (len(found), which) == (1, "the first {} samples, which took 0 s")


def test_few_sizes_are_asked_for_where_a_batch_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_batches, "_LOOK_ON_S", -1.0)
    sizes = sample_batches._sizes([torch.ones(3)] * 100, torch.stack)
    assert sizes == [12] * 64


def test_groups_of_one_length_take_less_than_the_same_samples_mixed() -> None:
    """Of a stream the batches are those that it deals out."""

    def share(lengths: list[int]) -> float:
        samples = [torch.ones(length) for length in lengths]
        longest = max(samples, key=len)
        collate = partial(pad_sequence, batch_first=True)
        return sample_batches.SampleBatches(samples, longest, collate, is_ragged=True).usual_share(
            4
        )

    sizes = range(1, 17)
    grouped = [size for size in sizes for _ in range(4)]
    mixed = [*sizes] * 4
    assert share(grouped) == pytest.approx(sum(sizes) / 16 / 16)
    assert share(mixed) == pytest.approx((4 + 8 + 12 + 16) / 4 / 16)


def test_what_is_shuffled_is_not_dealt_in_the_order_of_its_numbers() -> None:
    shuffled, sorted_ones = (ragged(1000, shuffle=shuffle) for shuffle in (True, False))
    assert sorted_ones.dealt == ()
    assert shuffled.first == sorted_ones.first
    assert shuffled.dealt != shuffled.first
    assert sorted(map(len, shuffled.dealt)) == sorted(map(len, shuffled.first))
