"""What the user's own code prints.

On the screen of `zrun train`, in `zrun logs`, and once where it fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

HERE = Path(__file__).parent
JOB = """
name: chatty
model: chatty.py:model
data: chatty.py:data
loss: chatty.py:loss
steps: 4
batch: 8
slots: 2
device: cpu
hooks: {on_step: "chatty.py:on_step"}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(HERE / "chatty.py", tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def zrun(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zrun", *arguments]
    environ = os.environ | environ
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_what_users_print_is_shown_and_kept(folder: Path) -> None:
    done = zrun(folder, "train", "job.yaml", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line in ("building a model", "on stderr ^[]0;a title^G", "reading 100%", "burst 0"):
        assert lines.count(f"rank 0: {line}") == 1, line
    assert "\r" not in done.stdout
    assert "\x1b" not in done.stdout
    assert not any("rank 1: " in line for line in lines)
    shown = sum(line.startswith("rank 0: burst ") for line in lines)
    left_out = [line for line in lines if "left out" in line]  # one, or more on a busy machine
    told = r"rank 0: \.\.\. ([\d,]+) lines left out, see run/logs/rank-0\.log"
    counts = [re.fullmatch(told, line)[1] for line in left_out]  # type: ignore[index]
    assert sum(int(count.replace(",", "")) for count in counts) == 100_000 - shown
    assert shown < 300 * len(left_out)
    assert lines.index(left_out[-1]) < lines.index("rank 0: burst 99999")

    logs = zrun(folder, "logs", "run")
    kept = logs.stdout.splitlines()
    for rank in (0, 1):
        assert kept.count(f"rank {rank}: building a model") == 1
        assert sum(line.startswith(f"rank {rank}: burst ") for line in kept) == 100_000
    assert "launcher: start: 9 parameters, zero 0, fp32, cpu" in kept
    assert "launcher: rank 0: building a model" not in kept  # once is enough
    told = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    outputs = [event for event in told if event["type"] == "output"]
    assert {event["rank"] for event in outputs} == {0}
    assert sum(event["left_out"] for event in outputs) == 100_000 - shown


@pytest.mark.thorough
def test_a_traceback_is_shown_once_and_what_came_before_it_too(folder: Path) -> None:
    failed = zrun(folder, "train", "job.yaml", "log.ranks=all", FAIL="1")
    assert failed.returncode == 5
    assert "rank 0: now it happens\n" in failed.stdout
    assert "rank 1: building a model\n" in failed.stdout
    assert "a wrong turn" not in failed.stdout
    assert failed.stderr.count("ValueError: a wrong turn") == 1
