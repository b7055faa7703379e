"""What is wrong with states elsewhere is said before anything starts, with its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

HERE = Path(__file__).parent


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: fake\nmodel: {call: 'fake:model'}\ndata: fake:data\nsteps: 3\nbatch: 4\nslots: 2\n"
    )
    return path


def zrun(job: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zrun", "train", str(job), "--worker", "fake_worker", *arguments],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        cwd=job.parent,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize(
    ("keys", "code", "words"),
    [
        ("offload={optimizer: disk, dir: job.yaml}", 3, "job.yaml: Not a directory: name"),
        ("offload={optimizer: disk, dir: /dev/shm}", 3, "/dev/shm is memory, not a disk (tmpfs)"),
        ("offload={fraction: 0.5}", 2, "fraction changes nothing while every state stays on the"),
    ],
)
@pytest.mark.at_most(1)
def test_what_cannot_be_is_refused_in_one_line(job: Path, keys: str, code: int, words: str) -> None:
    done = zrun(job, keys)
    assert (done.returncode, done.stdout) == (code, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert not (job.parent / "runs").exists(), "nothing was started"


@pytest.mark.thorough
def test_a_missing_folder_is_looked_for_beside_the_job_and_one_that_is_there_is_used(
    job: Path,
) -> None:
    keys = ("offload={optimizer: disk, dir: swap}", "--run-dir", "run")
    missing = zrun(job, *keys)
    assert missing.returncode == 3
    assert f"{job.parent}/swap: there is no such folder: make it, or name" in missing.stderr
    (job.parent / "swap").mkdir()
    done = zrun(job, *keys)
    assert done.returncode == 0, done.stderr
    assert f"disk: {job.parent}/swap (" in done.stderr
    assert list((job.parent / "swap").iterdir()) == [], "the look at it leaves nothing"


@pytest.mark.thorough
def test_a_rank_whose_disk_does_not_answer_is_named_with_it(job: Path) -> None:
    behaviour = json.dumps({"0": "wait_for_others", "1": "wait_for_disk"})
    done = zrun(
        job,
        *(f"model.args.behaviour={behaviour}", "limits.first_step_s=3", "--run-dir", "run"),
        "offload={optimizer: disk, dir: .}",
    )
    assert done.returncode == 6, done.stderr
    assert "no progress for 3 s (limits.first_step_s): rank 1 of 2 has waited" in done.stderr
    assert f" s for its disk ({job.parent}) in forward of step 1" in done.stderr
    assert "rank 0 waits in forward of step 1" in done.stderr
    report = json.loads((job.parent / "run" / "failure.json").read_text())
    assert (report["rank"], report["what_to_do"]) == (
        1,
        "check the disk or the host that it waits for; if it is only slow, raise "
        "limits.first_step_s",
    )
