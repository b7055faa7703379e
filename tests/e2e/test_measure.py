"""`zrun estimate --measure`: a trial of a real job, and of one that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

JOB = {
    "name": "small",
    "model": "small.py:model",
    "data": "small.py:data",
    "loss": "small.py:loss",
    "steps": 200,
    "lr": {"schedule": "cosine", "warmup": 50},
    "batch": {"global": 4, "micro": 1},
    "checkpoint": {"every": 2},
    "slots": 2,
    "device": "cpu",
    "zero": 2,
}
CODE = """
import os
import torch
from torch import nn

class Small(nn.Sequential):
    def forward(self, x):
        if os.path.exists("FAIL") and "RANK" in os.environ:
            raise RuntimeError("no such luck")
        return super().forward(x)

def model():
    return Small(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

def loss(model, batch):
    inputs, classes = batch
    return nn.functional.cross_entropy(model(inputs), classes)

def data():
    return torch.utils.data.TensorDataset(torch.randn(64, 32), torch.randint(4, (64,)))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "small.py").write_text(CODE)
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in JOB.items())
    (tmp_path / "job.yaml").write_text(text)
    return tmp_path


def measure(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zrun", "estimate", "job.yaml", "--measure", "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.thorough
def test_a_trial_scales_the_estimate_and_leaves_nothing_or_fails_as_a_run_does(folder):
    done = measure(folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    measured = found["measured"]
    assert len(measured["steps_s"]) == 3
    assert found["estimate"]["time"]["seconds"] == pytest.approx(measured["step_s"])
    assert measured["scale"] == pytest.approx(measured["step_s"] / measured["predicted_step_s"])
    assert measured["peak_bytes"] == pytest.approx(measured["predicted_peak_bytes"], abs=1 << 20)
    assert not (folder / "runs").exists()
    assert not list((folder / "tmp").glob("*measure*"))

    (folder / "FAIL").touch()
    failed = measure(folder)
    assert failed.returncode == 5, failed.stdout
    assert "RuntimeError: no such luck" in failed.stderr
    assert failed.stdout == ""
    log = next(line for line in failed.stderr.splitlines() if line.startswith("  log: "))
    assert Path(log.removeprefix("  log: ")).is_file(), "the message names a log that is there"
    assert not (folder / "runs").exists()
