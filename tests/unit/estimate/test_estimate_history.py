"""What earlier runs of a job took corrects the next estimate of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from warm import WarmPopen

from zrun.estimate import gate
from zrun.estimate.answer import answer
from zrun.estimate.forecast import Forecast, key_of, store
from zrun.estimate.gate import Gate
from zrun.estimate.history import History, earlier_runs, kind_of, remember, with_history
from zrun.estimate.question import of_model
from zrun.estimate.screens import print_answer, to_json
from zrun.hosts.cluster import Cluster, HostFacts
from zrun.job.load import LoadedJob, load_job
from zrun.placement.plan import make_plan
from zrun.watch.plain import message_line
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.spine.cache import cache_folder
from zrun_core.spine.events import Event

JOB = "name: t\nmodel: m.py:f\ndata: m.py:d\nsteps: 50\nbatch: {micro: 2}\ndevice: cpu\nslots: 2\n"
CLUSTER = Cluster((HostFacts("elsewhere", 8, 8 << 30),))


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedJob:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gate, "_is_busy", lambda: False)
    (tmp_path / "job.yaml").write_text(JOB)
    return load_job(tmp_path / "job.yaml")


def kind(loaded: LoadedJob, *overrides: str) -> str:
    job = load_job(loaded.path, list(overrides)).config
    return kind_of(job, loaded.path.parent, CLUSTER)


def test_the_median_of_the_last_five_counts(loaded: LoadedJob) -> None:
    here = kind(loaded)
    assert earlier_runs(here) is None
    for ratio in (9.0, 1.0, 1.2, 1.1, 3.0, 1.3):
        remember(here, ratio)
    earlier = earlier_runs(here)
    assert earlier == History((1.0, 1.2, 1.1, 3.0, 1.3))
    assert earlier.scale == 1.2
    assert earlier.spread == pytest.approx(3.0 / 1.2 - 1)
    assert History((1.0, 1.01)).spread == 0.15
    assert History((1.0,)).spread == 0.25


def test_runs_are_of_a_kind_that_errs_alike(loaded: LoadedJob) -> None:
    same = ("steps=9", "batch.micro=1", "optim.lr=1", "name=other")
    assert kind(loaded, *same) == kind(loaded)
    for key in (
        "precision=bf16",
        "parallel.pp=2",
        "compile=true",
        "slots=1",
        "model=m.py:g",
        "zero=2",
    ):
        assert kind(loaded, key) != kind(loaded)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"[0, -1]", b'["x"]', b"7", b"[NaN]"])
def test_what_cannot_be_read_is_not_there(loaded: LoadedJob, content: bytes) -> None:
    here = kind(loaded)
    remember(here, 1.0)
    (cache_folder("ratios") / f"{here}.json").write_bytes(content)
    assert earlier_runs(here) is None


def run(loaded: LoadedJob, step_s: float, steps: int) -> list[Event]:
    """Follow a run. Returns its comparisons with the forecast."""
    told: list[Event] = []
    watched = Gate(
        loaded, make_plan(loaded.config, CLUSTER), CLUSTER, {}, force=False, is_restart=False
    )
    common: dict[str, Any] = {"time": 1.0, "rank": 0, "loss": 1.0}
    for number in range(1, steps + 1):
        watched.see(common | {"type": "step", "step": number, "step_s": step_s}, told.append)
        watched.see(common | {"type": "peak", "step": number, "peak_bytes": 1000}, told.append)
    watched.see(common | {"type": "end", "step": steps}, told.append)
    return told


def test_a_run_is_predicted_as_the_last_ones_were_measured(loaded: LoadedJob) -> None:
    forecast = Forecast("traced", 1000, 1000, 1000, 2000, 1.0, 0.5, 1.5, calibrated=True)
    store(key_of(loaded.config, loaded.path.parent, CLUSTER), forecast)
    first = run(loaded, 1.25, steps=20)
    assert first[-1]["predicted"]["step_s"] == 1.0
    assert first[-1]["predicted"]["runs"] == 0
    second = run(loaded, 1.35, steps=20)
    assert second[-1]["predicted"]["step_s"] == 1.25
    assert "step 1.35s, predicted 1.25s (0.94s to 1.56s, as the last run took)" in message_line(
        second[-1]
    )
    third = run(loaded, 1.35, steps=20)  # by measured over *unscaled* seconds: 1.25 and 1.35
    assert third[-1]["predicted"]["step_s"] == pytest.approx(1.30)
    assert earlier_runs(kind(loaded)) == History((1.25, 1.35, 1.35))
    run(loaded, 9.0, steps=9)
    assert earlier_runs(kind(loaded)) == History((1.25, 1.35, 1.35)), "too short to say anything"


def test_a_busy_host_says_nothing(loaded: LoadedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(loaded.path.parent / "cache"))
    forecast = Forecast("traced", 1000, 1000, 1000, 2000, 1.0, 0.5, 1.5, calibrated=True)
    store(key_of(loaded.config, loaded.path.parent, CLUSTER), forecast)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (5.0, 0.0, 0.0))
    run(loaded, 4.0, steps=20)
    assert earlier_runs(kind(loaded)) is None
    monkeypatch.setattr(os, "getloadavg", lambda: (2.5, 9.0, 9.0))
    run(loaded, 1.1, steps=20)
    assert earlier_runs(kind(loaded)) == History((1.1,))


def test_all_times_of_an_answer_are_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", WarmPopen)
    predicted = answer(of_model("1B", parse_simulate("1xA100-80G"), ("zero=1",)), "best")
    found = with_history(predicted, History((2.0, 1.9, 2.2)))
    assert predicted.found is not None
    assert found.found is not None
    for old, new in zip(
        [*predicted.stages, *predicted.found.best],
        [*found.stages, *found.found.best],
        strict=True,
    ):
        assert new.time.seconds == pytest.approx(2 * old.time.seconds)
        assert new.time.low == pytest.approx(0.85 * new.time.seconds)
        assert new.time.high == pytest.approx(1.15 * new.time.seconds)
    print_answer(found, None, None)
    out = capsys.readouterr().out
    assert "the last 3 runs of this model here took 2.00 of what was predicted" in out
    assert "times from data sheets" not in out
    assert to_json(found, None, None)["earlier_runs"] == [2.0, 1.9, 2.2]
    assert with_history(predicted, None) is predicted
