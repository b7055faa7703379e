"""The comparison with peers runs from end to end; what needs no quiet machine is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step.py"


@pytest.mark.thorough
def test_quick(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "--quick",
        "--systems",
        "ddp,zrun3-sockets,train",
        "--json",
        str(results),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    saved = json.loads(results.read_text())
    found = {verdict["label"]: verdict for verdict in saved["verdicts"]}
    assert found["stages that differ from DDP in any bit"]["value"] == 0
    assert found["bytes that zrun counts / plan"]["value"] == pytest.approx(1, abs=1e-4)
    assert found["bytes through sockets, ZeRO-3 / DDP"]["value"] == pytest.approx(
        1.5, rel=0.01
    )  # shards of a tiny model are padded
    assert "zrun train to first step, s" in found
    losses = {entry["case"]["system"]: entry["records"][0]["losses"] for entry in saved["runs"]}
    assert losses["train"] == pytest.approx(losses["ddp"][:3], abs=1e-6)
