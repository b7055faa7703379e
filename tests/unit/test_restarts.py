"""Which failures are tried again, how often, and after how long."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from zrun.commands import train
from zrun.job.load import LoadedJob
from zrun.launch import assemble
from zrun.launch.conventions import NONE
from zrun.launch.failures import Exit, Failure, Hang, LostHost, Note
from zrun.launch.hosts import Backend
from zrun.launch.restarts import Restarts
from zrun.watch.ui import Ui
from zrun_core.config import JobConfig
from zrun_core.spec import LaunchPlan, RankPlace

PLACE = RankPlace(rank=0, host="node", local_rank=0, device="cpu")
LOST = LostHost("node", "node: the connection broke", 12)


def failure(status: int, kind: str | None = None, message: str = "boom") -> Failure:
    note = None
    if kind is not None:
        note = Note.model_validate({"rank": 0, "kind": kind, "type": "E", "message": message, "exit_code": 5})
    return Failure(Exit(0, status, 1.0, note=note), PLACE, num_ranks=1, last_step=12, log=Path("log"))


@pytest.mark.parametrize(
    ("what", "is_tried"),
    [
        (LOST, True),
        (Hang({}, LaunchPlan(ranks=[PLACE]), Path("run")), True),
        (failure(-9), True),
        (failure(139), True),
        (failure(5, "peer"), True),
        (failure(5, "user"), False),
        (failure(7, "zrun"), False),
        (failure(5, "bug"), False),
        (failure(3), False),
        (None, False),
    ],
)
def test_only_accidents_are_tried_again(what: Failure | Hang | LostHost | None, is_tried: bool) -> None:
    assert (Restarts(1).after(what, 0) is not None) == is_tried


def test_the_pauses_grow_and_the_budget_ends() -> None:
    restarts = Restarts(5)
    assert [restarts.after(LOST, committed) for committed in range(6)] == [5.0, 10.0, 20.0, 20.0, 20.0, None]
    assert restarts.made == 5


def test_a_restart_that_saved_nothing_counts_twice() -> None:
    restarts = Restarts(4)
    assert [restarts.after(LOST, 10) for _ in range(3)] == [5.0, 10.0, None]
    assert Restarts(0).after(LOST, 10) is None


def test_a_run_that_was_asked_to_end_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is killed while a scheduler ends the job is an accident, but nobody wants to train on."""
    attempts: list[bool] = []

    def attempt(order: Any, members: list[Any]) -> train._Outcome:
        attempts.append(order.is_restart)
        return train._Outcome(5, failure(-signal.SIGKILL), tmp_path, 0, None, was_asked=len(attempts) == 2)

    monkeypatch.setattr(train, "_attempt", attempt)
    monkeypatch.setattr(assemble, "open_agents", lambda backend, job: [])
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    config = JobConfig.model_validate({"name": "t", "model": "m:f", "data": "m:d", "steps": 1, "batch": 1})
    loaded = LoadedJob(config.model_copy(update={"restarts": 5}), Path("job.yaml"), {})
    order = train._Order(
        loaded,
        Backend("local", "", None, NONE),
        {},
        None,
        fresh=False,
        force=False,
        ui=Ui.none,
        dry_run=False,
        worker="w",
        again="",
    )
    assert train._run(order, None) == 5
    assert attempts == [False, True]
