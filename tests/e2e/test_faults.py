"""Ranks that hang, crash, leave or are signalled, in the real runtime.

Found, named, and nothing survives.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, lines_of, wait_for

WILD = Path(__file__).with_name("wild.py")
HANG_S = 3.0


def command(folder: Path, fault: str = "none", **more: Any) -> list[str]:
    shutil.copy(WILD, folder)
    args = {"fault": fault, **more.pop("args", {})}
    keys = {
        "name": "wild",
        "model": {"call": "wild.py:Net", "args": args},
        "data": "wild.py:data",
        "steps": 6,
        "batch": 8,
        "slots": 2,
        "device": "cpu",
        "threads": 1,
        "log": {"every": 1},
        "limits": {"hang_s": 600, "stop_s": 600, **more.pop("limits", {})},
        **more,
    }
    (folder / "job.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items())
    )
    return [sys.executable, "-m", "zrun", "train", "job.yaml", "--run-dir", "run", "--ui", "plain"]


def zrun(folder: Path, fault: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, fault, **more),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def failure(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "failure.json").read_text())
    return found


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "run" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["type"] == kind]


def workers(folder: Path) -> dict[int, int]:
    """Pids of the run's workers by rank."""
    mark = f"ZRUN_STORE={folder / 'run'}/".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            variables = (
                (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            )
        except OSError:
            continue
        if any(variable.startswith(mark) for variable in variables):
            rank = next(v for v in variables if v.startswith(b"RANK="))
            found[int(rank.removeprefix(b"RANK="))] = int(entry.name)
    return found


@pytest.mark.parametrize(
    ("fault", "stage", "says", "python", "waits_in"),
    [
        (
            "stop",
            0,
            "cpu) is stopped by a signal or a debugger",
            "in <lambda>",
            "all_reduce",
        ),
        (
            "hold the gil",
            3,
            "cpu) is stuck in forward of step 3",
            "in hold_the_gil",
            "all_gather",
        ),
    ],
)
@pytest.mark.thorough
def test_a_rank_that_no_longer_moves_is_found_from_outside(
    tmp_path, fault, stage, says, python, waits_in
):
    done = zrun(tmp_path, fault, zero=stage, limits={"hang_s": HANG_S})
    assert done.returncode == 6, done.stderr
    report = failure(tmp_path)
    assert (report["rank"], report["step"], report["phase"], report["kind"]) == (
        1,
        3,
        "forward",
        "hang",
    )
    assert f"no progress for {HANG_S:g} s (limits.hang_s): rank 1 of 2 (" in report["message"]
    assert [told["rank"] for told in report["ranks"]] == [0, 1]
    assert report["ranks"][0]["does"] == "waits"
    assert waits_in in report["ranks"][0]["last"]
    assert report["ranks"][1]["does"] == ("is stopped" if fault == "stop" else "runs")
    assert "wild.py" in report["traceback"]
    assert says in done.stderr
    assert python in done.stderr
    for rank in range(2):
        assert (
            "most recent call first"
            in (tmp_path / "run" / "stacks" / f"rank-{rank}.txt").read_text()
        )
    assert workers(tmp_path) == {}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("crash", "was killed by SIGSEGV after step"),
        ("leave", ", before the end of training"),
        ("exit", "SystemExit"),
    ],
)
@pytest.mark.at_most(1)
def test_a_rank_that_ends_is_named(tmp_path, fault, words):
    done = zrun(tmp_path, fault)
    assert done.returncode == 5, done.stderr
    assert words in done.stderr
    assert "rank 1 of 2" in done.stderr
    assert failure(tmp_path)["rank"] == 1
    if fault == "crash":
        assert (
            "Fatal Python error: Segmentation fault"
            in (tmp_path / "run" / "logs" / "rank-1.log").read_text()
        )


@pytest.mark.thorough
def test_numbers_that_stay_wrong_end_the_run_with_a_name(tmp_path):
    done = zrun(tmp_path, "nan", precision="bf16", zero=2, checkpoint={"every": 100})
    assert done.returncode == 7, done.stderr
    assert (
        "step 3 was skipped on all ranks: the gradient of out.weight (layer out) is nan"
        in done.stdout
    )
    assert (
        "3 steps in a row were skipped: the gradient of out.weight (layer out) is nan on rank 1 "
        in done.stderr
    )
    assert "on rank 1 (indices 36-39 of the dataset)" in done.stderr
    report = failure(tmp_path)
    assert (report["exit_code"], report["step"], report["kind"]) == (7, 5, "zrun")
    assert "the last good parameters are saved as step 5" in done.stderr
    assert [event["reason"] for event in events(tmp_path, "save")] == ["numeric"]
    assert report["resume"] == "zrun train job.yaml --run-dir run --resume auto"
    assert [event["skipped"] for event in events(tmp_path, "step")] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert [event["skips"] for event in events(tmp_path, "step")] == [0, 0, 1, 2, 3]


@pytest.mark.thorough
def test_batches_without_memory_are_dropped_and_the_third_in_a_row_is_the_last(tmp_path):
    done = zrun(tmp_path, "memory", zero=2, guards={"on_oom": "skip"})
    assert done.returncode == 5, done.stderr
    for step in (3, 4):
        assert f"warning (rank 1): step {step}: forward failed in Net at " in done.stdout
    assert ', "memory": lambda: torch.empty(1 << 50),: out of memory: ' in done.stdout
    assert [event["skipped"] for event in events(tmp_path, "step")] == [False, False, True, True]
    assert "What holds most:" in done.stderr
    assert "Python, torch and what else the process held before it trained" in done.stderr
    assert "batch.micro: 2  # activations halve, the result stays" in done.stderr
    assert (failure(tmp_path)["type"], failure(tmp_path)["step"]) == ("OutOfMemoryError", 5)


@pytest.mark.thorough
def test_a_flipped_bit_of_a_replica_ends_the_run(tmp_path):
    done = zrun(tmp_path, "none", hooks={"on_step": "wild.py:flip"}, guards={"replica_every": 2})
    assert done.returncode == 10, done.stderr
    assert "step 4: replicas diverged: rank 1 (" in done.stderr
    assert "cpu) has another parameter blocks.1.weight than the other ranks" in done.stderr
    assert "found by rank " in done.stderr, "all ranks end with it"
    assert failure(tmp_path)["exit_code"] == 10


@contextmanager
def training(folder: Path, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A launcher whose workers train, slowly and without end."""
    line = command(folder, **{"steps": 100_000, "args": {"pause": 0.02}, **more})
    process = subprocess.Popen(
        line,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: len(events(folder, "step")) > 2 or process.poll() is not None)
        assert process.poll() is None, process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.thorough
def test_a_disk_that_gives_back_other_bytes_ends_the_run(tmp_path):
    """All parameters are in rank 0's shard; rank 1 has nothing to update, and trains along."""
    (tmp_path / "swap").mkdir()
    offload = {"optimizer": "disk", "grad": "disk", "param": "disk", "dir": "swap"}
    done = zrun(tmp_path, "damage the disk", zero=3, offload=offload, args={"rank": 0})
    assert done.returncode == 5, done.stderr
    assert len(events(tmp_path, "step")) >= 2
    assert "the disk returned other bytes than were written: the " in done.stderr
    assert f"of the file of this rank in {tmp_path}/swap; look at the disk" in done.stderr
    assert failure(tmp_path)["rank"] == 0
    assert failure(tmp_path)["type"] == "OffloadError"
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "swap").iterdir()) == []


def test_one_signal_lets_all_ranks_finish_the_same_step(tmp_path):
    with training(tmp_path) as launcher:
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 130, said
    assert "SIGINT: finishing the step" in said
    logs = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    last = events(tmp_path, "step")[-1]["step"]
    ends = [
        [line for line in log.splitlines() if not line.startswith("[rank")] for log in logs
    ]  # torch names the rank
    assert ends[0] == ends[1]
    assert f"stopped after step {last}" in ends[0][-1]
    assert workers(tmp_path) == {}


@pytest.mark.thorough
def test_a_signal_to_one_worker_stops_them_all(tmp_path):
    with training(tmp_path) as launcher:
        os.kill(workers(tmp_path)[1], signal.SIGTERM)
        _, said = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 143, said
    assert [event["rank"] for event in events(tmp_path, "stop")] == [1]
    assert "stopped after step" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()


@pytest.mark.thorough
def test_a_scheduler_that_signals_every_process_has_the_step_saved(tmp_path):
    with training(tmp_path, checkpoint={"every": 100_000}) as launcher:
        ranks = workers(tmp_path)
        agent = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in (agent, *ranks.values(), launcher.pid):
            os.kill(pid, signal.SIGTERM)
        _, said = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 75, said
    last = events(tmp_path, "step")[-1]["step"]
    assert [(event["step"], event["reason"]) for event in events(tmp_path, "save")] == [
        (last, "stopped")
    ]
    assert (
        f"stopped after step {last}, saved; resume: zrun train job.yaml --run-dir run --resume auto"
        in said
    )
    told = failure(tmp_path)
    assert (told["exit_code"], told["kind"], told["saved_step"]) == (75, "stopped", last)
    assert told["resume"] == "zrun train job.yaml --run-dir run --resume auto"
    assert workers(tmp_path) == {}


@pytest.mark.thorough
def test_more_presses_do_not_wait_for_the_step(tmp_path):
    with training(tmp_path, args={"pause": 0.02, "fault": "spin", "step": 6}) as launcher:
        wait_for(lambda: events(tmp_path, "step")[-1]["step"] == 5)
        for says in ("SIGINT: finishing the step", "stopping the workers"):
            launcher.send_signal(signal.SIGINT)
            lines_of(launcher, says)
        launcher.send_signal(signal.SIGINT)  # may find nothing left to kill
        _, said = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 130, said
    assert workers(tmp_path) == {}


@pytest.mark.parametrize(("fault", "code"), [("none", 0), ("crash", 5)])
@pytest.mark.thorough
def test_loader_processes_leave_no_temporary_files(tmp_path, monkeypatch, fault, code):
    """Their sockets lie in the folder of the agent, however their rank ends."""
    with tempfile.TemporaryDirectory() as folder:  # a short name
        monkeypatch.setenv("TMPDIR", folder)
        done = zrun(tmp_path, fault, data={"call": "wild.py:data", "workers": 1})
        assert done.returncode == code, done.stderr
        left = [path for path in Path(folder).iterdir() if "torchinductor" not in path.name]
        assert left == []
