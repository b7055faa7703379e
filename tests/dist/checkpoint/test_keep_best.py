"""The best step by an evaluation: kept beside the newest, through failures, ends and resumes."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from runs import job, run
from small_jobs import on_axes
from watching import CURVE

from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.errors import SaveError

# watching.py:curve is 4, 4.5, 3, 3.5, 3.25, 3.75, 2 and 5 after the steps from 1 on


def keys(**more: Any) -> dict[str, Any]:
    held_out = {
        "data": {"call": "runs.py:Tokens", "args": {"length": 5}},
        "metrics": "watching.py:curve",
        "every": 1,
    }
    checkpoint = {"every": 2, "keep": 2, "best": "curve", **more.pop("checkpoint", {})}
    known = {
        "eval": {**held_out, **more.pop("eval", {})},
        "checkpoint": checkpoint,
        "lr": "constant",
    }
    return job(batch={"global": 8, "micro": 4}, **known | more)


def folder(run_dir: Path) -> CheckpointFolder:
    return CheckpointFolder(run_dir / "checkpoints")


def steps(run_dir: Path) -> list[int]:
    return [found.step for found in folder(run_dir).scan() if found.manifest is not None]


def best(run_dir: Path) -> tuple[int, float] | None:
    found = folder(run_dir).best_so_far()
    return None if found is None else (found.step, found.value)


def told(found: dict[str, Any]) -> list[tuple[int, str, int | None]]:
    saves = [event for event in found["events"] if event["type"] == "save"]
    return [(each["step"], each["reason"], each["best"] and each["best"]["step"]) for each in saves]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.at_most(1)
def test_evaluated_steps_are_saved_when_they_are_the_best_and_stay(ranks, tmp_path, in_background):
    found = ranks(2).run(run, keys(steps=6, checkpoint={"async": in_background}), str(tmp_path))
    assert [each["error"] for each in found] == ["", ""]
    assert told(found[0]) == [
        (1, "best", 1),
        (2, "due", None),
        (3, "best", 3),
        (4, "due", None),
        (6, "due", None),
    ]
    assert steps(tmp_path) == [6, 4, 3]  # 3 is the best, and older than the two that stay
    assert best(tmp_path) == (3, CURVE[3])
    progress = read_step(folder(tmp_path).step_path(6)).progress
    assert progress["best"] == {"step": 3, "metric": "curve", "mode": "min", "value": CURVE[3]}
    assert folder(tmp_path).prune(2, thorough=True) == []


@pytest.mark.parametrize("cut", [3, 5])
@pytest.mark.at_most(1)
def test_a_run_that_goes_on_remembers_its_best(ranks, tmp_path, cut):
    """Also where the process died before the file that names it was written."""
    ranks(2).run(run, keys(), str(tmp_path), None, cut)
    assert best(tmp_path) == (1 if cut == 3 else 3, CURVE[1 if cut == 3 else 3])
    (tmp_path / "checkpoints" / "best").unlink()
    assert 1 not in folder(tmp_path).prune(2, dry_run=True) or cut == 5
    rest = ranks(2).run(run, keys(steps=6), str(tmp_path), {})
    assert best(tmp_path) == (3, CURVE[3])
    assert [step for step, _, is_best in told(rest[0]) if is_best] == ([3] if cut == 3 else [])
    rest = ranks(2).run(run, keys(steps=8), str(tmp_path), {})
    assert best(tmp_path) == (7, CURVE[7])
    assert steps(tmp_path) == [8, 7]


def test_the_last_evaluation_may_find_a_step_that_is_saved_already(ranks, tmp_path):
    """The best of a run that is made longer is not forgotten."""
    often = {"every": 5, "first": True}
    ranks(2).run(run, keys(steps=3, eval=often), str(tmp_path))
    assert best(tmp_path) == (3, CURVE[3])
    assert read_step(folder(tmp_path).step_path(3)).progress["best"] is None
    found = ranks(2).run(run, keys(steps=6, eval=often), str(tmp_path), {})
    assert [step for step, _, is_best in told(found[0]) if is_best] == []
    assert best(tmp_path) == (3, CURVE[3])
    assert steps(tmp_path) == [6, 4, 3]


def run_failing_at_3(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """The folder of step 3 cannot be made."""
    begin = CheckpointFolder.begin

    def failing(folder: CheckpointFolder, step: int) -> Path:
        if step == 3:
            raise SaveError(f"step 3: {errno.errorcode[errno.ENOSPC]}")
        return begin(folder, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "begin", failing)
        return run(keys, run_dir)


def test_a_best_step_that_could_not_be_saved_is_none(ranks, tmp_path):
    """The next one is compared with what is there."""
    found = ranks(2).run(
        run_failing_at_3, keys(steps=4, checkpoint={"on_save_error": "warn"}), str(tmp_path)
    )
    assert [step for step, _, is_best in told(found[0]) if is_best] == [1, 4]
    assert best(tmp_path) == (4, CURVE[4])


def test_another_metric_begins_anew(ranks, tmp_path):
    ranks(2).run(run, keys(steps=4), str(tmp_path))
    found = ranks(2).run(
        run,
        keys(steps=5, checkpoint={"best": {"metric": "curve", "mode": "max"}}),
        str(tmp_path),
        {},
    )
    warnings = [event["message"] for event in found[0]["events"] if event["type"] == "warning"]
    assert "checkpoint.best names another metric or mode than before" in " ".join(warnings)
    assert best(tmp_path) == (5, CURVE[5])


def test_an_unknown_metric_is_named_at_the_first_evaluation(ranks, tmp_path):
    found = ranks(2).run(run, keys(steps=4, checkpoint={"best": "f1"}), str(tmp_path))
    assert [each["error"] for each in found] == [
        "JobError: checkpoint.best.metric: the evaluation has no f1, but loss, curve: "
        "name one of these"
    ] * 2


def test_an_evaluation_that_is_made_later_marks_the_step_that_was_saved_without_it(ranks, tmp_path):
    often = {"every": 3, "data": {"call": "runs.py:Tokens", "args": {"length": 24}}}
    cut = ranks(2).run(run, keys(steps=4, eval=often), str(tmp_path), None, None, 2)
    assert cut[0]["error"] == "StoppedError: stopped after step 3, saved"
    assert best(tmp_path) is None
    rest = ranks(2).run(run, keys(steps=4, eval=often), str(tmp_path), {})
    assert rest[0]["error"] == ""
    assert best(tmp_path) == (3, CURVE[3])
    assert read_step(folder(tmp_path).step_path(4)).progress["best"]["step"] == 3


@pytest.mark.thorough
def test_the_best_step_is_kept(ranks, tmp_path: Path) -> None:
    """In a pipeline too."""
    given = keys(steps=6, parallel={"pp": 2})
    found = on_axes(given, tmp_path, ranks, dp=2, pp=2)
    assert [each["error"] for each in found] == [""] * len(found)
    assert steps(tmp_path) == [6, 4, 3]
    assert best(tmp_path) == (3, 3.0)
