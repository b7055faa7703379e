"""`sync: async_server` from the shell: what it tells; a rank or the server is killed; a signal; it
goes on. Nothing is left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_for

from zrun_core.errors import ExitCode

HERE = Path(__file__).parent
ZRUN = [sys.executable, "-m", "zrun"]
KEYS: dict[str, Any] = {
    "name": "small",
    "model": "small_job.py:Net",
    "data": {"call": "small_job.py:Vectors", "shuffle": True},
    "steps": 120,
    "batch": {"global": 12, "micro": 2},
    "sync": "async_server",
    "staleness": "any",
    "slots": 3,
    "device": "cpu",
    "threads": 1,
    "hooks": {"on_step": "small_job.py:on_step"},
    "checkpoint": {"every": 20},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(HERE / "small_job.py", tmp_path)
    lines = (f"{key}: {json.dumps(value)}\n" for key, value in KEYS.items())
    (tmp_path / "job.yaml").write_text("".join(lines))
    return tmp_path


def zrun(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*ZRUN, "train", "job.yaml", "--ui", "plain", "--run-dir", "run", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "run" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["type"] == kind]


def steps(folder: Path) -> dict[int, dict[str, Any]]:
    """By number; one that was made again counts as it was made last."""
    return {event["step"]: event for event in events(folder, "step")}


def left(folder: Path) -> dict[bytes, int]:
    """What still runs of the jobs of a folder: process ids by rank."""
    mark = f"ZRUN_STORE={folder / 'run'}/".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            variables = (
                (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            )
        except OSError:
            continue
        if any(variable.startswith(mark) for variable in variables):
            ranks = [each.partition(b"=")[2] for each in variables if each.startswith(b"RANK=")]
            found[b"".join(ranks)] = int(entry.name)
    return found


def is_whole(folder: Path, number: int) -> bool:
    """Every one of so many steps was made, and every sample counted once."""
    samples = [event["total_samples"] for _, event in sorted(steps(folder).items())]
    return samples == list(range(12, 12 * (number + 1), 12))


@pytest.mark.thorough
def test_it_tells_how_late_its_gradients_are(folder: Path) -> None:
    checked = subprocess.run(
        [*ZRUN, "check", "job.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert checked.returncode == 0, checked.stderr
    assert "sync: async_server changes numerics" in " ".join(checked.stdout.split())
    done = zrun(folder)
    assert done.returncode == 0, done.stderr
    assert "sync: async_server changes numerics" in " ".join(done.stderr.split())
    assert is_whole(folder, 120)
    told = events(folder, "pushes")
    assert sum(event["steps"] for event in told) == 120
    assert sum(sum(event["staleness"].values()) for event in told) == 3 * 120
    report = {line[:10].strip(): line[10:].strip() for line in done.stdout.splitlines()}
    assert report["pull"].endswith("sent by rank 0, equal to theory")
    assert report["memory"].endswith("in buffers of rank 0, equal to plan")
    assert "of the slowest (no bound)" in report["staleness"]
    label = "changes numerics (sync: async_server, staleness any)"
    assert report["numerics"] == label
    assert [event["changes_numerics"] for event in events(folder, "start")] == [label[18:-1]]
    page = (folder / "run" / "report.html").read_text()
    assert label in page
    assert "<h2>Staleness of pushes</h2>" in page
    assert "0 updates late" in page or "0 to " in page


@pytest.mark.parametrize("rank", [0, 1], ids=["the server", "another rank"])
@pytest.mark.at_most(1)
def test_who_is_killed_is_named_and_the_run_goes_on(folder: Path, rank: int) -> None:
    command = [*ZRUN, "train", "job.yaml", "--ui", "none", "--run-dir", "run", "steps=400"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as launcher:
        wait_for(lambda: len(events(folder, "step")) > 30)
        os.kill(left(folder)[b"%d" % rank], signal.SIGKILL)
        _, told = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 5, told
    assert f"rank {rank} of 3" in told
    assert "was killed by SIGKILL after step" in told
    assert "--run-dir run --resume auto" in told
    assert not left(folder)
    done = zrun(folder, "--resume", "auto", "steps=400")
    assert done.returncode == 0, done.stderr
    assert "continues after step" in done.stderr
    assert is_whole(folder, 400)
    assert not left(folder)


@pytest.mark.thorough
def test_restarts_go_on_by_themselves(folder: Path) -> None:
    command = [*ZRUN, "train", "job.yaml", "--ui", "none", "--run-dir", "run", "restarts=1"]
    with subprocess.Popen(
        [*command, "steps=400"], cwd=folder, stderr=subprocess.PIPE, text=True
    ) as launcher:
        wait_for(lambda: len(events(folder, "step")) > 30)
        os.kill(left(folder)[b"1"], signal.SIGKILL)
        _, told = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 0, told
    assert "rank 1 of 3" in told
    assert "restart 1 of 1" in told
    assert is_whole(folder, 400)
    assert not left(folder)


@pytest.mark.thorough
def test_a_signal_ends_it_with_the_steps_that_were_begun(folder: Path) -> None:
    command = [*ZRUN, "train", "job.yaml", "--ui", "none", "--run-dir", "run", "steps=100000"]
    with subprocess.Popen(
        command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        wait_for(lambda: len(events(folder, "step")) > 40)
        launcher.send_signal(signal.SIGTERM)
        _, told = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == ExitCode.STOPPED, told
    last = max(steps(folder))
    manifest = folder / "run" / "checkpoints" / f"step-{last:08d}" / "manifest.json"
    assert manifest.exists()
    assert not left(folder)
    done = zrun(folder, "--resume", "auto", f"steps={last + 20}")
    assert done.returncode == 0, done.stderr
    assert is_whole(folder, last + 20)


PACED = '''
import os, time
import torch
from small_job import Net


class Paced(Net):
    """Every forward takes a while; on the last rank one of them does not end."""

    def __init__(self, pause: float, hangs_in: int = 0) -> None:
        super().__init__()
        self.pause, self.count = pause, 0
        self.hangs_in = hangs_in if os.environ["RANK"] == "1" else 0

    def forward(self, x, y):
        self.count += 1
        time.sleep(60 if self.count == self.hangs_in else self.pause)
        return super().forward(x, y)
'''


def paced(folder: Path, limit_s: float, **args: float) -> list[str]:
    """Options of a job of two ranks and two micro-batches each, whose ranks wait for so long."""
    (folder / "paced.py").write_text(PACED)
    model = json.dumps({"call": "paced.py:Paced", "args": args})
    sizes = ["slots=2", "batch={global: 8, micro: 2}", "checkpoint=null", "hooks={}"]
    return [f"model={model}", *sizes, f"limits.collective_s={limit_s}"]


@pytest.mark.parametrize("staleness", ["0", "any"])
@pytest.mark.thorough
def test_a_share_may_take_longer_than_a_wait(folder: Path, staleness: str) -> None:
    """Nobody waits for long: both ranks compute for as long."""
    done = zrun(folder, *paced(folder, 4, pause=2.3), "steps=2", f"staleness={staleness}")
    assert done.returncode == 0, done.stderr
    assert is_counted(folder, [8, 16])


@pytest.mark.thorough
def test_a_rank_that_hangs_is_named(folder: Path) -> None:
    # A rank that computes without a pause may make all pushes before the other one has come so far.
    done = zrun(folder, *paced(folder, 3, pause=0.1, hangs_in=5), "steps=8")
    assert done.returncode == ExitCode.HANG, done.stderr
    assert "others have waited for a push of rank 1 for more than 3 s" in " ".join(
        done.stderr.split()
    )
    assert not left(folder)


def is_counted(folder: Path, samples: list[int]) -> bool:
    return [event["total_samples"] for _, event in sorted(steps(folder).items())] == samples
