"""A run of two stages tells of itself: its stages, its schedule, and who waits for what."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import PATIENCE_S

from zrun_core.pipeline.grid import Grid

STAGED = Path(__file__).with_name("staged.py")
MICRO_BATCHES = 4
CALLS = 14  # in the fourth step, whose second micro-batch it is


def test_a_pipeline_tells_its_stages_its_schedule_and_what_a_rank_waits_for(tmp_path: Path) -> None:
    shutil.copy(STAGED, tmp_path)
    keys: dict[str, Any] = {
        "name": "staged",
        "model": {"call": "staged.py:Net"},
        "data": "staged.py:data",
        "steps": 9,
        "batch": {"global": 8, "micro": 2},
        "slots": 2,
        "parallel": {"pp": 2},
        "device": "cpu",
        "threads": 1,
        "log": {"every": 1},
        "limits": {"hang_s": 4, "stop_s": 600},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(keys))
    done = subprocess.run(
        [sys.executable, "-m", "zrun", "train", "job.yaml", "--run-dir", "run", "--ui", "plain"],
        cwd=tmp_path,
        env=os.environ | {"SLEEP_AT": str(CALLS)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 6, done.stderr

    assert "cpu, pp 1) is stuck in forward of step 4" in done.stderr
    waits = "rank 0 (pp 0) waits for gradients of micro-batch 1 from rank 1 (stage 1) in backward"
    assert f"{waits} of step 4" in done.stderr, done.stderr[-1500:]
    assert "'gradients of micro-batch 1' (256 B)" in done.stderr
    assert "ranks disagree" not in done.stderr
    assert "all ranks wait" not in done.stderr

    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    (start,) = [event for event in events if event["type"] == "start"]
    params = 4 * (32 * 32 + 32) + 32 + 1
    assert start["params"] == start["trainable"] == params
    stages = {event["stage"]: event for event in events if event["type"] == "stage"}
    assert [stages[stage]["blocks"] for stage in (0, 1)] == [
        ["blocks.0", "blocks.1"],
        ["blocks.2", "blocks.3"],
    ]
    assert sum(stage["params"] for stage in stages.values()) == params

    grid = Grid.of("1f1b", stages=2, virtual=1, micro_batches=MICRO_BATCHES)
    recorded = [event for event in events if event["type"] == "schedule" and event["step"] == 2]
    assert sorted(event["stage"] for event in recorded) == [0, 1]
    for event in recorded:
        planned = [cell.action for cell in grid.rows[event["stage"]]]
        assert [(kind, chunk, micro) for kind, chunk, micro, *_ in event["actions"]] == [
            (kind.value, chunk, micro) for kind, chunk, micro in planned
        ]
        times = [(begin, end, waited) for *_, begin, end, waited in event["actions"]]
        assert all(begin <= end and 0 <= waited <= end - begin for begin, end, waited in times)
        assert [begin for begin, _, _ in times] == sorted(begin for begin, _, _ in times)
    told = {
        event["rank"]: event["pipeline"]
        for event in events
        if event["type"] == "memory" and event["step"] == 3
    }
    assert {rank: (use["stage"], use["in_flight"]) for rank, use in told.items()} == {
        0: (0, 2),
        1: (1, 1),
    }
    assert all(0 <= use["waited_s"] <= use["span_s"] for use in told.values())
    _has_one_page_whoever_writes_it(tmp_path, done.stderr)


BROKEN = """
import torch
from torch.utils.flop_counter import flop_registry

from staged import Net, data


def fails(*args, **kwargs):
    raise AssertionError("shapes are incompatible")


flop_registry[torch.ops.aten.addmm] = flop_registry[torch.ops.aten.mm] = fails
torch.autograd._disable_profiler = fails
"""


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.thorough
def test_what_only_counts_ends_no_run(tmp_path: Path, pp: int) -> None:
    """As where a version of torch counts no FLOPs of an operator, or has another profiler."""
    shutil.copy(STAGED, tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    keys: dict[str, Any] = {
        "name": "broken",
        "model": "broken.py:Net",
        "data": "broken.py:data",
        "steps": 3,
        "batch": {"global": 8, "micro": 2},
        "slots": pp,
        "parallel": {"pp": pp},
        "device": "cpu",
        "threads": 1,
    }
    (tmp_path / "job.yaml").write_text(json.dumps(keys))
    done = subprocess.run(
        [sys.executable, "-m", "zrun", "train", "job.yaml", "--run-dir", "run", "--ui", "plain"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    steps = [event for event in events if event["type"] == "step"]
    assert [event["tflops"] for event in steps] == [None] * 3
    assert [event["peak_bytes"] for event in events if event["type"] == "peak"] == [None] * pp
    told = [event["message"] for event in events if event["type"] == "warning"]
    (start,) = [event for event in events if event["type"] == "start"]
    told += start["notes"]
    assert sum("the peak of memory is left out: " in text for text in told) == 1
    (uncounted,) = [text for text in told if "cannot count" in text]
    assert uncounted.startswith("FLOP/s are left out: " if pp == 1 else "parallel.split: ")
    why = "cannot count addmm (AssertionError: shapes are incompatible)"
    assert uncounted.endswith(f"torch {torch.__version__} {why}")


def _has_one_page_whoever_writes_it(folder: Path, said: str) -> None:
    """The launcher's page, and that of `zrun report` afterwards, from files alone."""
    written = (folder / "run" / "report.html").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "zrun", "report", "run", "-o", "-"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    pages = [re.sub(r"written [-\d]+ [:\d]+", "", each) for each in (written, done.stdout)]
    assert pages[0] == pages[1]
    assert "failed</b>exit code 6" in written
    message = re.findall("<pre>(.*?)</pre>", written, re.DOTALL)[0]
    assert unescape(message) in said
    assert "stuck in forward of step 4" in message
    command = "zrun train job.yaml --run-dir run --ui plain"
    assert "<td>1 to 3</td><td>failed, exit code 6</td><td>no progress for 4 s" in written
    assert f"<td>{command}</td>" in written
    assert 'aria-label="Step 2 by stage"' in written
    assert "stages were idle for" in written
    assert "cannot be drawn" not in written


@pytest.mark.thorough
def test_halves_cross_stages_whose_ranks_have_slices(tmp_path: Path) -> None:
    """What is compared before the first step crosses in fp32."""
    args = {"vocab_size": 256, "dim": 32, "depth": 2, "heads": 2, "seq_len": 16}
    text = {"call": "zrun_core.data.text:text", "args": {"paths": "stdlib", "seq_len": 16}}
    keys: dict[str, Any] = {
        "name": "halves",
        "model": {"call": "zrun_core.models.gpt:gpt", "args": {**args, "flavour": "llama"}},
        "data": text,
        "steps": 1,
        "batch": {"global": 4, "micro": 2},
        "slots": 4,
        "parallel": {"tp": 2, "pp": 2},
        "precision": "bf16",
        "device": "cpu",
        "threads": 1,
        "eval": {"data": text, "every": 1, "samples": 4},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(keys))
    done = subprocess.run(
        [sys.executable, "-m", "zrun", "train", "job.yaml", "--run-dir", "run", "--ui", "none"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    found = {event["type"]: event for event in events}
    assert "not compared" not in str(found["start"]["notes"])
    assert {"step", "eval", "end"} <= found.keys()
