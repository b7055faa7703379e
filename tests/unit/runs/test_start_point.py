"""Where a run begins, by what lies on the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_toys import write_files

from zrun.runs import rundir
from zrun.runs.rundir import EarlierRun, RunDir, set_checkpoints_aside
from zrun.runs.start_point import StartPoint, choose_restart, choose_start, choose_under_lock
from zrun_core.checkpoint.best import Best
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.folder_lock import held
from zrun_core.errors import CheckpointError, JobError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.spec import ResumeSpec


def job(**keys: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "name": "gpt",
            "model": "a:b",
            "data": "a:c",
            "steps": 100,
            "batch": 8,
            "checkpoint": 10,
            **keys,
        }
    )


def save(folder: Path, *steps: int, **progress: Any) -> None:
    for step in steps:
        content = {
            "steps": step,
            "tokens": 7 * step,
            "cursor": 8 * step,
            "dataset_samples": 400,
            **progress,
        }
        store = CheckpointFolder(folder)
        tmp = store.begin(step)
        fields = {"run_id": "run", "progress": content, "divisions": []}
        store.commit(tmp, write_files(tmp, step, [[]], [], **fields))


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
    assert choose_start(job(), None, False, root) == choose_start(job(), None, True, root)
    beginning = choose_start(job(), None, False, root)
    assert (beginning.run_dir, beginning.resume, beginning.note) == (None, None, "")


def test_auto_continues_the_newest_run_that_has_saved(root: Path) -> None:
    beginning = choose_start(job(resume="auto"), None, False, root)
    newest = root / "gpt" / "20260102-000000-bb"
    assert beginning.run_dir == newest
    assert beginning.earlier is EarlierRun.CONTINUE
    assert beginning.resume == ResumeSpec(folder=str(newest / "checkpoints"))
    assert "continues after step 20" in beginning.note


def test_auto_starts_where_nothing_is(root: Path) -> None:
    beginning = choose_start(job(resume="auto", name="other"), None, False, root)
    assert (beginning.run_dir, beginning.resume) == (None, None)
    assert "no checkpoint in" in beginning.note


def test_fresh_beats_the_job_file(root: Path) -> None:
    assert choose_start(job(resume="auto"), None, True, root).resume is None


def test_a_step_is_looked_for_and_begins_another_run(root: Path) -> None:
    beginning = choose_start(job(resume=30), None, False, root)
    assert beginning.run_dir is None
    assert beginning.resume == ResumeSpec(
        folder=str(root / "gpt" / "20260101-000000-aa" / "checkpoints"), step=30
    )
    with pytest.raises(CheckpointError, match="has a step 40"):
        choose_start(job(resume=40), None, False, root)


def test_the_best_step_begins_another_run(root: Path) -> None:
    folder = CheckpointFolder(root / "gpt" / "20260102-000000-bb" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"has no best step: checkpoint\.best keeps one"):
        choose_start(job(resume="best"), None, False, root)
    folder.point_best(Best(10, "loss", "min", 0.5))
    beginning = choose_start(job(resume="best"), None, False, root)
    assert beginning.run_dir is None
    assert beginning.resume == ResumeSpec(folder=str(folder.path), step=10)
    with pytest.raises(CheckpointError, match="has saved anything"):
        choose_start(job(resume="best", name="other"), None, False, root)


@pytest.mark.parametrize(
    ("below", "step"), [("", None), ("checkpoints", None), ("checkpoints/step-00000020", 20)]
)
def test_a_path_is_a_run_a_folder_or_a_step(root: Path, below: str, step: int | None) -> None:
    run = root / "gpt" / "20260101-000000-aa"
    beginning = choose_start(job(resume=str(run / below)), None, False, root)
    assert beginning.resume == ResumeSpec(folder=str(run / "checkpoints"), step=step)
    assert beginning.run_dir is None


def test_a_path_to_nothing(root: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint: name a step-"):
        choose_start(job(resume=str(root)), None, False, root)


def test_a_chosen_directory_is_the_only_place(root: Path) -> None:
    empty = choose_start(job(resume="auto"), root / "mine", False, root)
    assert (empty.run_dir, empty.resume) == (root / "mine", None)
    run = root / "gpt" / "20260101-000000-aa"
    there = choose_start(job(resume="auto"), run, False, root)
    assert (there.run_dir, there.earlier) == (run, EarlierRun.CONTINUE)
    unsaved = choose_start(job(resume="auto"), root / "gpt" / "20260103-000000-cc", False, root)
    assert (unsaved.resume, unsaved.earlier) == (None, EarlierRun.START_OVER)


def test_an_earlier_run_is_not_started_over_by_mistake(root: Path) -> None:
    run = root / "gpt" / "20260101-000000-aa"
    beginning = choose_start(job(), run, False, root)
    with pytest.raises(JobError, match="continue it with --resume auto, start over with"):
        RunDir.claim("gpt", beginning.run_dir, earlier=beginning.earlier)
    assert choose_start(job(), run, True, root).earlier is EarlierRun.START_OVER


def test_a_chosen_folder_of_checkpoints_is_not_started_over_by_mistake(root: Path) -> None:
    save(root / "mine", 10, 20)
    own = job(checkpoint={"dir": str(root / "mine")})
    with pytest.raises(JobError, match="holds step 20: continue with --resume auto"):
        choose_start(own, None, False, root)
    fresh = choose_start(own, None, True, root)
    assert fresh.aside == root / "mine"
    for _ in range(2):  # a run directory may be started over more than once
        set_checkpoints_aside(root / "mine", "new")
    assert CheckpointFolder(root / "mine").scan() == []
    aside = CheckpointFolder(root / "mine").aside()
    assert sorted(len(CheckpointFolder(each).scan()) for each in aside) == [0, 2]
    assert all(each.name.startswith("before-new.aside-") for each in aside)


def test_a_folder_in_which_a_process_saves_is_not_started_over(root: Path) -> None:
    save(root / "mine", 10)
    half = CheckpointFolder(root / "mine").begin(20)
    (root / "mine" / "step-00000005.aside-00000001").mkdir()
    with (
        held(root / "mine"),
        pytest.raises(JobError, match=rf"mine is in use by process {os.getpid()}: wait for it"),
    ):
        set_checkpoints_aside(root / "mine", "new")
    assert [found.step for found in CheckpointFolder(root / "mine").scan()] == [10]
    set_checkpoints_aside(root / "mine", "new")
    assert half.is_dir(), "whose it is, nobody knows"
    (aside,) = CheckpointFolder(root / "mine").aside()
    assert sorted(os.listdir(aside)) == ["step-00000005.aside-00000001", "step-00000010"]


def test_a_run_directory_in_which_a_process_saves_is_not_started_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that torchrun started hold no lock but that of the checkpoints."""
    monkeypatch.setattr(rundir, "PATIENCE_S", 0.0)
    run = root / "gpt" / "20260101-000000-aa"
    with (
        held(run / "checkpoints"),
        pytest.raises(JobError, match=f"process {os.getpid()} saves there"),
    ):
        RunDir.claim("gpt", run, earlier=EarlierRun.START_OVER)
    assert len(CheckpointFolder(run / "checkpoints").scan()) == 3
    with RunDir.claim("gpt", run, earlier=EarlierRun.START_OVER):
        assert len(CheckpointFolder(run / "attempts" / "1" / "checkpoints").scan()) == 3


@pytest.mark.parametrize("given", ["", "checkpoints/step-00000020"])
def test_a_restart_before_the_first_save_begins_where_the_run_began(root: Path, given: str) -> None:
    """--resume PATH in a new directory, then a failure: neither from nothing, nor from the newest
    run of this name.
    """
    source = root / "gpt" / "20260101-000000-aa"
    first = choose_start(job(resume=str(source / given)), root / "mine", False, root)
    mine = make_run(root / "mine")
    again = choose_restart(job(), mine, first.resume)
    assert first.resume is not None
    assert (again.run_dir, again.resume, again.earlier) == (
        mine,
        first.resume,
        EarlierRun.START_OVER,
    )
    save(mine / "checkpoints", 40)
    later = choose_restart(job(), mine, first.resume)
    assert (later.resume, later.earlier) == (
        ResumeSpec(folder=str(mine / "checkpoints")),
        EarlierRun.CONTINUE,
    )


def test_a_restart_of_a_run_from_nothing_starts_over(root: Path) -> None:
    again = choose_restart(job(resume="auto"), root / "gpt" / "20260103-000000-cc", None)
    assert (again.resume, again.earlier) == (None, EarlierRun.START_OVER)


def test_a_folder_that_cannot_be_listed_is_not_started_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = root / "gpt" / "20260101-000000-aa", os.listdir

    def listdir(path: Any) -> list[str]:
        if path == run / "checkpoints":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    for decide in (
        lambda: choose_start(job(resume="auto"), run, False, root),
        lambda: choose_restart(job(), run, None),
        lambda: choose_start(job(resume=str(run)), None, False, root),
        lambda: choose_start(job(resume=30), None, False, root),
    ):
        with pytest.raises(CheckpointError, match="checkpoints cannot be read: Input/output error"):
            decide()


@pytest.mark.parametrize("resume", ["auto", 30, "best"])
def test_a_decision_lists_a_folder_once_and_reads_it_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, resume: str | int
) -> None:
    run = root / "gpt" / "20260101-000000-aa"
    CheckpointFolder(run / "checkpoints").point_best(Best(30, "loss", "min", 0.5))
    listed: list[Any] = []

    def listdir(path: Any) -> list[str]:
        listed.append(path)
        return os.listdir(path)

    monkeypatch.setattr("zrun_core.checkpoint.names.os", SimpleNamespace(listdir=listdir))
    assert choose_start(job(resume=resume), run, False, root).resume is not None
    assert listed.count(run / "checkpoints") == 2  # for the decision, and for its manifests


def test_what_is_started_over_is_decided_while_nobody_else_can_save(root: Path) -> None:
    """A run saves its first step, and ends, after another launcher has looked."""
    run = root / "gpt" / "20260103-000000-cc"
    seen: list[StartPoint] = []

    def decide() -> StartPoint:
        seen.append(choose_start(job(resume="auto"), run, False, root))
        if len(seen) == 1:
            save(run / "checkpoints", 10)
        return seen[-1]

    beginning, lock = choose_under_lock(decide)
    assert lock is not None
    assert seen[0].earlier is EarlierRun.START_OVER
    assert beginning == seen[-1]
    with RunDir.claim("gpt", beginning.run_dir, earlier=beginning.earlier, lock=lock):
        assert [found.step for found in CheckpointFolder(run / "checkpoints").scan()] == [10]
        with pytest.raises(JobError, match="in use by the zrun process"):
            choose_under_lock(lambda: choose_start(job(resume="auto"), run, False, root))


def test_nothing_is_locked_where_nothing_is_moved(root: Path) -> None:
    run = root / "gpt" / "20260101-000000-aa"
    assert choose_under_lock(lambda: choose_start(job(), None, False, root))[1] is None
    assert choose_under_lock(lambda: choose_start(job(resume="auto", steps=30), run, False, root))[
        0
    ].complete
    assert not (run / ".lock").exists()


def test_a_step_before_others_does_not_lead_to_them_again(root: Path) -> None:
    run = root / "gpt" / "20260101-000000-aa"
    with pytest.raises(
        JobError, match="already holds step 30, which a run from step 20 would save again"
    ):
        choose_start(job(resume=20), run, False, root)
    assert choose_start(job(resume=30), run, False, root).earlier is EarlierRun.CONTINUE
    with pytest.raises(JobError, match="holds an earlier run: choose another"):
        choose_start(job(resume=str(root / "gpt" / "20260102-000000-bb")), run, False, root)


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
    assert (
        choose_start(job(**{"steps": None, **length, "resume": "auto"}), None, False, root).complete
        == complete
    )


def test_an_epoch_that_has_ended_is_complete(tmp_path: Path) -> None:
    save(tmp_path / "mine", 50)
    keys = {"steps": None, "resume": "auto", "checkpoint": {"dir": str(tmp_path / "mine")}}
    assert choose_start(job(epochs=1, **keys), None, False, tmp_path).complete
    assert not choose_start(job(epochs=2, **keys), None, False, tmp_path).complete


def test_nothing_but_damage_is_an_error(root: Path) -> None:
    run = root / "gpt" / "20260102-000000-bb"
    for step in (10, 20):
        (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"(?s)does not hold a valid checkpoint.*step 20: .*step 10: "
    ):
        choose_start(job(resume="auto"), None, False, root)


def test_a_run_that_goes_on_keeps_its_record_and_moves_the_rest(root: Path) -> None:
    run = root / "gpt" / "20260101-000000-aa"
    (run / "logs").mkdir()
    (run / "job.yaml").write_text("old")
    for attempt in ("1", "2"):
        with RunDir.claim("gpt", run, earlier=EarlierRun.CONTINUE) as rundir:
            rundir.write_job("new")
        assert (run / "attempts" / attempt / "job.yaml").exists()
    assert (run / "attempts" / "1" / "job.yaml").read_text() == "old"
    assert len(CheckpointFolder(run / "checkpoints").scan()) == 3
    assert (run / "events.jsonl").exists()
    with RunDir.claim("gpt", run, earlier=EarlierRun.START_OVER):
        assert sorted(path.name for path in run.iterdir()) == [
            ".lock",
            "attempts",
            "events.jsonl",
            "failures",
            "logs",
        ]
    assert len(CheckpointFolder(run / "attempts" / "3" / "checkpoints").scan()) == 3
