"""A job that does not fit is refused, with the keys that would help; with those keys it trains."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

JOB = {
    "name": "big",
    "model": {
        "call": "zrun_core.models.gpt:gpt",
        "args": {"dim": 768, "depth": 6, "heads": 4, "seq_len": 64},
    },
    "data": {"call": "zrun_core.data.text:text", "args": {"paths": "*.txt", "seq_len": 64}},
    "steps": 2,
    "batch": {"global": 2, "micro": 1},
    "slots": 2,
    "device": "cpu",
    "zero": 0,
    "limits": {"memory": "1500MiB"},
}


def zrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zrun", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.thorough
def test_what_does_not_fit_is_refused_and_trains_as_it_is_told_to(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ZRUN_ESTIMATE")
    (tmp_path / "job.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in JOB.items())
    )
    (tmp_path / "some.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    refused = zrun(tmp_path, "train", "job.yaml", "--run-dir", "refused", "--ui", "plain")
    assert refused.returncode == 3, refused.stderr
    assert re.search(
        r"the model's states take \d+\.\d MiB on this rank, which has \d+\.\d MiB", refused.stderr
    )
    assert (
        "this job does not fit: each rank's share of the host's memory would hold" in refused.stderr
    )
    assert "more than its 750.0 MiB: " in refused.stderr
    assert re.search(
        "; the cheapest change that fits: (zero.stage|parallel.pp)=", refused.stderr
    ), "the model is divided over the ranks, one way or the other"
    found = json.loads((tmp_path / "refused" / "failure.json").read_text())
    assert (found["exit_code"], found["unfit"]["capacity"]) == (3, 750 << 20)
    assert not (tmp_path / "refused" / "checkpoints").exists()

    changed = zrun(tmp_path, "estimate", "job.yaml", "--fit", "--write", "fits.yaml")
    assert changed.returncode == 0, changed.stderr
    line = next(
        line for line in refused.stderr.splitlines() if line.startswith("on the command line: ")
    )
    assert (
        f"with {line.removeprefix('on the command line: ')}, or in the job file:" in changed.stdout
    )
    trained = zrun(tmp_path, "train", "fits.yaml", "--run-dir", "fits", "--ui", "plain")
    assert trained.returncode == 0, trained.stderr
    assert "step 2/2" in trained.stdout
    checked = zrun(tmp_path, "estimate", "--check", "fits")
    assert checked.returncode == 0, checked.stdout
    line = r"peak +\S+ MiB predicted +\S+ MiB measured +\S+% +\(at most 2%, or 1\.0 MiB\) +ok"
    assert re.search(line, checked.stdout)


@pytest.mark.thorough
def test_one_rank_that_has_too_little_memory_is_told_to_use_its_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = JOB | {"slots": 1, "limits": {"memory": "760MiB"}}
    (tmp_path / "job.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in job.items())
    )
    (tmp_path / "some.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    refused = zrun(tmp_path, "train", "job.yaml", "--ui", "plain")
    assert refused.returncode == 3, refused.stderr
    found = re.search(r"^on the command line: (.*)$", refused.stderr, re.MULTILINE)
    assert found is not None, refused.stderr
    keys = found[1].split()
    assert "offload.optimizer=disk" in keys
    trained = zrun(tmp_path, "train", "job.yaml", *keys, "--ui", "plain")
    assert trained.returncode == 0, trained.stderr
    assert "step 2/2" in trained.stdout
