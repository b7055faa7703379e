"""What a metrics function may return, and what is said of anything else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from zrun_core.data.batch import MicroBatch
from zrun_core.errors import UserCodeError
from zrun_core.train.evaluator import Number, _Sums, read_metrics


def test_sums_with_weights_and_means_are_taken() -> None:
    found = read_metrics({"a": (3, 4), "b": torch.tensor([0.5]), "c": [torch.tensor(True), 2.0]}, 6)
    assert found == {
        "a": Number(3.0, 4.0),
        "b": Number(torch.tensor(3.0), 6),
        "c": Number(1.0, 2.0),
    }


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "eval.metrics returned NoneType: return a dict of name -> (sum, weight)"),
        ({3: 1.0}, "eval.metrics: 3 cannot name a metric: write 1 to 64 letters"),
        ({"a b": 1.0}, "eval.metrics: 'a b' cannot name a metric"),
        ({"f1": "good"}, "eval.metrics: f1 is str: return (sum, weight), two numbers, or"),
        ({"f1": (1, 2, 3)}, "eval.metrics: f1 is tuple: return"),
        ({"f1": torch.zeros(3)}, "eval.metrics: f1 is shape (3,): return"),
    ],
)
def test_anything_else_is_named(result: Any, words: str) -> None:
    with pytest.raises(UserCodeError) as caught:
        read_metrics(result, 2)
    assert str(caught.value).startswith(words)


def test_a_batch_with_other_names_is_refused_and_a_stand_in_counts_nothing() -> None:
    sums = _Sums(torch.device("cpu"))
    sums.add(MicroBatch(None, 2, 10), {"loss": Number(1.5, 2), "f1": Number(1, 2)})
    sums.add(MicroBatch(None, 0, 0), {"loss": Number(math.nan, 2), "f1": Number(9, 9)})
    assert sums.counts.tolist() == [2.0, 10.0]
    assert {name: pair.tolist() for name, pair in sums.by_name.items()} == {
        "loss": [1.5, 2.0],
        "f1": [1.0, 2.0],
    }
    with pytest.raises(
        UserCodeError, match="returned loss for a batch after f1, loss for the one before"
    ):
        sums.add(MicroBatch(None, 2, 10), {"loss": Number(1.0, 2)})
