"""`zrun save`: what is refused, what counts as the answer, and when a save that was asked for
begins.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zrun.commands.save import save
from zrun.launch import save_request
from zrun.runs.listing import read_run
from zrun.runs.rundir import RunDir
from zrun_core.checkpoint import checkpointer as module
from zrun_core.checkpoint import rank_save
from zrun_core.checkpoint.checkpointer import Checkpointer, SaveConsensus
from zrun_core.checkpoint.divisions import Share
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.manifest_parts import TensorInfo, UnitInfo, UnitRun
from zrun_core.checkpoint.model_files import ModelFiles
from zrun_core.checkpoint.rank_save import RunInfo
from zrun_core.checkpoint.shard_file import WriteItem
from zrun_core.distributed import rng
from zrun_core.errors import HangError, JobError, PreflightError, SaveError
from zrun_core.spine.events import encode
from zrun_core.spine.sections.checkpoint import CheckpointConfig
from zrun_core.spine.stop_signals import SAVE

START = {"type": "start", "rank": 0, "time": 1.0, "total_steps": 9}
STEP = {"type": "step", "rank": 0, "time": 2.0, "step": 5}


def saved(step: int) -> dict[str, Any]:
    path = f"/ckpt/step-{step:08d}"
    return {
        "type": "save",
        "rank": 0,
        "time": 3.0,
        "step": step,
        "path": path,
        "bytes": 1024,
        "seconds": 0.5,
    }


Answer = Callable[..., None]


@pytest.fixture
def run() -> Iterator[ExitStack]:
    """Ends with the launcher, when it is closed."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def rundir(tmp_path: Path, run: ExitStack) -> RunDir:
    """Of a run that trains, in its sixth step, and whose launcher is this process."""
    claimed = run.enter_context(RunDir.claim("gpt", tmp_path / "run"))
    claimed.exit_code = 0
    claimed.write_job("name: gpt\ncheckpoint:  # file\n  every: 500  # file\n")
    claimed.append([encode(START), encode(STEP)])
    return claimed


@pytest.fixture
def answer(rundir: RunDir, run: ExitStack) -> Iterator[Answer]:
    """Called with what the record gets each time that the launcher is asked, a list for each; None
    ends the run.
    """
    turns: list[Any] = []

    def obey(number: int, _: object) -> None:
        events = turns.pop(0)
        if events is None:
            run.close()
        else:
            rundir.append([encode(event) for event in events])

    before = signal.signal(SAVE, obey)
    yield lambda *events: turns.extend(events)
    signal.signal(SAVE, before)
    assert not turns, "it was asked less often"


def test_the_answer_is_a_step_that_came_later(rundir: RunDir, answer: Answer) -> None:
    rundir.append([encode(saved(4))])
    answer([saved(5), STEP | {"step": 6}, saved(6), saved(7)])  # 5 was being written already
    assert save_request.save(read_run(rundir.path), 60.0) == save_request.Saved(
        6, "/ckpt/step-00000006", 1024, 0.5
    )


def test_a_save_that_fails_is_told(rundir: RunDir, answer: Answer) -> None:
    warning = {
        "type": "warning",
        "rank": 0,
        "time": 3.0,
        "message": "step 6 is not saved: the disk is full",
    }
    others = [
        warning | {"message": "careful"},
        warning | {"message": "step 5 is not saved", "unsaved": 5},
    ]
    answer([*others, warning | {"unsaved": 6}])
    with pytest.raises(SaveError, match="step 6 is not saved: the disk is full"):
        save_request.save(read_run(rundir.path), 60.0)


def test_a_restart_is_asked_again(rundir: RunDir, answer: Answer) -> None:
    """It goes on from step 2, so that 3 is newer than the request."""
    answer([START | {"resumed": {"step": 2, "path": "/ckpt"}}], [saved(3)])
    assert save_request.save(read_run(rundir.path), 60.0).step == 3


def test_a_run_that_ends_first_is_named(rundir: RunDir, answer: Answer) -> None:
    answer(None)
    with pytest.raises(
        save_request.RunEndedError, match="run finished after step 5 before it could save"
    ):
        save_request.save(read_run(rundir.path), 60.0)


def test_patience_ends(rundir: RunDir, answer: Answer) -> None:
    answer([])
    with pytest.raises(HangError, match="has not saved within 0 s; it may still do so"):
        save_request.save(read_run(rundir.path), 0.0)


def test_a_run_that_has_ended_is_not_said_to_save(
    rundir: RunDir, run: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    run.close()
    with pytest.raises(JobError, match="is not running: it finished"):
        save(str(rundir.path))
    assert capsys.readouterr().err == ""


def test_what_cannot_be_asked(rundir: RunDir, run: ExitStack) -> None:
    with pytest.raises(
        PreflightError, match="has not started to train"
    ):  # no handler: the signal would end it
        save_request.check(read_run(rundir.path))
    rundir.write_job("name: gpt\ncheckpoint: null  # default\n")
    with pytest.raises(JobError, match="saves nothing: its job has no checkpoint"):
        save_request.check(read_run(rundir.path))
    run.close()
    with pytest.raises(JobError, match="is not running: it finished; its saves"):
        save_request.check(read_run(rundir.path))


class Clock:
    """In place of the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class OneTensor:
    """A model of four numbers."""

    describes_part = True
    order = ()

    @property
    def layout(self) -> dict[str, Any]:
        return {"stage": 0}

    def tensors(self) -> list[TensorInfo]:
        return [TensorInfo("w", (4,), (1,), "float32", "param", (), {})]

    def write_items(self) -> list[WriteItem]:
        return [WriteItem("w", "value", 0, 4, torch.zeros(4))]

    def shares(self) -> list[Share]:
        return [Share(1, 1, 0, (UnitInfo("all", 4, [UnitRun("w", 0, 0, 4)]),))]

    def scalars(self) -> dict[str, Any]:
        return {}

    def buffer_digests(self) -> dict[str, str]:
        return {}

    def own_buffers(self, first: Any) -> list[WriteItem]:
        return []

    def reducer_state(self) -> dict[str, Any]:
        return {"order": [], "late": []}

    def model_files(self) -> ModelFiles:
        return ModelFiles()


class Rank:
    """The only rank of a run, between its steps. A save is written once `go_on` is set."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.go_on, self.told = threading.Event(), list[dict[str, Any]]()
        write = rank_save.write_shard

        def held_up(*args: Any) -> Any:
            self.go_on.wait()
            return write(*args)

        monkeypatch.setattr(rank_save, "write_shard", held_up)
        comm: Any = SimpleNamespace(
            device=torch.device("cpu"),
            all_gather_bytes=lambda data, group, name: [data],
            gather_bytes=lambda data, group, name: [data],
            share_bytes=lambda data, group, name: data,
            all_reduce_small=lambda numbers, group, name: numbers,
            read=torch.Tensor.tolist,
        )
        world: Any = SimpleNamespace(index=0, size=1)
        state: Any = OneTensor()
        settings = CheckpointConfig.model_validate({"async": True, **config})
        run = RunInfo("run", {}, {})
        self.saves = Checkpointer(
            CheckpointFolder(folder),
            state,
            rng.Streams(0, comm.device, dp=0),
            settings,
            comm,
            world,
            run,
            lambda **fields: self.told.append(fields),
        )
        self.step = 0

    def end_step(self, *, asked: bool = False) -> None:
        self.step += 1
        self.saves.update(self.saves.contribution(asked))
        if self.saves.needs_turn(self.step):
            self.saves.after_step(self.step, dict)

    def let_write(self) -> None:
        """What is being written is committed, and the ranks are about to hear of it."""
        assert self.saves._current is not None
        self.go_on.set()
        self.saves._current.writing.result()
        self.saves.advance(SaveConsensus(written=1.0))
        assert self.saves._current.committing is not None
        self.saves._current.committing.result()
        self.go_on.clear()

    @property
    def saved(self) -> dict[int, str]:
        return {fields["step"]: fields["reason"] for fields in self.told if "step" in fields}

    @property
    def warnings(self) -> list[str]:
        return [fields["warning"] for fields in self.told if "warning" in fields]


def test_a_save_that_was_asked_for_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path, monkeypatch, every=3)
    rank.end_step()
    assert rank.saves.under_way is None
    rank.end_step(asked=True)
    assert rank.saves.under_way == 2
    rank.let_write()
    rank.end_step(asked=True)  # due at the same step: one save, and the person is told
    assert (rank.saves.under_way, rank.saved) == (3, {2: "asked"})
    rank.let_write()
    rank.end_step()
    assert (rank.saves.under_way, rank.saved) == (None, {2: "asked", 3: "asked"})
    rank.saves.close()


def test_it_waits_for_its_turn_where_others_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path, monkeypatch, every=2, busy="skip")
    rank.end_step()
    rank.end_step()
    rank.end_step(asked=True)
    assert (rank.saves.under_way, rank.warnings) == (2, [])
    rank.end_step()
    assert rank.warnings == ["step 4 is not saved: step 2 is still being written"]
    rank.let_write()
    rank.end_step()
    assert (rank.saves.under_way, rank.saved) == (5, {2: "due"})
    rank.let_write()
    rank.end_step()
    assert rank.saved == {2: "due", 5: "asked"}
    rank.go_on.set()
    rank.saves.finish()
    rank.saves.close()


def test_one_that_fails_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says names the step, for whoever has asked."""
    rank = Rank(tmp_path, monkeypatch, every=100, on_save_error="warn", **{"async": False})
    (tmp_path / "step-00000001").mkdir()
    rank.end_step(asked=True)
    (told,) = rank.told
    assert told["unsaved"] == 1
    rank.end_step()
    assert rank.saves.under_way is None
    rank.saves.close()


def test_a_save_that_is_skipped_is_not_due_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written for longer than `minutes`: one warning each time they have passed."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    rank = Rank(tmp_path, monkeypatch, minutes=60, busy="skip")
    clock.now += 3600
    rank.end_step()
    assert rank.saves.under_way == 1
    rank.end_step()
    assert rank.warnings == []
    clock.now += 3600
    for _ in range(3):
        rank.end_step()
    assert rank.warnings == ["step 3 is not saved: step 1 is still being written"]
    clock.now += 3600
    rank.end_step()
    assert rank.warnings[1:] == ["step 6 is not saved: step 1 is still being written"]
    rank.go_on.set()
    rank.saves.finish()
    rank.saves.close()
