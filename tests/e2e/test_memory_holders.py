"""Memory that runs out on a rank, in each phase: who held it, where, and what is to be done."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S

HUNGRY = Path(__file__).with_name("hungry.py")


def zrun(
    folder: Path, *, model: str = "", data: str = "", code: int = 5, force: bool = True, **more: Any
) -> str:
    """Train until memory runs out, or another exit `code`; return the last words."""
    shutil.copy(HUNGRY, folder)
    keys = {
        "name": "hungry",
        "model": {"call": "hungry.py:Net", "args": {"where": model}},
        "data": {"call": "hungry.py:Cache", "args": {"where": data}},
        "steps": 20,
        "batch": 8,
        "slots": 2,
        "device": "cpu",
        "threads": 1,
        "zero": 2,
        "checkpoint": None,
        "limits": {"memory": "1200MiB", "hang_s": 600},
        **more,
    }
    (folder / "job.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items())
    )
    command = ["train", "job.yaml", "--run-dir", "run", "--ui", "plain"]
    command += ["--force"] if force else []
    done = subprocess.run(
        [sys.executable, "-m", "zrun", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def estimate(folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Estimate the job as `zrun` trains it."""
    keys = {
        "name": "hungry",
        "model": "hungry.py:Net",
        "data": "hungry.py:Cache",
        "steps": 20,
        "slots": 2,
        "device": "cpu",
        "threads": 1,
        "zero": 2,
        "checkpoint": None,
        **more,
    }
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items())
    (folder / "estimated.yaml").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "zrun", "estimate", "estimated.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def failure(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "failure.json").read_text())
    return found


def line_of(text: str) -> str:
    """A line of the job's code as messages name it."""
    lines = HUNGRY.read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if text in line)
    return f"hungry.py:{number}, {lines[number - 1].strip()}"


def largest(folder: Path, kind: str) -> dict[str, Any]:
    """The largest holder of a kind, of those that are told."""
    found: dict[str, Any] = next(
        each for each in failure(folder)["held"]["holders"] if each["kind"] == kind
    )
    return found


@pytest.mark.thorough
def test_in_forward_it_is_the_operation_under_way(tmp_path):
    said = zrun(tmp_path, model="forward")
    assert "rank 1 of 2 " in said
    assert "was killed by SIGKILL because memory ran out: ranks of this host held " in said
    assert "limits.memory is 1.2 GiB (forward of step 3)" in said
    assert failure(tmp_path)["held"]["rank"] == 1
    grown = sum(
        size
        for kind, size in failure(tmp_path)["held"]["by_kind"].items()
        if kind in ("activations", "tensors", "since")
    )
    assert grown > 700 << 20
    assert "hungry.py:" in failure(tmp_path)["held"]["place"]
    assert "  batch.micro: 2  # activations halve" in said


@pytest.mark.thorough
def test_an_allocation_that_fails_names_activations_by_module_and_line(tmp_path):
    said = zrun(tmp_path, model="allocation", limits={"hang_s": 600})
    assert f"forward failed in Net at {line_of('torch.empty(1 << 50)')}: out of memory: " in said
    kept = largest(tmp_path, "activations")
    assert kept["name"] == "activations for the backward of blocks.*.up (2 of them)"
    assert kept["place"] == line_of("self.up(x))")
    rows = 20_000 * 4
    # The input of one block, and what tanh makes in both; those of `down` are the same tensors.
    assert 2 * 4 * 64 * rows <= kept["num_bytes"] < 2.4 * 4 * 64 * rows
    assert "  batch.micro: 2  # activations halve, the result stays, about " in said


@pytest.mark.thorough
def test_in_an_update_it_is_the_optimizer(tmp_path):
    said = zrun(tmp_path, optim={"name": "hungry.py:Hungry", "args": {}})
    assert "(update of step 3)" in said
    held = largest(tmp_path, "tensors")
    assert held["name"].startswith("tensors (67108864,) uint8 (")
    assert held["name"].endswith(" in a Hungry")
    assert held["place"] == line_of("class Hungry")
    assert held["num_bytes"] > 512 << 20
    assert "What would help, in the job file" not in said, "no key frees what the code keeps"
    assert "have your code free the item listed first" in said


@pytest.mark.thorough
def test_in_a_save_it_is_the_call_that_saves(tmp_path):
    said = zrun(tmp_path, data="save", checkpoint={"every": 3})
    assert "(save of step 3)" in said
    held = largest(tmp_path, "tensors")
    assert held["name"].endswith(", pieces in Tokenizer.save_pretrained")
    assert held["place"] == line_of("pieces += ")
    assert "the save took the memory" in failure(tmp_path)["what_to_do"]


@pytest.mark.thorough
def test_a_hook_that_takes_nearly_twice_the_limit_is_asked_to_save(tmp_path):
    """Where ranks would be killed in a step: 896 MiB beside 60, of 400 and what is tolerated."""
    said = zrun(
        tmp_path,
        code=75,
        hooks={"on_step": "hungry.py:on_step"},
        checkpoint={"every": 1000},
        limits={"memory": "400MiB", "hang_s": 600},
    )
    assert "limits.memory is 400.0 MiB (hook of step 4)" in said
    assert list((tmp_path / "run").rglob("manifest.json")), "it has saved"


@pytest.mark.thorough
def test_an_evaluation_larger_than_a_step_is_planned(tmp_path):
    """Four samples of a rank in a table of 64 MiB each: 512 MiB on two ranks that no step has."""
    keys = {
        "batch": {"global": 8, "micro": 4},
        "eval": {"data": "hungry.py:Cache", "samples": 16, "metrics": "hungry.py:metrics"},
    }
    limits = {"memory": "600MiB", "hang_s": 600}
    shutil.copy(HUNGRY, tmp_path)
    found = estimate(tmp_path, limits=limits, **keys)
    assert found.returncode == 3
    assert " in an evaluation, " in found.stdout
    needed = estimate(tmp_path, limits={"memory": "900MiB", "hang_s": 600}, **keys)
    assert needed.returncode == 0, needed.stdout
    zrun(tmp_path, code=0, force=False, limits={"memory": "900MiB", "hang_s": 600}, **keys)


@pytest.mark.thorough
def test_in_a_loader_it_is_the_dataset(tmp_path):
    said = zrun(tmp_path, data="loader")
    assert "(data of step " in said
    held = largest(tmp_path, "tensors")
    assert held["name"].endswith(" in a Cache")
    assert held["place"] == line_of("class Cache")
    assert failure(tmp_path)["held"]["place"] == line_of("torch.ones(mib")
