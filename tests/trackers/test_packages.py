"""The real packages of trackers, read by their own readers: every number of a run, each step once.

A run is cut, and goes on from an earlier step, so that steps are made twice. Each test is left out
where its package is missing: `make test-trackers` installs them all.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

MODEL = """
import os, signal
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.out(x).square().mean()

def data():
    return torch.utils.data.TensorDataset(torch.randn(64, 8))

def on_step(context):
    context.metric("twice", 2.0 * context.loss)
    if context.step == 7 and not os.path.exists("was here"):
        open("was here", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""
JOB: dict[str, Any] = {
    "name": "tracked",
    "model": "model.py:Net",
    "data": "model.py:data",
    "steps": 12,
    "batch": 8,
    "device": "cpu",
    "slots": 1,
    "checkpoint": 4,
    "restarts": 1,
    "hooks": {"on_step": "model.py:on_step"},
    "eval": {"data": "model.py:data", "every": 5},
}
Train = Callable[..., Path]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """`train("csv")` trains with a restart inside, and returns the run directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)

    def run(tracker: str, args: dict[str, Any] | None = None, **environment: str) -> Path:
        log = {"every": 3, "to": [tracker], "args": {tracker: args} if args else {}}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB | {"log": log}))
        done = subprocess.run(
            [sys.executable, "-m", "zrun", "train", "job.yaml", "--run-dir", "run", "--ui", "none"],
            env={**os.environ, "ZRUN_CALIBRATION": "off", **environment},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert "log.to" not in done.stderr
        return tmp_path / "run"

    return run


def told(run_dir: Path) -> dict[str, dict[int, float]]:
    """What the events say of some series, as they first came."""
    found: dict[str, dict[int, float]] = {"train/loss": {}, "eval/loss": {}, "twice": {}}
    num_steps = 0
    for line in (run_dir / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        num_steps += event["type"] == "step"
        name = {"step": "train/loss", "eval": "eval/loss"}.get(event["type"])
        if name:
            found[name].setdefault(event["step"], event["loss"])
        if event["type"] == "metrics":
            found["twice"].setdefault(event["step"], event["values"]["twice"])
    assert num_steps > 12, "some were made twice"
    assert list(found["train/loss"]) == list(range(1, 13))
    return found


def compare(run_dir: Path, kept: dict[str, list[tuple[int, float]]]) -> None:
    for name, wanted in told(run_dir).items():
        assert [step for step, _ in kept[name]] == list(wanted), f"{name}: each step once"
        values = [value for _, value in kept[name]]
        assert values == pytest.approx(list(wanted.values()), rel=1e-6)


def test_csv(train: Train) -> None:
    run_dir = train("csv")
    kept: dict[str, list[tuple[int, float]]] = {}
    head, *lines = (run_dir / "metrics.csv").read_text().splitlines()
    assert head == "step,time,name,value"
    for line in lines:
        step, _, name, value = line.split(",")
        kept.setdefault(name, []).append((int(step), float(value)))
    compare(run_dir, kept)


@pytest.mark.thorough
def test_prometheus(train: Train, tmp_path: Path) -> None:
    run_dir = train("prometheus", {"path": str(tmp_path / "zrun.prom")})
    lines = (tmp_path / "zrun.prom").read_text().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    last = told(run_dir)["train/loss"][12]
    assert float(values['zrun_train_loss{job="tracked",run="run"}']) == last
    assert float(values['zrun_is_over{job="tracked",run="run"}']) == 1
    assert not list(tmp_path.glob(".zrun.prom*"))


def test_tensorboard(train: Train) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = train("tensorboard")
    read = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    names = read.Tags()["scalars"]
    compare(
        run_dir, {name: [(each.step, each.value) for each in read.Scalars(name)] for name in names}
    )


def records_of(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, behind a head of 7 bytes.

    Blocks of 32 KiB have pieces of records: checksum, length, and whether it is all of one (1), or
    the first (2), a middle (3) or the last (4) piece.
    """
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def test_wandb(train: Train) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    run_dir = train("wandb", {"project": "mine"}, WANDB_MODE="offline", WANDB_SILENT="true")
    kept: dict[str, list[tuple[int, float]]] = {}
    ids = set()
    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")):
        for data in records_of(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.run.run_id:
                ids.add((record.run.run_id, record.run.project))
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in values.items():
                if not name.startswith("_") and name != "step":
                    kept.setdefault(name, []).append((values["step"], value))
    ((name, project),) = ids
    assert re.fullmatch(r"run-[0-9a-f]{4}", name)
    assert project == "mine"
    compare(run_dir, kept)


def test_mlflow(train: Train, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    uri = f"file://{tmp_path / 'mlruns'}"
    run_dir = train("mlflow", {"tracking_uri": uri}, MLFLOW_ALLOW_FILE_STORE="true")
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tracked")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["optim.name"] == "adamw"
    kept = {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        for name in ("train/loss", "eval/loss", "twice")
    }
    compare(run_dir, kept)


def test_trackio(train: Train, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    run_dir = train("trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    (path,) = (tmp_path / "trackio").glob("tracked*.db")
    kept: dict[str, list[tuple[int, float]]] = {}
    with sqlite3.connect(path) as base:
        rows = base.execute(
            "select step, metrics from metrics where run_name like 'run-%' order by id"
        )
        for step, metrics in rows:
            for name, value in json.loads(metrics).items():
                kept.setdefault(name, []).append((step, value))
    compare(run_dir, kept)


def test_one_that_fails_or_is_lost_ends_nothing(train: Train, tmp_path: Path) -> None:
    """Here a folder stands where the file would be."""
    (tmp_path / "zrun.prom").mkdir()
    log = {
        "to": ["prometheus", "csv"],
        "args": {"prometheus": {"path": str(tmp_path / "zrun.prom")}},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB | {"log": log}))
    done = subprocess.run(
        [sys.executable, "-m", "zrun", "train", "job.yaml", "--run-dir", "run", "--ui", "plain"],
        env={**os.environ, "ZRUN_CALIBRATION": "off"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "log.to: prometheus failed, and is off from here on: " in said
    assert "Traceback" not in said
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) > 100
