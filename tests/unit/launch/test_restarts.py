"""Which failures are tried again, how often, and after how long."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zrun.hosts.backend import Backend
from zrun.hosts.cluster_env import NONE
from zrun.job.load import LoadedJob
from zrun.launch.failures import Failure, FailureNote, Hang, LostHost, WorkerExit
from zrun.launch.gpu_faults import GpuFault
from zrun.launch.launch_request import AttemptResult, LaunchRequest
from zrun.launch.restarts import Restarts
from zrun.launch.session import launch
from zrun.topology.xids import fault_of
from zrun.watch.ui import Ui
from zrun_core.errors import PreflightError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.spec import LaunchPlan, RankPlace, ResumeSpec

PLACE = RankPlace(rank=0, host="node", local_rank=0, device="cpu")
LOST = LostHost("node", "node: the connection broke", 12)


def failure(status: int, kind: str | None = None, message: str = "boom") -> Failure:
    note = None
    if kind is not None:
        note = FailureNote.model_validate(
            {"rank": 0, "kind": kind, "type": "E", "message": message, "exit_code": 5}
        )
    plan = LaunchPlan(ranks=[PLACE])
    return Failure(WorkerExit(0, status, 1.0, note=note), plan, last_step=12, log=Path("log"))


def without_gpu(xid: int) -> Failure:
    """An exception of the user's code, whose GPU has reported an error."""
    fault = fault_of("GPU-a", xid)
    assert fault is not None
    return replace(failure(5, "user"), fault=GpuFault((0,), fault, 1.0))


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
        (without_gpu(79), True),
        (without_gpu(31), False),
        (None, False),
    ],
)
def test_only_accidents_are_tried_again(
    what: Failure | Hang | LostHost | None, is_tried: bool
) -> None:
    assert (Restarts(1).after(what, 0) is not None) == is_tried


def test_the_pauses_grow_and_the_budget_ends() -> None:
    restarts = Restarts(5)
    pauses = [restarts.after(LOST, committed) for committed in range(6)]
    assert pauses == [5.0, 10.0, 20.0, 20.0, 20.0, None]
    assert restarts.made == 5


def test_a_restart_that_saved_nothing_counts_twice() -> None:
    restarts = Restarts(4)
    assert [restarts.after(LOST, 10) for _ in range(3)] == [5.0, 10.0, None]
    assert Restarts(0).after(LOST, 10) is None


def restartable(monkeypatch: pytest.MonkeyPatch, attempt: Any) -> LaunchRequest:
    """Return the request for a run that may be started again, of which `attempt` is an attempt."""
    monkeypatch.setattr("zrun.launch.attempt.attempt", attempt)
    monkeypatch.setattr("zrun.launch.session.open_agents", lambda backend, job: [])
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    keys = {
        "name": "t",
        "model": "m:f",
        "data": "m:d",
        "steps": 1,
        "batch": 1,
        "restarts": 5,
        "resume": "elsewhere",
    }
    return LaunchRequest(
        LoadedJob(JobConfig.model_validate(keys), Path("job.yaml"), {}),
        Backend("local", "", None, NONE),
        {},
        None,
        fresh=False,
        force=False,
        ui=Ui.none,
        dry_run=False,
        worker="w",
        resume_command="",
    )


def test_a_run_that_was_asked_to_end_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is killed while a scheduler ends the job is an accident, but nobody wants to
    train on.
    """
    attempts: list[bool] = []

    def attempt(request: LaunchRequest, members: list[Any]) -> AttemptResult:
        attempts.append(request.is_restart)
        return AttemptResult(
            5, failure(-signal.SIGKILL), tmp_path, 0, None, was_asked=len(attempts) == 2
        )

    assert launch(restartable(monkeypatch, attempt), None) == 5
    assert attempts == [False, True]


def test_every_restart_knows_where_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one after a restart that went on from a step of the run itself."""
    begun, own = ResumeSpec(folder="/elsewhere"), ResumeSpec(folder=str(tmp_path))
    origins: list[ResumeSpec | None] = []

    def attempt(request: LaunchRequest, members: list[Any]) -> AttemptResult:
        origins.append(request.origin)
        found = own if request.is_restart else begun
        what = None if len(origins) == 3 else failure(-signal.SIGKILL)
        return AttemptResult(5, what, tmp_path, 0, None, origin=found)

    assert launch(restartable(monkeypatch, attempt), None) == 5
    assert origins == [None, begun, begun]
    assert "restart 1 of 5 in 5 s, from where the run began" in capsys.readouterr().err


def test_a_host_that_is_not_back_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first attempt it is an error; later it costs one of the restarts."""
    num_attempts = 0

    def attempt(request: LaunchRequest, members: list[Any]) -> AttemptResult:
        nonlocal num_attempts
        num_attempts += 1
        if num_attempts == 2:
            raise PreflightError("node: no route to host")
        if num_attempts == 3:
            return AttemptResult(0, None, tmp_path, 12)
        return AttemptResult(6, LOST, tmp_path, 12)

    request = restartable(monkeypatch, attempt)
    assert launch(request, None) == 0
    assert num_attempts == 3
    told = capsys.readouterr().err
    assert "node: no route to host\nrestart 2 of 5 in 10 s, after step 12" in told

    num_attempts = 1
    with pytest.raises(PreflightError, match="no route"):
        launch(request, None)
