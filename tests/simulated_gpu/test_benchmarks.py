"""The benchmark of all systems on all GPUs runs; of what it tells here, times mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import simulated_gpu

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_systems.py"
TINY = ("--size", "tiny", "--eager", "--rounds", "1", "--warmup", "2", "--steps", "1")


def bench(*arguments: str, devices: int = 2) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *TINY, *arguments],
        # FSDP2 frees memory of one stream while another one reads it, and makes whoever gets it
        # next wait: CUDA lets it, poison would not.
        env=simulated_gpu.environment(devices=devices, delay_us=20, seed=3, poison=0),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_all_systems_take_turns_on_two_gpus(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    done = bench("--systems", "plain,ddp,fsdp2-z3,zrun0,zrun3", "--json", str(path))
    start, *others = map(json.loads, path.read_text().splitlines())
    assert (start["device"], start["devices"], start["ranks"]) == ("Simulated GPU", 2, 2)
    runs = {line["system"]: line for line in others}
    # torch's wheel for CPUs has no timers for DDP on other devices: a failure that is told.
    assert "timer" in runs["ddp"]["error"]
    assert done.returncode == 1, done.stderr
    assert "DDP failed in 1 of 1 rounds: rank" in done.stdout
    measured = {name: line for name, line in runs.items() if name != "ddp"}
    assert [line.get("error") for line in measured.values()] == [None] * 4
    assert [line["ranks"] for line in measured.values()] == [1, 2, 2, 2]
    for line in measured.values():
        assert line["ms"] > 0
        assert 0 < line["allocated"] <= line["reserved"]
    assert runs["zrun3"]["losses"] == runs["zrun0"]["losses"]
    assert runs["zrun3"]["losses"] == pytest.approx(runs["fsdp2-z3"]["losses"], abs=1e-3)
    assert "2 x Simulated GPU" in done.stdout


def test_one_gpu_is_compared_with_a_plain_loop(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    done = bench("--systems", "plain,zrun2", "--json", str(path), devices=1)
    assert done.returncode == 0, done.stderr
    assert "ratio to plain loop" in done.stdout
    assert done.stdout.count("1.000-1.000") == 1


def test_what_a_simulation_took_is_not_written_into_the_docs(tmp_path: Path) -> None:
    page, path = tmp_path / "page.md", tmp_path / "lines.jsonl"
    page.write_text("untouched")
    done = bench("--write", "--page", str(page), "--json", str(path))
    assert done.returncode == 2
    assert "Simulated GPUs have no speed" in done.stderr
    assert page.read_text() == "untouched"
    assert not path.exists()
