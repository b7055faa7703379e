"""Batches as collation has made them."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from zrun_core.data.batch import MicroBatch, first_samples

Pair = namedtuple("Pair", "x y")


def sample(number: int) -> Any:
    return {
        "input_ids": torch.arange(5) + number,
        "pair": (torch.full((2, 3), float(number)), number),
        "named": Pair(float(number), [number, -number]),
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and all(map(equal, one, other))


def test_first_samples_are_what_torch_collates_of_them() -> None:
    micro = MicroBatch.of(default_collate([sample(number) for number in range(4)]), 4)
    few = first_samples(micro, 2)
    assert equal(few.batch, default_collate([sample(0), sample(1)]))
    assert (few.num_samples, few.num_tokens) == (2, 10)
    assert first_samples(micro, 4) is micro


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(4, 2), "name": ["a", "b", "c", "d"]},
        {"x": torch.ones(4, 2), "edges": torch.ones(2, 9)},
        {"x": torch.ones(4, 2), "scale": torch.tensor(1.0)},
        (torch.ones(4, 2), 4),
    ],
    ids=["text", "other rows", "no rows", "number"],
)
def test_of_other_batches_all_samples_stay(batch: Any) -> None:
    micro = MicroBatch.of(batch, 4)
    assert first_samples(micro, 2) is micro


def test_a_stand_in_stays() -> None:
    micro = MicroBatch.of(torch.ones(4, 2), 0)
    assert first_samples(micro, 2) is micro
