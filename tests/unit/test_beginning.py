"""Where a run begins, by what lies on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_toys import rank_states

from zrun.launch.resume import begin
from zrun.launch.rundir import Earlier, RunDir, set_checkpoints_aside
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.config import JobConfig
from zrun_core.errors import CheckpointError, JobError
from zrun_core.spec import ResumeSpec


def job(**keys: Any) -> JobConfig:
    return JobConfig.model_validate(
        {"name": "gpt", "model": "a:b", "data": "a:c", "steps": 100, "batch": 8, "checkpoint": 10, **keys}
    )


def save(folder: Path, *steps: int, **progress: Any) -> None:
    for step in steps:
        content = {"steps": step, "tokens": 7 * step, "cursor": 8 * step, "dataset_samples": 400, **progress}
        manifest = Manifest(step, "run", {}, {}, 1, {}, content, [], [], [], rank_states(1))
        store = CheckpointFolder(folder)
        store.commit(store.begin(step), manifest)


def make_run(path: Path, *steps: int) -> Path:
    path.mkdir(parents=True)
    (path / "events.jsonl").touch()
    save(path / "checkpoints", *steps)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three runs; the last one has saved nothing."""
    make_run(tmp_path / "gpt" / "20260101-000000-aa", 10, 20, 30)
    make_run(tmp_path / "gpt" / "20260102-000000-bb", 10, 20)
    make_run(tmp_path / "gpt" / "20260103-000000-cc")
    return tmp_path


def test_without_a_word_a_run_is_new(root: Path) -> None:
    assert begin(job(), None, False, root) == begin(job(), None, True, root)
    beginning = begin(job(), None, False, root)
    assert (beginning.run_dir, beginning.resume, beginning.note) == (None, None, "")


def test_auto_continues_the_newest_run_that_has_saved(root: Path) -> None:
    beginning = begin(job(resume="auto"), None, False, root)
    newest = root / "gpt" / "20260102-000000-bb"
    assert beginning.run_dir == newest
    assert beginning.earlier is Earlier.CONTINUE
    assert beginning.resume == ResumeSpec(folder=str(newest / "checkpoints"))
    assert "goes on after step 20" in beginning.note


def test_auto_starts_where_nothing_is(root: Path) -> None:
    beginning = begin(job(resume="auto", name="other"), None, False, root)
    assert (beginning.run_dir, beginning.resume) == (None, None)
    assert "no checkpoint in" in beginning.note


def test_fresh_beats_the_job_file(root: Path) -> None:
    assert begin(job(resume="auto"), None, True, root).resume is None


def test_a_step_is_looked_for_and_begins_another_run(root: Path) -> None:
    beginning = begin(job(resume=30), None, False, root)
    assert beginning.run_dir is None
    assert beginning.resume == ResumeSpec(folder=str(root / "gpt" / "20260101-000000-aa" / "checkpoints"), step=30)
    with pytest.raises(CheckpointError, match="has a step 40"):
        begin(job(resume=40), None, False, root)


@pytest.mark.parametrize(("below", "step"), [("", None), ("checkpoints", None), ("checkpoints/step-00000020", 20)])
def test_a_path_is_a_run_a_folder_or_a_step(root: Path, below: str, step: int | None) -> None:
    run = root / "gpt" / "20260101-000000-aa"
    beginning = begin(job(resume=str(run / below)), None, False, root)
    assert beginning.resume == ResumeSpec(folder=str(run / "checkpoints"), step=step)
    assert beginning.run_dir is None


def test_a_path_to_nothing(root: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint: name a step-"):
        begin(job(resume=str(root)), None, False, root)


def test_a_chosen_directory_is_the_only_place(root: Path) -> None:
    empty = begin(job(resume="auto"), root / "mine", False, root)
    assert (empty.run_dir, empty.resume) == (root / "mine", None)
    run = root / "gpt" / "20260101-000000-aa"
    there = begin(job(resume="auto"), run, False, root)
    assert (there.run_dir, there.earlier) == (run, Earlier.CONTINUE)
    unsaved = begin(job(resume="auto"), root / "gpt" / "20260103-000000-cc", False, root)
    assert (unsaved.resume, unsaved.earlier) == (None, Earlier.START_OVER)


def test_an_earlier_run_is_not_started_over_by_mistake(root: Path) -> None:
    run = root / "gpt" / "20260101-000000-aa"
    beginning = begin(job(), run, False, root)
    with pytest.raises(JobError, match="go on with --resume auto, start over with --fresh"):
        RunDir.claim("gpt", beginning.run_dir, earlier=beginning.earlier)
    assert begin(job(), run, True, root).earlier is Earlier.START_OVER


def test_a_chosen_folder_of_checkpoints_is_not_started_over_by_mistake(root: Path) -> None:
    save(root / "mine", 10, 20)
    own = job(checkpoint={"dir": str(root / "mine")})
    with pytest.raises(JobError, match="holds step 20: go on with --resume auto"):
        begin(own, None, False, root)
    fresh = begin(own, None, True, root)
    assert fresh.aside == root / "mine"
    set_checkpoints_aside(root / "mine", "new")
    assert CheckpointFolder(root / "mine").scan() == []
    assert len(CheckpointFolder(root / "mine" / "before-new").scan()) == 2


def test_a_step_before_others_does_not_lead_to_them_again(root: Path) -> None:
    run = root / "gpt" / "20260101-000000-aa"
    with pytest.raises(JobError, match="holds step 30 too, which step 20 would lead to again"):
        begin(job(resume=20), run, False, root)
    assert begin(job(resume=30), run, False, root).earlier is Earlier.CONTINUE
    with pytest.raises(JobError, match="holds an earlier run: choose another"):
        begin(job(resume=str(root / "gpt" / "20260102-000000-bb")), run, False, root)


@pytest.mark.parametrize(
    ("length", "complete"),
    [
        ({"steps": 20}, True),
        ({"steps": 21}, False),
        ({"tokens": 140}, True),
        ({"tokens": 141}, False),
        ({"epochs": 1}, False),
    ],
)
def test_complete_is_complete(root: Path, length: dict[str, int], complete: bool) -> None:
    assert begin(job(**{"steps": None, **length, "resume": "auto"}), None, False, root).complete == complete


def test_an_epoch_that_has_ended_is_complete(tmp_path: Path) -> None:
    save(tmp_path / "mine", 50)
    keys = {"steps": None, "resume": "auto", "checkpoint": {"dir": str(tmp_path / "mine")}}
    assert begin(job(epochs=1, **keys), None, False, tmp_path).complete
    assert not begin(job(epochs=2, **keys), None, False, tmp_path).complete


def test_nothing_but_damage_is_an_error(root: Path) -> None:
    run = root / "gpt" / "20260102-000000-bb"
    for step in (10, 20):
        (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"(?s)does not hold a valid checkpoint.*step 20: .*step 10: "):
        begin(job(resume="auto"), None, False, root)


def test_a_run_that_goes_on_keeps_its_record_and_moves_the_rest(root: Path) -> None:
    run = root / "gpt" / "20260101-000000-aa"
    (run / "logs").mkdir()
    (run / "job.yaml").write_text("old")
    for attempt in ("1", "2"):
        with RunDir.claim("gpt", run, earlier=Earlier.CONTINUE) as rundir:
            rundir.write_job("new")
        assert (run / "attempts" / attempt / "job.yaml").exists()
    assert (run / "attempts" / "1" / "job.yaml").read_text() == "old"
    assert len(CheckpointFolder(run / "checkpoints").scan()) == 3
    assert (run / "events.jsonl").exists()
    with RunDir.claim("gpt", run, earlier=Earlier.START_OVER):
        assert sorted(path.name for path in run.iterdir()) == [
            ".lock", "attempts", "events.jsonl", "failures", "logs",
        ]  # fmt: skip
    assert len(CheckpointFolder(run / "attempts" / "3" / "checkpoints").scan()) == 3
