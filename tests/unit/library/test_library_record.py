"""A script with `init(run_dir=...)`: what it leaves for `zrun ps`, alive, ended and failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import zrun_core
from zrun.runs.listing import RunStatus, read_run
from zrun_core.errors import JobError
from zrun_core.library import run as library
from zrun_core.library.run_record import Record

SCRIPT = """
import sys
import torch, zrun_core
from torch import nn

run = zrun_core.init(device="cpu", threads=1, run_dir="runs/loop/1")
model = zrun_core.shard(lambda: nn.Linear(4, 1), zero=0)
optimizer = zrun_core.optimizer(model, "sgd", lr=0.1)
other = zrun_core.optimizer(zrun_core.shard(lambda: nn.Linear(2, 2)), "sgd", lr=0.1)
saved = zrun_core.load(run.run_dir / "checkpoints", model)
for step in range(saved.step if saved else 0, 3 if not saved else 5):
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    run.metric("loss", loss)
zrun_core.save(run.run_dir / "checkpoints", model, step=step + 1)
print("ready", flush=True)
if sys.argv[1:]:
    sys.stdin.readline()
    raise ValueError("no more data")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "loop.py").write_text(SCRIPT)
    return tmp_path


def events(folder: Path) -> list[dict[str, object]]:
    return [
        json.loads(line) for line in (folder / "runs/loop/1/events.jsonl").read_text().splitlines()
    ]


@pytest.mark.thorough
def test_a_script_leaves_a_record_that_another_start_goes_on_with(folder: Path) -> None:
    subprocess.run(
        [sys.executable, "loop.py"], cwd=folder, check=True, capture_output=True, timeout=120
    )
    told = events(folder)
    kinds = [event["type"] for event in told]
    assert kinds == ["start", *["step", "metrics"] * 3, "save", "end"]
    assert [event["step"] for event in told if event["type"] == "step"] == [1, 2, 3]
    assert told[1]["lr"] == 0.1
    assert set(told[2]["values"]) == {"loss"}
    run = read_run(folder / "runs/loop/1")
    assert (run.state, run.job, run.step, run.ranks, run.exit_code) == (
        RunStatus.FINISHED,
        "loop",
        3,
        1,
        0,
    )
    assert oct((folder / "runs/loop/1").stat().st_mode & 0o777) == "0o700"

    command = [sys.executable, "loop.py", "fail"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    script = subprocess.Popen(command, cwd=folder, text=True, **pipes)
    assert script.stdout.readline() == "ready\n"
    run = read_run(folder / "runs/loop/1")
    assert (run.state, run.step) == (RunStatus.RUNNING, 5)
    assert run.holder is not None
    assert run.holder.process is not None
    assert run.holder.process.pid == script.pid
    script.communicate("\n", timeout=120)
    run = read_run(folder / "runs/loop/1")
    assert (run.state, run.exit_code, run.headline) == (
        RunStatus.FAILED,
        1,
        "rank 0: ValueError: no more data",
    )
    assert "raise ValueError" in json.loads((run.path / "failure.json").read_text())["traceback"]


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(JobError, match="there are other files in it"):
        Record(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_scripts_do_not_share_a_folder(tmp_path: Path) -> None:
    first = Record(tmp_path / "run")
    with pytest.raises(JobError, match="another process writes there"):
        Record(tmp_path / "run")
    os.close(first._file)
    first._file = -1


def test_without_a_folder_nothing_is_written() -> None:
    record = Record(None)
    record.start(["here"], None)
    record.metrics(1, {"loss": 1.0})
    assert not record


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"trackers": ["csv"]}, "init(trackers=['csv']): these belong to a record: name a run_dir"),
        ({"profile": [2, 3]}, "init(profile=[2, 3]): these belong to a record: name a run_dir too"),
        ({"trackers": "csv"}, "init(trackers='csv'): write a list, such as ['csv']"),
        ({"trackers": 3}, "init(trackers=3): write a list of names"),
        ({"trackers": ["csv", "csv"]}, "a tracker is named twice"),
        ({"trackers": ["paper"]}, "to.0: Input should be 'csv', "),
        ({"trackers": {"csv": 3}}, "args.csv: Input should be a valid dictionary"),
        ({"profile": [3, 2]}, "[3, 2] ends before it begins: write [2, 3]"),
        ({"profile": {"stepz": 1}}, "steps: Field required"),
        (
            {"profile": {"steps": [2, 3], "ranks": [1]}},
            "there is no rank 1: the run has rank 0 only",
        ),
    ],
)
def test_what_is_not_a_tracker_or_a_profile_is_refused_before_anything_starts(
    tmp_path, monkeypatch, arguments, said
):
    monkeypatch.setattr(library, "_current", None)
    if "name a run_dir" not in said:
        arguments = {**arguments, "run_dir": str(tmp_path / "run")}
    with pytest.raises(JobError) as caught:
        zrun_core.init(device="cpu", **arguments)
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()
