"""Pipelines: the losses and parameters of one process, whatever the cut and the schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import job, losses, run

STEPS = 4
GPT = {"vocab_size": 13, "dim": 16, "depth": 4, "heads": 2, "seq_len": 6}
Tensors = dict[tuple[str, str], np.ndarray[Any, Any]]


def gpt(**args: Any) -> dict[str, Any]:
    return {"call": "zrun_core.models.gpt:gpt", "args": {**GPT, "tied": False, **args}}


def small(**keys: Any) -> dict[str, Any]:
    return job(
        **{
            "model": gpt(),
            "data": {"call": "runs.py:Plain", "shuffle": True},
            "steps": STEPS,
            "batch": {"global": 8, "micro": 1},
            "hooks": {},
            "checkpoint": None,
            **keys,
        }
    )


def whole(found: list[dict[str, Any]]) -> Tensors:
    """Put together what all ranks would save; what two of them would is a failure."""
    pieces: dict[tuple[str, str], dict[int, Any]] = {}
    for of_rank in found:
        assert not of_rank["error"], of_rank["error"]
        for (tensor, state, start), values in of_rank["parts"].items():
            of_tensor = pieces.setdefault((tensor, state), {})
            assert start not in of_tensor, f"{tensor} {state} {start} is saved twice"
            of_tensor[start] = values
    return {
        key: np.concatenate([parts[start] for start in sorted(parts)])
        for key, parts in pieces.items()
    }


def assert_equal(ours: Tensors, theirs: Tensors, close: float = 0.0) -> None:
    assert ours.keys() == theirs.keys()
    for key, values in theirs.items():
        if close:
            np.testing.assert_allclose(ours[key], values, rtol=close, atol=close, err_msg=str(key))
        else:
            np.testing.assert_array_equal(ours[key], values, err_msg=str(key))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dims", [{"dp": 1, "pp": 2}, {"dp": 2, "pp": 2}, {"dp": 1, "pp": 4}])
def test_one_process(ranks, tmp_path: Path, stage: int, dims: dict[str, int]) -> None:
    keys = small(zero=stage)
    one = ranks(dims["dp"]).run(run, keys, str(tmp_path / "one"))
    many = ranks(dims["dp"] * dims["pp"]).run(
        run, keys, str(tmp_path / "many"), None, None, None, dims
    )
    assert losses(many[0]) == losses(one[0])
    assert_equal(whole(many), whole(one))


@pytest.mark.parametrize(
    "parallel",
    [
        {"schedule": "gpipe"},
        {"schedule": "interleaved"},
        {"schedule": "interleaved", "split": ["blocks.1", "blocks.2", "blocks.3"]},
        {"split": ["blocks.3"]},
    ],
)
def test_any_schedule_and_split(ranks, tmp_path: Path, parallel: dict[str, Any]) -> None:
    """With 7 micro-batches: the last of their groups is not full."""
    keys = small(batch={"global": 7, "micro": 1}, zero=2)
    one = ranks(1).run(run, keys, str(tmp_path / "one"))
    keys["parallel"] = {"pp": 2, **parallel}
    many = ranks(2).run(run, keys, str(tmp_path / "many"), None, None, None, {"dp": 1, "pp": 2})
    assert losses(many[0]) == losses(one[0])
    assert_equal(whole(many), whole(one))


def test_tied_ends(ranks, tmp_path: Path) -> None:
    optim = {"name": "sgd", "lr": 0.1, "clip": 1.0, "args": {"momentum": 0.9}}
    keys = small(model=gpt(tied=True), optim=optim, zero=2)
    one = ranks(1).run(run, keys, str(tmp_path / "one"))
    dims = {"dp": 2, "pp": 2}
    many = ranks(4).run(run, keys, str(tmp_path / "many"), None, None, None, dims)
    assert losses(many[0]) == pytest.approx(losses(one[0]), rel=1e-6)
    assert_equal(whole(many), whole(one), 2e-6)


def test_evaluation(ranks, tmp_path: Path) -> None:
    keys = small(eval={"data": {"call": "runs.py:Plain", "args": {"length": 12}}, "every": 2})
    one = ranks(1).run(run, keys, str(tmp_path / "one"))
    many = ranks(2).run(run, keys, str(tmp_path / "many"), None, None, None, {"dp": 1, "pp": 2})
    ours, theirs = ([e for e in found[0]["events"] if e["type"] == "eval"] for found in (many, one))
    assert len(ours) == len(theirs) > 0
    assert [e["loss"] for e in ours] == [e["loss"] for e in theirs]
