"""What `zrun train` makes of a forecast: it refuses, it waits for none, and it compares."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zrun.estimate import auto_share, forecast_process, gate
from zrun.estimate.compare_run import ComparedLine, check_run
from zrun.estimate.forecast import (
    PATIENCE_S,
    Forecast,
    cache_folder,
    key_of,
    store,
    stored,
)
from zrun.estimate.forecast_process import ForecastRequest, Pace
from zrun.estimate.gate import Gate, refusal
from zrun.estimate.machine import hardware_of
from zrun.hosts.cluster import Cluster, HostFacts
from zrun.job.load import LoadedJob, load_job
from zrun.placement.plan import ResolvedJob, make_plan
from zrun.watch.plain import message_line
from zrun.watch.report import report
from zrun.watch.run_state import RunState, fold
from zrun_core.errors import JobError, PreflightError
from zrun_core.spine.events import Event
from zrun_core.spine.memory_limits import share_of_rank
from zrun_core.spine.sections.auto_values import AutoValue

JOB = (
    "name: tiny\nmodel: m.py:f\ndata: m.py:f\nsteps: 5\nbatch: {micro: 2}\ndevice: cpu\nslots: 2\n"
)
CLUSTER = Cluster((HostFacts("elsewhere", 8, 8 << 30),))
NARROW = Cluster((HostFacts("elsewhere", 2, 8 << 30),))
WELL = Forecast("traced", 1000, 1000, 1000, 2000, 1.0, 0.8, 1.2, calibrated=True)
UNFIT = replace(
    WELL,
    sentence=(
        "each V100 would hold too much; the cheapest change that fits: zero.stage=3 (+1% time)"
    ),
    changes=("zero.stage=3",),
    patch="zero: 3  # was 0",
)


class FakeProcess:
    """Stands for the process: `ready` is what it will have found."""

    made: list[Pace] = []  # noqa: RUF012
    waits: list[float] = []  # noqa: RUF012
    ready: Forecast | None = None

    def __init__(self, request: ForecastRequest, environment: Any, pace: Pace) -> None:
        self.made.append(pace)
        self.forecast: Forecast | None = None

    def poll(self) -> bool:
        self.forecast = type(self).ready
        return self.forecast is not None

    def wait(self, timeout_s: float) -> Forecast | None:
        self.waits.append(timeout_s)
        return type(self).ready

    def close(self) -> None:
        pass


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedJob:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gate, "ForecastProcess", FakeProcess)
    monkeypatch.setattr(auto_share, "ForecastProcess", FakeProcess)
    FakeProcess.made, FakeProcess.waits, FakeProcess.ready = [], [], None
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.yaml").write_text(JOB)
    return load_job(tmp_path / "job" / "job.yaml")


def make(loaded: LoadedJob, cluster: Cluster = CLUSTER, **options: bool) -> Gate:
    resolved = make_plan(loaded.config, cluster)
    return Gate(loaded, resolved, cluster, {}, **{"force": False, "is_restart": False, **options})


@pytest.mark.parametrize(("free", "num_made"), [(500 << 20, 0), (4 << 30, 1)])
def test_no_forecast_takes_the_memory_that_a_run_needs(
    loaded: LoadedJob, monkeypatch: pytest.MonkeyPatch, free: int, num_made: int
) -> None:
    monkeypatch.setattr("zrun_core.spine.memory_limits.host_available", lambda: free)
    make(loaded).see({"type": "step", "step": 1}, lambda event: None)
    assert len(FakeProcess.made) == num_made


@pytest.mark.parametrize(("pace", "is_patient"), [(Pace.NOW, False), (Pace.BESIDE, True)])
def test_a_model_is_given_more_time_where_nobody_waits(
    loaded: LoadedJob, monkeypatch: pytest.MonkeyPatch, pace: Pace, is_patient: bool
) -> None:
    """Beside a run it is traced with a tenth of a core."""
    asked: list[float] = []

    def of_job(loaded: LoadedJob, cluster: Cluster, patience_s: float) -> None:
        asked.append(patience_s)
        raise JobError("enough")

    monkeypatch.setattr("zrun.estimate.question.of_job", of_job)
    request = {
        "job": loaded.config.model_dump(mode="json", by_alias=True, exclude_unset=True),
        "path": str(loaded.path),
        "hosts": [host.to_json() for host in CLUSTER.hosts],
    }
    with pytest.raises(JobError, match="enough"):
        forecast_process._make(request, pace)
    assert (asked[0] > PATIENCE_S) is is_patient


def step(number: int, step_s: float = 1.0) -> Event:
    return {"type": "step", "time": 1.0, "rank": 0, "step": number, "step_s": step_s, "loss": 1.0}


def peak(rank: int, num_bytes: int | None) -> Event:
    return {
        "type": "peak",
        "time": 1.0,
        "rank": rank,
        "step": 2,
        "peak_bytes": num_bytes,
        "reserved_bytes": None,
    }


def test_key_follows_what_an_estimate_follows(loaded: LoadedJob) -> None:
    job_dir = loaded.path.parent
    key = key_of(loaded.config, job_dir, CLUSTER)
    assert key == key_of(
        loaded.config.model_copy(update={"name": "other", "steps": 7, "resume": "auto"}),
        job_dir,
        CLUSTER,
    )
    assert key != key_of(load_job(loaded.path, ["zero=1"]).config, job_dir, CLUSTER)
    assert key != key_of(loaded.config, job_dir, NARROW)
    (job_dir / "m.py").write_text("x = 1\n")
    assert key != key_of(loaded.config, job_dir, CLUSTER)


def test_what_is_stored_is_read_and_nothing_else(loaded: LoadedJob) -> None:
    assert stored("a") is None
    store("a", UNFIT)
    assert stored("a") == UNFIT
    (cache_folder("forecasts") / "b.json").write_text('{"source": 1}')
    assert stored("b") is None
    store("a/b", WELL)  # nothing can be written there, and nothing is said


def test_what_is_known_not_to_fit_is_asked_again_and_refused(loaded: LoadedJob) -> None:
    store(key_of(loaded.config, loaded.path.parent, CLUSTER), UNFIT)
    with (
        pytest.raises(PreflightError, match=r"(?s)would hold too much.*zero: 3  # was 0.*--force"),
        make(loaded),
    ):
        pass
    assert FakeProcess.made == [Pace.NOW]
    FakeProcess.ready = WELL  # a host has more free today
    with make(loaded) as opened:
        assert opened.forecast == WELL


@pytest.mark.parametrize("option", ["force", "is_restart"])
def test_force_and_restarts_are_not_refused(loaded: LoadedJob, option: str) -> None:
    store(key_of(loaded.config, loaded.path.parent, CLUSTER), UNFIT)
    with make(loaded, **{option: True}) as opened:
        assert opened.memory_bytes is None


def test_nothing_is_made_beside_a_run_where_that_is_switched_off(
    loaded: LoadedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZRUN_ESTIMATE", "off")
    with make(loaded) as opened:
        opened.see(step(1), lambda event: None)
    assert FakeProcess.made == []


def test_the_launch_comes_first(loaded: LoadedJob) -> None:
    with make(loaded) as opened:
        assert opened.memory_bytes == share_of_rank(8 << 30, 2)
        opened.turn(pytest.fail)
        assert not FakeProcess.made
        opened.see(step(1), pytest.fail)
        opened.see(step(2), pytest.fail)
        assert FakeProcess.made == [Pace.BESIDE]


def test_a_verdict_that_comes_later_is_told_with_what_was_measured(loaded: LoadedJob) -> None:
    told: list[Event] = []
    with make(loaded) as opened:
        opened.see(step(1, 9.0), told.append)
        assert FakeProcess.made == [Pace.BESIDE]
        opened.see(peak(0, 900), told.append)
        opened.see(peak(1, 950) | {"process_bytes": 4000}, told.append)
        opened.see(step(2, 5.0), told.append)
        opened.see(step(3, 1.1), told.append)
        assert not told
        sent = {"pipe": {"activations": 5}}
        of_stages = ({"activations": 5, "gradients": 0}, {"activations": 0, "gradients": 5})
        FakeProcess.ready = replace(WELL, sentence="too big", sent=sent, stages_sent=of_stages)
        opened.turn(told.append)
        assert told[0]["predicted"]["sent"] == sent
        assert told[0]["predicted"]["stages_sent"] == of_stages
        assert [event["measured"] for event in told] == [
            {"peak_bytes": 950, "reserved_bytes": None, "process_bytes": 4000, "step_s": 1.1}
        ]
        opened.see({"type": "memory", "rank": 0, "step": 4, "process_bytes": 5000}, told.append)
        opened.see(step(4, 1.3), told.append)
        assert len(told) == 1
        opened.see({"type": "end", "rank": 0, "time": 1.0}, told.append)
    assert told[-1]["measured"]["step_s"] == pytest.approx(1.2)
    state = fold(RunState(), told[-1])
    assert told[-1]["measured"]["process_bytes"] == 5000
    line = (
        "peak 950 B in tensors (predicted 1000 B, +5.3%), 4.9 KiB in the process (1000 B, -80.0%); "
        "step 1.20s, predicted 1.00s (0.80s to 1.20s)"
    )
    assert message_line(told[-1]) == f"estimate: {line}"
    assert f"estimate  {line}" in report(state, Path("run"))


def test_a_rank_that_refused_is_explained(loaded: LoadedJob) -> None:
    with make(loaded) as opened:
        assert opened.explanation(is_refused=True) is None
        FakeProcess.ready = UNFIT
        assert opened.explanation(is_refused=True) == UNFIT
    assert "zero.stage=3" in refusal(UNFIT)


def test_a_run_that_had_no_memory_is_not_held_up_for_long(loaded: LoadedJob) -> None:
    with make(loaded) as opened:
        assert opened.explanation(is_refused=False) is None
    assert FakeProcess.waits == [10.0]


def test_a_job_may_take_less_than_there_is(loaded: LoadedJob) -> None:
    limited = load_job(loaded.path, ["limits.memory=3GiB"])
    assert key_of(limited.config, loaded.path.parent, CLUSTER) != key_of(
        loaded.config, loaded.path.parent, CLUSTER
    )
    with make(limited) as opened:
        assert opened.memory_bytes == share_of_rank(3 << 30, 2)
    hardware = hardware_of(CLUSTER, "cpu", 2, {}, 3 << 30)
    assert (hardware.host_bytes, hardware.device.memory_bytes) == (
        3 << 30,
        share_of_rank(3 << 30, 2),
    )


# offload.fraction: auto

OF_TWO = share_of_rank(8 << 30, 2)
SHARE = replace(WELL, capacity=OF_TWO, device_bytes=3 << 30, fraction=0.4, units_away=5, units=12)


def test_a_share_is_worked_out_before_the_start(loaded: LoadedJob) -> None:
    job = load_job(loaded.path, ["offload=disk", "offload.fraction=auto"])
    resolved = make_plan(job.config, CLUSTER)
    assert auto_share.is_open(resolved)
    assert not auto_share.is_open(make_plan(loaded.config, CLUSTER))

    def share(*, force: bool = False) -> ResolvedJob:
        return auto_share.with_least_share(job, resolved, CLUSTER, {}, force=force)

    with pytest.raises(PreflightError, match="auto needs an estimate of the job, which failed"):
        share()
    FakeProcess.ready = SHARE
    found = share()
    assert found.job.offload.fraction == 0.4
    assert found.job.offload.optimizer == "disk"
    assert found.reasons[-1] == AutoValue(
        "offload.fraction",
        "0.4",
        "the least that fits: 5 of 12 units leave, 3.0 GiB of 4.1 GiB used",
    )
    FakeProcess.ready = replace(UNFIT, fraction=1.0)
    with pytest.raises(PreflightError, match=r"(?s)does not fit.*zero: 3  # was 0"):
        share()
    assert share(force=True).job.offload.fraction == 1.0
    assert auto_share.with_share(resolved, 0.7).job.offload.fraction == 0.7


def test_a_share_is_worked_out_again_where_less_memory_is_free(loaded: LoadedJob) -> None:
    job = load_job(loaded.path, ["offload=disk", "offload.fraction=auto"])
    resolved = make_plan(job.config, CLUSTER)
    store(key_of(job.config, job.path.parent, CLUSTER), SHARE)
    found = auto_share.with_least_share(job, resolved, CLUSTER, {}, force=False)
    assert found.job.offload.fraction == 0.4
    assert not FakeProcess.made
    FakeProcess.ready = replace(SHARE, fraction=0.6)
    store(key_of(job.config, job.path.parent, CLUSTER), replace(SHARE, capacity=5 << 30))
    found = auto_share.with_least_share(job, resolved, CLUSTER, {}, force=False)
    assert found.job.offload.fraction == 0.6


def test_a_comparison_is_judged_by_its_tolerance() -> None:
    gib = 1 << 30
    assert ComparedLine("peak", 1.01 * gib, gib, 0.02).is_right
    assert not ComparedLine("peak", 0.98 * gib, gib, 0.01).is_right
    assert ComparedLine("peak", 98, 100, 0.01).is_right  # two bytes
    assert ComparedLine("peak", 2 * gib, gib, 0.01, is_bound=True).is_right
    assert not ComparedLine("peak", 0.98 * gib, gib, 0.01, is_bound=True).is_right
    assert ComparedLine("step", 3.0, 1.0, None).is_right
    assert "WRONG" in str(ComparedLine("step", 3.0, 1.0, 0.15))


@pytest.mark.parametrize(
    ("spec", "events", "message"),
    [
        (None, None, "no spec.json"),
        ("{}", None, "another version"),
        ("good", None, "No such file"),
        ("good", "", "never started to train"),
        ("good", '{"type": "start"}\nnoise\n[]\n', "too short"),
    ],
)
def test_runs_that_cannot_be_compared(
    tmp_path: Path, spec: str | None, events: str | None, message: str
) -> None:
    if spec == "good":
        job = {
            "name": "a",
            "model": "m:f",
            "data": "m:f",
            "steps": 1,
            "batch": {"micro": 1},
            "device": "cpu",
        }
        seat = {"rank": 0, "host": "elsewhere", "local_rank": 0, "device": "cpu"}
        batch = {"global_size": 1, "micro": 1, "accumulation": 1, "ranks": 1}
        spec = json.dumps(
            {
                "job": job,
                "plan": {"ranks": [seat]},
                "batch": batch,
                "job_dir": "/",
                "run_dir": "/",
                "run_id": "a",
            }
        )
    for name, text in (("spec.json", spec), ("events.jsonl", events)):
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(JobError, match=message):
        check_run(tmp_path)


def test_a_forecast_waits_until_the_cores_are_measured(
    loaded: LoadedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "are_due", lambda environ: True)
    command = [sys.executable, "-c", "input()"]
    measuring = subprocess.Popen(command, stdin=subprocess.PIPE)
    monkeypatch.setattr(gate.subprocess, "Popen", lambda *args, **options: measuring)
    with make(loaded) as watched:
        watched.see(step(1), lambda event: None)
        watched.turn(lambda event: None)
        assert FakeProcess.made == []
        measuring.communicate(b"\n")
        watched.turn(lambda event: None)
        assert FakeProcess.made == [Pace.BESIDE]
