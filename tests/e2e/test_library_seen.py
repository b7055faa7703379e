"""A loop of the user's own on two ranks: its trackers, its profiles, and `zrun profile`."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_for

SCRIPT = """
import sys, time
import torch, zrun_core
from torch import nn

run = zrun_core.init(
    device="cpu",
    threads=1,
    run_dir="runs/loop/1",
    trackers={"csv": {}, "prometheus": {}},
    profile={"steps": [3, 4], "ranks": [0, 1]},
)
model = zrun_core.shard(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), zero=3)
optimizer = zrun_core.optimizer(model, "sgd", lr=0.1)
for step in range(int(sys.argv[1])):
    time.sleep(float(sys.argv[2]))
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    run.metric("loss", loss)
"""


def command(folder: Path, steps: int, pause_s: float) -> list[str]:
    (folder / "loop.py").write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    return [sys.executable, *launcher, "loop.py", str(steps), str(pause_s)]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "runs" / "loop" / "1" / "events.jsonl"
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    told = [json.loads(line) for line in lines]
    return [event for event in told if event["type"] == kind]


@pytest.mark.thorough
def test_trackers_and_profiles_of_a_script(tmp_path):
    done = subprocess.run(
        command(tmp_path, 6, 0.0),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "loop" / "1"
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    told = {int(row["step"]): float(row["value"]) for row in rows if row["name"] == "loss"}
    assert told == {each["step"]: each["values"]["loss"] for each in events(tmp_path, "metrics")}
    assert set(told) == set(range(1, 7))
    rates = [float(row["value"]) for row in rows if row["name"] == "train/lr"]
    assert rates == [0.1] * 6
    assert "loss" in (folder / "metrics.prom").read_text()

    found = events(tmp_path, "profile")
    assert [event["rank"] for event in found] == [0, 1]
    for event in found:
        assert event["steps"] == [3, 4]
        assert event["seconds"] > 0
        with gzip.open(event["path"], "rt") as file:
            trace = json.load(file)
        names = {each.get("name") for each in trace["traceEvents"]}
        assert {"step 3", "step 4"} <= names
        assert not {"step 2", "step 5"} & names
        assert any(str(name).startswith("all_gather ") for name in names)
    assert events(tmp_path, "warning") == []


def test_a_script_that_runs_takes_zrun_profile(tmp_path):
    script = subprocess.Popen(
        command(tmp_path, 100_000, 0.05),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(lambda: len(events(tmp_path, "step")) > 6 or script.poll() is not None)
        assert script.poll() is None, script.communicate()[0]
        asked = ["profile", "runs/loop/1", "--steps", "2", "--ranks", "1", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "zrun", *asked],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(done.stdout)
        assert found["rank"] == 1
        assert found["steps"][1] - found["steps"][0] == 1
        assert Path(found["path"]).exists() or (tmp_path / found["path"]).exists()
        assert script.poll() is None, "it goes on"
    finally:
        script.terminate()
        script.communicate()


HUNGRY = """
import torch, zrun_core
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 256)

    def forward(self, x):
        return torch.tanh(self.up(x)).square().mean()

run = zrun_core.init(device="cpu", threads=1, run_dir="runs/loop/1")
model = zrun_core.shard(Net, zero=0)
loss = model(torch.ones(40_000, 4))
torch.empty(1 << 50)
"""


def test_a_script_that_has_no_memory_ends_with_its_holders(tmp_path):
    (tmp_path / "loop.py").write_text(HUNGRY)
    done = subprocess.run(
        [sys.executable, "loop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert "zrun_core: rank 0: what holds most:" in done.stderr
    line = "activations for the backward of up (loop.py:11, return torch.tanh(self.up(x))"
    assert line in done.stderr
    failure = json.loads((tmp_path / "runs" / "loop" / "1" / "failure.json").read_text())
    kept = failure["held"]["by_kind"]["activations"]
    assert kept >= 40_000 * 256 * 4
