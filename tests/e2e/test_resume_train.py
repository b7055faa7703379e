"""`zrun train --resume`, from the shell: killed anywhere, it goes on bit for bit; and what is said
where it cannot.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_for

from zrun_core.checkpoint.folder import read_step
from zrun_core.checkpoint.step_index import open_index

HERE = Path(__file__).parent
ZRUN = [sys.executable, "-m", "zrun"]
KEYS: dict[str, Any] = {
    "name": "small",
    "model": "small_job.py:Net",
    "data": {"call": "small_job.py:Vectors", "shuffle": True},
    "steps": 20,
    "batch": {"global": 8, "micro": 2},
    "zero": 2,
    "precision": "bf16",
    "slots": 2,
    "device": "cpu",
    "lr": {"schedule": "cosine", "warmup": 3, "decay_steps": 20},
    "hooks": {"on_step": "small_job.py:on_step"},
    "checkpoint": {"every": 3},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose one run of 20 steps nothing has disturbed."""
    folder = make(tmp_path_factory.mktemp("whole"))
    done = zrun(folder)
    assert done.returncode == 0, done.stderr
    return folder


def make(folder: Path) -> Path:
    shutil.copy(HERE / "small_job.py", folder)
    lines = (f"{key}: {json.dumps(value)}\n" for key, value in KEYS.items())
    (folder / "job.yaml").write_text("".join(lines))
    return folder


def zrun(
    folder: Path, *options: str, kill: str = "nobody:nowhere:0"
) -> subprocess.CompletedProcess[str]:
    command = [*ZRUN, "train", "job.yaml", "--ui", "none", *options]
    environment = os.environ | {"KILL": kill}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "runs" / "small").iterdir())


def losses(run: Path) -> dict[int, float]:
    """By step; one that was made again counts as it was made last."""
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return {event["step"]: event["loss"] for event in events if event["type"] == "step"}


def digests(run: Path, step: int) -> dict[tuple[str, str, int, int], str]:
    """Of every parameter, master, moment and random stream."""
    path = run / "checkpoints" / f"step-{step:08d}"
    fragments = open_index(path, read_step(path)).fragments()
    return {(each.tensor, each.state, each.start, each.stop): each.digest for each in fragments}


@pytest.mark.thorough
def test_killed_at_every_level_it_ends_as_if_nothing_had_happened(
    whole: Path, tmp_path: Path
) -> None:
    """Nor does it matter that it was to be shorter at first. A secret that it was given is kept
    nowhere, and has to be given again.
    """
    cut = make(tmp_path)
    only_at_first = ["steps=15", "env.API_TOKEN=hunter2"]
    # Rank 0 reads nine samples more at the beginning, to know the data again.
    kills = {"rank:forward:9": 5, "agent:data:22": 6, "launcher:hook:4": -9}
    for number, (kill, code) in enumerate(kills.items()):
        given = only_at_first if number == 0 else []
        killed = zrun(cut, "--resume", "auto", *given, kill=kill)
        assert killed.returncode == code, killed.stderr
        if given:
            assert "steps=15 env.API_TOKEN=null --resume auto (export API_TOKEN" in killed.stderr
            assert "hunter2" not in killed.stderr
            files = [path for path in tmp_path.rglob("*") if path.is_file()]
            assert not [path for path in files if b"hunter2" in path.read_bytes()]
    done = zrun(cut, "--resume", "auto", "--ui", "plain")
    assert done.returncode == 0, done.stderr
    assert "continues after step 9" in done.stderr
    (expected,), (run,) = runs(whole), runs(cut)
    report = {line[:14].strip(): line[14:].strip() for line in done.stdout.splitlines()[-10:]}
    assert re.fullmatch(r"20 steps in [\d.]+s \(steps\)", report["done"]), (
        "by what checkpoints tell"
    )
    assert report["this attempt"].startswith("11 steps after step 9, in ")
    assert report["loss"] == f"{losses(run)[1]:.4f} (step 1) -> {losses(run)[20]:.4f} (step 20)"
    assert "sent by rank 0 in this attempt, equal to theory" in report["all_gather"]
    assert report["page"] == str(run / "report.html")
    page = (run / "report.html").read_text()
    assert "20 steps in " in page
    assert re.search(r"resumed after step [\d, ]*9: dotted lines", page)
    assert "failed</b>exit code 5" in (run / "attempts" / "1" / "report.html").read_text()
    assert losses(run) == losses(expected)
    assert sorted(losses(run)) == list(range(1, 21))
    assert digests(run, 20) == digests(expected, 20)
    assert sorted(path.name for path in (run / "attempts").iterdir()) == ["1", "2", "3"]
    before = sorted(str(path) for path in cut.rglob("*"))
    again = zrun(cut, "--resume", "auto")
    assert again.returncode == 0
    assert "already complete" in again.stderr
    assert sorted(str(path) for path in cut.rglob("*")) == before


@pytest.mark.thorough
def test_a_save_on_request_changes_nothing_else(whole: Path, tmp_path: Path) -> None:
    folder = make(tmp_path)
    command = [*ZRUN, "train", "job.yaml", "--ui", "none", "checkpoint.keep=20"]
    environment = os.environ | {"ASKED_AFTER": "4"}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as launcher:
        wait_for(
            lambda: any(
                4 in losses(record.parent) for record in folder.glob("runs/small/*/events.jsonl")
            )
        )
        save = [*ZRUN, "save", "small"]
        would = subprocess.run(
            [*save, "--dry-run"], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S
        )
        done = subprocess.run(save, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
        _, told = launcher.communicate(timeout=PATIENCE_S)
    (expected,), (run,) = runs(whole), runs(folder)
    assert (
        would.stdout
        == f"would ask process {launcher.pid} of run {run.name} to save at the end of the step\n"
    )
    assert done.returncode == 0, done.stderr
    path = run / "checkpoints" / "step-00000005"
    assert done.stdout.startswith("saved step 5 (")
    assert done.stdout.endswith(f"): {path}\n")
    assert read_step(path).step == 5
    assert launcher.returncode == 0, told
    assert told.count("zrun save: saving at the end of the step\n") == 1
    assert losses(run) == losses(expected)
    assert digests(run, 20) == digests(expected, 20)
    late = subprocess.run(
        [*ZRUN, "save", "small"], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (late.returncode, "is not running: it finished" in late.stderr) == (2, True)


@pytest.mark.thorough
def test_an_earlier_run_is_neither_overwritten_nor_forgotten(whole: Path, tmp_path: Path) -> None:
    """What may be written is said before any worker starts; --fresh moves what is in the way."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    runs(tmp_path)[0].rename(tmp_path / "run")
    again = zrun(tmp_path, "--run-dir", "run")
    assert again.returncode == 2
    assert "continue it with --resume auto, start over with --fresh" in again.stderr
    missing = zrun(tmp_path, "--resume", "nowhere")
    assert missing.returncode == 9
    assert "is no checkpoint" in missing.stderr
    other = zrun(tmp_path, "--run-dir", "run", "--resume", "auto", "steps=22", "optim.name=sgd")
    assert other.returncode == 9, other.stderr
    assert "write optim.name: adamw" in other.stderr
    assert "resume: zrun train" not in other.stderr  # which is what has just failed
    fresh = zrun(tmp_path, "--run-dir", "run", "--fresh", "steps=3")
    assert fresh.returncode == 0, fresh.stderr
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3]
    assert sorted(losses(tmp_path / "run" / "attempts" / "2")) == list(range(1, 21))
