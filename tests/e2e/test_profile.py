"""`zrun profile`, from the shell: a run that goes on is traced, and trains what it would."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from test_resume_train import ZRUN, losses, make, runs, zrun
from waiting import PATIENCE_S, wait_for


@pytest.mark.thorough
def test_a_profile_on_request_changes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "traced").mkdir()
    whole, folder = make(tmp_path / "whole"), make(tmp_path / "traced")
    assert zrun(whole).returncode == 0
    command = [*ZRUN, "train", "job.yaml", "--ui", "plain"]
    environment = os.environ | {"ASKED_AFTER": "4"}
    ask = [*ZRUN, "profile", "small", "--steps", "2", "--ranks", "0,1"]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        wait_for(
            lambda: any(
                4 in losses(record.parent) for record in folder.glob("runs/small/*/events.jsonl")
            )
        )
        would, absent, done = (
            subprocess.run(
                [*ask, *options], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S
            )
            for options in (["--dry-run"], ["--ranks", "7"], ["--json"])
        )
        shown, told = launcher.communicate(timeout=PATIENCE_S)
    (expected,), (run,) = runs(whole), runs(folder)
    assert would.stdout == (
        f"would ask process {launcher.pid} of run {run.name} to trace 2 steps on rank 0, 1\n"
    )
    assert (absent.returncode, "there is no rank 7" in absent.stderr) == (2, True)
    assert done.returncode == 0, done.stderr
    events = json.loads(done.stdout)
    folder_of_traces = run / "profile" / "steps-6-7"
    assert [(event["rank"], event["steps"], event["path"]) for event in events] == [
        (rank, [6, 7], str(folder_of_traces / f"rank-{rank}.json.gz")) for rank in (0, 1)
    ]
    assert sorted(path.name for path in folder_of_traces.iterdir()) == [
        "rank-0.json.gz",
        "rank-1.json.gz",
    ]
    assert launcher.returncode == 0, told
    assert told.count("zrun profile: 2 steps, traced on rank 0, 1\n") == 1
    assert "profile of rank 0, steps 6 to 7 (" in shown
    assert "\nprofile " in shown[shown.index("\ndone ") :]  # in the report
    assert losses(run) == losses(expected)
    for rank in (0, 1):  # where torch's profiler would say that it begins and ends
        assert "profiler" not in (run / "logs" / f"rank-{rank}.log").read_text()
