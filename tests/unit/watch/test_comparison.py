"""`zrun compare`: the keys in which runs differ, and what they came to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from zrun.watch.compared import read_compared
from zrun.watch.comparison import ComparedRun, rows, to_json

ROOT = Path(__file__).parents[3]
JOB = {"name": "gpt", "steps": 10, "optim": {"name": "adamw", "lr": 0.1}, "log": {"every": 1}}


def make_run(folder: Path, *, job: dict[str, Any] | None = None, scale: float = 1.0) -> Path:
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB | (job or {})))
    start = {"type": "start", "time": 100.0, "rank": 0, "world_size": 2, "device": "cpu"}
    events: list[dict[str, Any]] = [start | {"versions": {"torch": "2.13.0", "zrun": "0.1.0"}}]
    for number in range(1, 11):
        known = {"type": "step", "time": 100.0 + number, "rank": 0, "step": number}
        events.append(
            known
            | {"loss": scale * 10.0 / number, "step_s": 0.5 * scale, "total_tokens": 8 * number}
            | {"tokens_per_s": 16.0 / scale, "samples_per_s": 2.0}
        )
    for step, loss in ((5, 3.0 * scale), (10, 3.5 * scale)):
        told = {"type": "eval", "time": 110.0, "rank": 0, "step": step, "loss": loss}
        events.append(told | {"metrics": {"loss": loss}})
    measured = {"peak_bytes": 1 << 20, "step_s": 0.5}
    own = {"type": "metrics", "time": 110.0, "rank": 0, "step": 10, "hook": "on_end"}
    events.append(own | {"values": {"bleu": 30.0 * scale}})
    foretold = {"type": "estimate", "time": 110.0, "rank": 0, "step": 10, "predicted": {}}
    events.append(foretold | {"measured": measured})
    events.append({"type": "end", "time": 110.0, "rank": 0, "step": 10, "total_s": 10.0})
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in events))
    return folder


def read(*paths: Path) -> list[ComparedRun]:
    return read_compared(paths)


def test_what_differs_is_on_top(tmp_path: Path) -> None:
    other = {"optim": {"name": "adamw", "lr": 0.2}, "clip": 1.0, "log": {"every": 5}, "name": "b"}
    found = rows(read(make_run(tmp_path / "a"), make_run(tmp_path / "b", job=other, scale=2.0)))
    keys = {row.name: list(row.values) for row in found if row.is_key}
    assert keys == {"optim.lr": [0.1, 0.2], "clip": [None, 1.0]}
    results = {row.name: list(row.values) for row in found if not row.is_key}
    assert [name for name in results if name.startswith("loss at")] == [
        f"loss at step {step}" for step in (1, 3, 5, 8, 10)
    ]
    assert results["loss"] == [1.0, 2.0]
    assert results["evaluation"] == [3.5, 7.0]
    assert results["best evaluation"] == [3.0, 6.0]
    assert results["step"] == [0.5, 1.0]
    assert results["bleu"] == [30.0, 60.0]
    assert results["tokens/s"] == [16.0, 8.0]
    assert results["peak in tensors"] == [1 << 20, 1 << 20]
    assert not {"ranks", "device", "torch", "zrun"} & results.keys(), "they are the same"


@pytest.mark.parametrize("damage", ["no job", "no events", "garbage", "nan"])
def test_a_run_that_lacks_something_is_compared_as_far_as_it_goes(
    tmp_path: Path, damage: str
) -> None:
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    if damage == "no job":
        (other / "job.yaml").unlink()
    elif damage == "no events":
        (other / "events.jsonl").write_text("")
    elif damage == "garbage":
        (other / "events.jsonl").write_bytes(b"\xff\n{\n[]\n")
        (other / "job.yaml").write_text("- {")
    else:
        text = (other / "events.jsonl").read_text().replace('"loss": 1.0,', '"loss": "nan",')
        (other / "events.jsonl").write_text(text)
    found = to_json(read(one, other))
    assert found["runs"] == ["a", "b"]
    assert found["results"]["loss"][0] == 1.0
    assert json.dumps(found)
    if damage != "no job":
        assert found["results"]["loss"][1] is None


def test_the_command(tmp_path: Path) -> None:
    def compare(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "zrun", "compare", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        return done.returncode, done.stdout, done.stderr

    for name, scale in (("20260101-a", 1.0), ("20260102-b", 2.0)):
        make_run(tmp_path / "runs" / "gpt" / name, scale=scale)
    code, said, _ = compare("20260101", "20260102")
    assert code == 0
    lines = {line.split("  ")[0]: line for line in said.splitlines()}
    assert lines["loss"].split() == ["loss", "1", "2", "(2x)"]
    assert lines["keys"].split() == ["keys", "the", "same", "the", "same"]
    code, said, _ = compare("20260101", "20260102", "--json")
    assert json.loads(said)["results"]["step"] == [0.5, 1.0]
    code, _, said = compare("20260101")
    assert (code, said) == (
        2,
        "error: zrun compare: name two runs or more; zrun ps --all lists them\n",
    )
    code, _, said = compare("20260101", "nosuch")
    assert code == 2
    assert said.startswith("error: no run and no job is called 'nosuch'")
