"""A run that ends because its evaluations bring nothing better, cut off anywhere before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import job, losses, run
from small_jobs import on_axes

from zrun.runs.start_point import choose_start
from zrun_core.checkpoint.folder import read_step
from zrun_core.spine.config import JobConfig

# watching.py:curve is 4, 4.5, 3, 3.5, 3.25, 3.75 and 2 after the steps from 1 on
STOP = {"metric": "curve", "patience": 3}
WHY = "curve did not improve in the last 3 evaluations; the best was 3 at step 3"


def keys(**more: Any) -> dict[str, Any]:
    held_out = {
        "data": {"call": "runs.py:Tokens", "args": {"length": 5}},
        "metrics": "watching.py:curve",
        "every": 1,
        "stop": STOP,
    }
    known = {"eval": held_out, "checkpoint": {"every": 2, "keep": 9}}
    return job(batch={"global": 8, "micro": 4}, **known | more)


def ends(found: dict[str, Any]) -> list[tuple[int, str, str]]:
    events = [event for event in found["events"] if event["type"] == "end"]
    return [(event["step"], event["reason"], event["why"]) for event in events]


@pytest.mark.parametrize("cut", [3, 5])
@pytest.mark.at_most(1)
def test_it_ends_at_the_same_step_with_the_same_bits_wherever_it_was_cut_off(ranks, tmp_path, cut):
    whole = ranks(2).run(run, keys(), str(tmp_path / "whole"))
    assert ends(whole[0]) == [(6, "early stop", WHY)]
    assert [each["error"] for each in whole] == ["", ""]
    begun = ranks(2).run(run, keys(), str(tmp_path / "cut"), None, cut)
    rest = ranks(2).run(run, keys(), str(tmp_path / "cut"), {})
    assert ends(begun[0]) == []
    assert ends(rest[0]) == ends(whole[0])
    assert {**losses(begun[0]), **losses(rest[0])} == losses(whole[0])
    assert [each["digest"] for each in rest] == [each["digest"] for each in whole]
    progress = [
        read_step(tmp_path / name / "checkpoints" / "step-00000006").progress
        for name in ("whole", "cut")
    ]
    for each in progress:
        each.pop("seconds", None)  # of the clock
    assert progress[0] == progress[1]
    assert progress[0]["ended"] == f"early stop: {WHY}"
    complete = choose_start(
        JobConfig.model_validate(keys(resume=str(tmp_path / "cut" / "checkpoints"))),
        None,
        fresh=False,
    )
    assert complete.complete
    assert WHY in complete.note


def test_whoever_trains_on_has_patience_anew(ranks, tmp_path):
    ranks(2).run(run, keys(), str(tmp_path))
    found = ranks(2).run(run, keys(steps=9), str(tmp_path), {"step": 6})
    (end,) = ends(found[0])
    assert end[:2] == (9, "steps")  # step 7 brought 2


def test_an_unknown_metric_is_named_at_the_first_evaluation(ranks, tmp_path):
    held_out = {**keys()["eval"], "stop": {"metric": "curves"}, "first": True}
    found = ranks(2).run(run, keys(eval=held_out), str(tmp_path))
    assert [each["error"] for each in found] == [
        "JobError: eval.stop.metric: the evaluation has no curves, but loss, curve: "
        "did you mean curve?"
    ] * 2
    assert [each["code"] for each in found] == [2, 2]


def test_the_run_ends_early(ranks, tmp_path: Path) -> None:
    """In a pipeline too."""
    given = keys(parallel={"pp": 2})
    found = on_axes(given, tmp_path, ranks, dp=2, pp=2)
    assert [each["error"] for each in found] == [""] * len(found)
    assert ends(found[0]) == [(6, "early stop", WHY)]
