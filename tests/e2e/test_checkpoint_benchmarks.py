"""The scripts that compare checkpoints with peers run, and say what they measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), "--quick", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.thorough
def test_checkpoint_benchmark(tmp_path: Path) -> None:
    out = run("checkpoint.py", "--dir", str(tmp_path), "--json", str(tmp_path / "bench.json"))
    measured = json.loads((tmp_path / "bench.json").read_text())
    assert [way["name"] for way in measured["ways"]][:3] == [
        "zrun",
        "zrun, behind",
        "torch.save + fsync",
    ]
    assert all(len(way["save_s"]) == len(way["stall_s"]) == 1 for way in measured["ways"])
    assert [len(way["load_s"]) for way in measured["ways"]] == [1, 0, 1, 1, 0]
    for row in (
        "disk, O_DIRECT",
        "copy in memory",
        "zrun's save rate / the disk's",
        "DCP async_save",
    ):
        assert row in out
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.thorough
def test_corruption_table() -> None:
    """Every fault is found, on every system where it can be."""
    rows = dict(re.split(r"\s{2,}", line)[:2] for line in run("corruption.py").splitlines()[2:])
    assert rows["a bit flipped, anywhere"] == "16 found"
    assert rows["a file of another step"] == "3 found"
    assert rows["I/O error while writing"] == "1 found"
    assert rows["killed in mid-save"] == "1 harmless"
