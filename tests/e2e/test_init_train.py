"""What `zrun init` writes into an empty folder trains as it is."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S


def losses_and_rates(folder: Path, kind: str, *overrides: str) -> tuple[list[float], list[float]]:
    """Train what `zrun init --for kind` writes, and return the loss and the rate of each step."""
    zrun(folder, "init", "--for", kind)
    zrun(folder, "train", "job.yaml", *overrides, "--run-dir", "run", "--ui", "none", "device=cpu")
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["type"] == "step"]
    return [step["loss"] for step in steps], [step["lr"] for step in steps]


def zrun(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "zrun", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_module_of_torch_trains_and_decays_over_its_epochs(tmp_path: Path) -> None:
    length = ["steps=null", "epochs=1", "lr=cosine", "batch={global: 600, micro: 600}"]
    losses, rates = losses_and_rates(tmp_path, "torch", *length)
    assert len(losses) == 7  # of 4096 samples; the last one is short
    assert losses[-1] < losses[0]
    assert rates == pytest.approx(
        [1e-3 * 0.5 * (1 + math.cos(math.pi * step / 7)) for step in range(7)]
    )


@pytest.mark.thorough
def test_a_model_of_transformers_is_tried_in_few_steps(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trial = ["--smoke", "10", "eval.samples=8", "eval.every=1", "checkpoint=1"]
    losses, rates = losses_and_rates(tmp_path, "hf", *trial)
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert rates[0] == 1e-3  # a tenth of the steps is warm-up: the first one
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert len(re.findall(r'"type": ?"eval"', (tmp_path / "run" / "events.jsonl").read_text())) == 1
