"""Numbers over held-out data: sums over all ranks and batches, the same as one plain loop gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from runs import Speaker, Tokens, job, run

from zrun_core.errors import UserCodeError

EVEN = {"metrics": "watching.py:count_even", "first": True}


def evaluations(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in found["events"] if event["type"] == "eval"]


def plain(length: int) -> dict[str, float]:
    """What the model of `job` comes to before its first step, sample by sample."""
    torch.manual_seed(3)
    model = Speaker().eval()
    labels = torch.stack(
        [sample["labels"] for sample in map(Tokens(length).__getitem__, range(length))]
    )
    with torch.no_grad():
        losses = [
            model(**{name: value[None] for name, value in Tokens(length)[index].items()}).double()
            for index in range(length)
        ]
    loss = float(sum(losses)) / length
    even = int((labels % 2 == 0).sum()) / labels.numel()
    return {"loss": loss, "again": loss, "even": even, "first": 7.0}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("length", [1, 11])
def test_metrics_are_exact_over_uneven_ranks(ranks, tmp_path, stage, length):
    """Of one sample a rank has none, and of eleven the last batches are short."""
    held_out = {"data": {"call": "runs.py:Tokens", "args": {"length": length}}, **EVEN}
    keys = job(
        steps=1,
        zero=stage,
        batch={"global": 8, "micro": 2},
        lr="constant",
        hooks={},
        checkpoint=None,
    )
    found = ranks(2).run(run, {**keys, "eval": held_out}, str(tmp_path))
    first = evaluations(found[0])[0]
    expected = plain(length)
    assert list(first["metrics"]) == ["loss", "again", "even", "first"]
    assert first["metrics"]["even"] == expected["even"]
    assert first["metrics"]["first"] == expected["first"]
    assert first["metrics"]["again"] == first["metrics"]["loss"] == first["loss"]
    assert math.isclose(first["loss"], expected["loss"], rel_tol=1e-6)
    assert first["samples"] == length
    assert evaluations(found[1]) == []


def test_several_sets_are_evaluated_in_turn(ranks, tmp_path):
    def tokens(length: int) -> dict[str, Any]:
        return {"call": "runs.py:Tokens", "args": {"length": length}}

    several = {"data": {"val": tokens(11), "code": tokens(5)}, "every": 2}
    keys = job(steps=2, lr="constant", hooks={}, checkpoint=None)
    found = ranks(2).run(run, {**keys, "eval": {**several, **EVEN}}, str(tmp_path / "both"))
    (before, after) = evaluations(found[0])
    names = ["loss", "again", "even", "first"]
    assert list(before["metrics"]) == [
        f"{each}/{name}" for each in ("val", "code") for name in names
    ]
    assert before["samples"] == 16
    assert before["metrics"]["val/even"] == plain(11)["even"]
    assert before["metrics"]["code/even"] == plain(5)["even"]
    for name in ("val", "code"):
        alone = {"data": several["data"][name], "every": 2, **EVEN}
        one = ranks(2).run(run, {**keys, "eval": alone}, str(tmp_path / name))
        assert [each["loss"] for each in evaluations(one[0])] == [
            before["metrics"][f"{name}/loss"],
            after["metrics"][f"{name}/loss"],
        ]
    assert after["loss"] == after["metrics"]["val/loss"]


def test_a_loss_among_the_metrics_is_the_loss(ranks, tmp_path):
    held_out = {"data": "runs.py:Tokens", "metrics": "watching.py:own_loss"}
    keys = job(steps=1, eval=held_out, lr="constant", hooks={}, checkpoint=None)
    (event,) = evaluations(ranks(2).run(run, keys, str(tmp_path))[0])
    assert event["metrics"] == {"loss": 2.5, "calls": 1.0}


def refused(keys: dict[str, Any], run_dir: str) -> str:
    with pytest.raises(UserCodeError) as caught:
        run(keys, run_dir)
    return str(caught.value)


def test_other_names_on_another_rank_are_told_on_all(ranks, tmp_path):
    held_out = {"data": "runs.py:Tokens", "metrics": "watching.py:by_rank", "first": True}
    keys = job(steps=1, eval=held_out, lr="constant", hooks={}, checkpoint=None)
    told = ranks(2).run(refused, keys, str(tmp_path))
    assert told[0] == told[1]
    assert told[0].startswith(
        "eval.metrics returned loss, of-0 on rank 0 and loss, of-1 on rank 1: return the same"
    )
