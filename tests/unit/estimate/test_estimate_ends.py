"""Estimates run the user's code, which may never end: they do, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from zrun.estimate.forecast_process import ForecastRequest
from zrun.hosts.cluster import HostFacts
from zrun.system.processes import Process

JOB = {
    "name": "endless",
    "model": "m.py:model",
    "data": "m.py:data",
    "steps": 1,
    "batch": {"micro": 1},
    "device": "cpu",
    "slots": 1,
}
CODE = """
import os, pathlib, subprocess, time
HERE = pathlib.Path(__file__).parent

def model():
    from torch import nn
    return nn.Linear(4, 4)

def data():
    child = subprocess.Popen(["sleep", "600"], start_new_session="APART" in os.environ)
    (HERE / "part").write_text(f"{os.getpid()} {child.pid}")
    (HERE / "part").rename(HERE / "pids")
    time.sleep(600)
"""
LAUNCHER = """
import json, sys, time
from zrun.estimate.forecast_process import ForecastProcess, ForecastRequest, Pace
made = ForecastProcess(ForecastRequest(**json.loads(sys.argv[1])), {}, Pace.NOW)
print(made._process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "m.py").write_text(CODE)
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    return tmp_path


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def under_way(folder: Path) -> list[Process]:
    """The process that runs the user's code, and what that has started."""
    wait_for((folder / "pids").exists)
    found = [Process.find(int(pid)) for pid in (folder / "pids").read_text().split()]
    return [process for process in found if process is not None]


def are_gone(processes: list[Process]) -> Callable[[], bool]:
    return lambda: not any(process.alive() for process in processes)


def test_an_estimate_beside_a_run_ends_with_a_launcher_that_was_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APART", "in a session of its own")
    host = HostFacts("here", 2, 8 << 30).to_json()
    request = ForecastRequest(JOB, str(folder / "job.yaml"), [host], "key")
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, json.dumps(asdict(request))],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    estimator = Process.find(int(launcher.stdout.readline()))
    assert estimator is not None
    all_of_it = [estimator, *under_way(folder)]
    assert len(all_of_it) == 3
    launcher.kill()
    launcher.communicate()
    wait_for(are_gone(all_of_it))


@pytest.mark.thorough
def test_ctrl_c_ends_an_estimate(folder: Path) -> None:
    command = [sys.executable, "-m", "zrun", "estimate", "job.yaml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in the background ignore it
    estimate = subprocess.Popen(command, cwd=folder, text=True, **pipes)
    signal.signal(signal.SIGINT, before)
    found = under_way(folder)
    os.kill(estimate.pid, signal.SIGINT)
    said, _ = estimate.communicate(timeout=60)
    assert (estimate.returncode, said) == (130, "")
    wait_for(are_gone(found))


@pytest.mark.thorough
def test_an_estimate_that_took_too_long_says_what_was_under_way(folder: Path) -> None:
    command = [sys.executable, "-m", "zrun", "estimate", "job.yaml", "--patience", "10"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "cannot say whether it fits: the rank's share" in done.stdout
    assert "reading the first samples of m.py:data did not finish within 10 s" in done.stdout
    assert "--patience S" in done.stdout
    wait_for(are_gone(under_way(folder)))
