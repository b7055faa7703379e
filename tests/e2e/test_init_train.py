"""What `zrun init` writes into an empty folder trains as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from waiting import PATIENCE_S

STEPS = 12  # more than the warm-up


def zrun(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "zrun", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["torch", "hf"])
def test_a_project_trains(tmp_path: Path, kind: str) -> None:
    if kind == "hf" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    zrun(tmp_path, "init", "--for", kind)
    length = [f"steps={STEPS}", "eval.samples=8"] if kind == "hf" else [f"steps={STEPS}"]
    zrun(tmp_path, "train", "job.yaml", *length, "--run-dir", "run", "--ui", "none", "device=cpu")
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    losses = [event["loss"] for event in map(json.loads, lines) if event["type"] == "step"]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
