"""The scripts that measure states elsewhere run, and what needs no quiet machine is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.thorough
def test_a_step_with_states_on_disk(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    run("offload.py", "--quick", "--parts", "step", "--dir", "/var/tmp", "--json", str(results))
    rows = {row["way"]: row for row in json.loads(results.read_text())["step"]}
    ways = ("in memory", "disk", "disk, serial", "all on disk")
    turns = {way: rows[way]["turns"][0] for way in ways}
    assert len({tuple(turn["losses"]) for turn in turns.values()}) == 1, "not the same training"
    assert turns["in memory"]["disk_bytes"] == 0
    for way in ways[1:]:
        turn = turns[way]
        assert turn["moved_bytes"] == turn["planned_bytes"]
        assert 0 <= turn["beside"] <= 1
        assert turn["io_s"] > 0
        assert turn["update_s"] > 0


@pytest.mark.thorough
def test_a_gpu_s_cases_on_a_cpu(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    arguments = ("--smoke", "--cases", "ceilings,split", "--steps", "1", "--dir", "/var/tmp")
    out = run("gpu_offload.py", *arguments, "--json", str(results))
    ceilings, *others = map(json.loads, results.read_text().splitlines())
    assert {"copies_gb_s", "host_copy_gb_s", "adamw_gparam_s", "disk_gb_s"} <= ceilings.keys()
    found = {line["schedule"]: line for line in others if line["event"] == "result"}
    assert found.keys() == {"serial", "overlap", "delayed"}
    losses = [line["losses"][0] for line in found.values()]
    assert losses == sorted(losses, reverse=True), "it does not learn"
    assert "split" in out
