"""`zrun train` from the shell to its exit code, with a worker that needs no torch."""

from __future__ import annotations

import json
import os
import pty
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, lines_of, wait_for

HERE = Path(__file__).parent

Behaviour = dict[str, str]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: fake\nmodel: {call: 'fake:model'}\ndata: fake:data\nsteps: 3\nbatch: 4\nslots: "
        "2\nlog: {every: 1}\n"
    )
    return path


def command(job: Path, behaviour: Behaviour, *options: str) -> dict[str, Any]:
    return {
        "args": [
            *(
                sys.executable,
                "-m",
                "zrun",
                "train",
                str(job),
                f"model.args.behaviour={json.dumps(behaviour)}",
            ),
            *("--worker", "fake_worker", "--run-dir", str(job.parent / "run"), *options),
        ],
        "env": os.environ | {"PYTHONPATH": str(HERE), "SECRET_TOKEN": "canary"},
        "cwd": job.parent,
        "text": True,
        "stdin": subprocess.DEVNULL,
    }


def zrun(job: Path, behaviour: Behaviour, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        **command(job, behaviour, *options), capture_output=True, timeout=PATIENCE_S
    )


@contextmanager
def started(
    job: Path, behaviour: Behaviour, ignored: signal.Signals | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A launcher that is running; whatever happens, it is gone afterwards."""
    settings = command(job, behaviour)
    if ignored is not None:
        settings["args"] = [
            "env",
            f"--ignore-signal={ignored.name.removeprefix('SIG')}",
            *settings["args"],
        ]
    process = subprocess.Popen(
        **settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def events(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def messages(run_dir: Path) -> list[str]:
    return [event["message"] for event in events(run_dir) if event["type"] == "log"]


def processes_of(run_dir: Path) -> list[int]:
    """Everything that was started for a run.

    The workers and their children carry its path in their environment.
    """
    mark = f"ZRUN_STORE={run_dir}/".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def both_hang(run_dir: Path) -> bool:
    return sum(message.startswith("hanging") for message in messages(run_dir)) == 2


def test_what_many_ranks_tell_is_recorded_in_one_event_of_a_step(job: Path) -> None:
    job.write_text(
        job.read_text().replace("batch: 4", "batch: 20").replace("slots: 2", "slots: 20")
    )
    together = {str(rank): "train_together" for rank in range(20)}
    done = zrun(job, together | {"13": "train_slowly"}, "--ui", "json")
    run = job.parent / "run"
    assert done.returncode == 0, done.stderr
    told = [event for event in events(run) if event["type"] in ("memory", "ranks")]
    assert [(event["rank"], event["step"]) for event in told if event["type"] == "memory"] == [
        (0, step) for step in (1, 2, 3)
    ]
    sums = [event for event in told if event["type"] == "ranks"]
    whole = [event for event in sums if event["told"] == 20]
    assert [event["step"] for event in whole] == [1, 2, 3]
    for event in whole:
        assert event["ranks"] == 20
        assert event["least"]["peak_rss_bytes"] == 2 << 20
        assert event["most"]["peak_rss_bytes"] == 9 << 30
        (worst,) = (each for each in event["worst"] if each["rank"] == 13)
        assert worst["split"] == {"forward": 0.9, "comm": 0.1}
    shown = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [event for event in shown if event["type"] == "ranks"] == sums
    assert "memories" not in {event["type"] for event in shown}


def test_a_run_that_ends_well(job: Path) -> None:
    done = zrun(job, {})
    run = job.parent / "run"
    assert done.returncode == 0, done.stderr
    assert "step 3/3 loss 1 lr 0.001" in done.stdout
    assert "3 steps in 0.1s (steps)" in done.stdout
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert "global 4 = micro 2 x accumulation 1 x 2 data-parallel ranks" in done.stderr
    assert "\njob: model fake:model, data fake:data, steps 3, slots 2, log.every 1\n" in done.stderr
    assert ", threads 1 (" in done.stderr
    assert f"\nrun: {run} (the whole job: job.yaml)\n" in done.stderr
    assert f"; all ranks: zrun logs {run}, or logs/ in that folder\n" in done.stderr
    kinds = [event["type"] for event in events(run) if event["rank"] == 0]
    assert "output" in kinds  # of its log, which is looked at now and then
    kinds = [kind for kind in kinds if kind != "output"]
    assert kinds == ["start", *["step", "memory"] * 3, "end"]
    assert "rank 0: rank 0 behaves: train\nrank 0: on stderr\n" in done.stdout
    assert (run / "logs" / "rank-1.log").read_text() == "rank 1 behaves: train\non stderr\n"
    assert (
        "micro: 2                      # auto: global 4 / 2 ranks" in (run / "job.yaml").read_text()
    )
    assert not (run / "failure.json").exists()
    assert processes_of(run) == []


@pytest.mark.thorough
def test_what_a_run_writes_is_private(job: Path) -> None:
    job.write_text(job.read_text() + "env: {SECRET_TOKEN: null, API_KEY: given, PLAIN: seen}\n")
    done = zrun(job, {"0": "show_environment"}, "--ui", "json")
    assert done.returncode == 0, done.stderr
    seen = json.loads(
        next(
            event["message"]
            for event in map(json.loads, done.stdout.splitlines())
            if "message" in event
        )
    )
    run = job.parent / "run"
    assert seen["SECRET_TOKEN"] == "canary"
    assert (seen["API_KEY"], seen["PLAIN"]) == ("given", "seen")
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_RANK"], seen["LOCAL_WORLD_SIZE"]) == (
        "0",
        "2",
        "0",
        "2",
    )
    assert seen["ZRUN_STORE"] == str(run / "store")
    assert int(seen["OMP_NUM_THREADS"]) >= 1
    assert seen["cwd"] == str(job.parent)
    assert seen["stdin"] == ""
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    for name in ("events.jsonl", "job.yaml", "plan.json", "spec.json"):
        path = run / name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, name
        if name != "events.jsonl":
            assert "canary" not in path.read_text()
            assert "given" not in path.read_text()


def test_the_users_exception_is_shown_once_and_last(job: Path) -> None:
    done = zrun(job, {"0": "lose_peer", "1": "fail_in_user_code"})
    run = job.parent / "run"
    assert done.returncode == 5
    assert done.stderr.count("a wrong turn") == 1
    assert "closed by peer" not in done.stderr
    assert "rank 1 of 2" in done.stderr
    assert f"log: {run}/logs/rank-1.log" in done.stderr.splitlines()[-2]
    failure = json.loads((run / "failure.json").read_text())
    assert (failure["rank"], failure["step"], failure["phase"], failure["kind"]) == (
        1,
        2,
        "forward",
        "user",
    )
    assert failure["last_lines"] == ["rank 1 behaves: fail_in_user_code", "on stderr"]


@pytest.mark.thorough
def test_a_workers_own_exit_code_passes_through(job: Path) -> None:
    done = zrun(job, {"0": "fail_numerically", "1": "hang"})
    assert done.returncode == 7
    assert "the loss is not finite" in done.stderr
    assert processes_of(job.parent / "run") == []


@pytest.mark.thorough
def test_a_killed_worker_is_named_by_its_signal(job: Path) -> None:
    done = zrun(job, {"0": "steps_then_hang", "1": "kill_itself"})
    assert done.returncode == 5
    assert "rank 1 of 2" in done.stderr
    assert "was killed by SIGKILL after step 1" in done.stderr
    assert "rank 1 behaves: kill_itself" in done.stderr  # the end of its log
    failure = json.loads((job.parent / "run" / "failure.json").read_text())
    assert (failure["signal"], failure["step"], failure["out_of_memory"]) == ("SIGKILL", 1, False)


def test_a_rank_that_leaves_early_is_a_failure(job: Path) -> None:
    done = zrun(job, {"0": "hang", "1": "leave_early"})
    assert done.returncode == 5
    assert "rank 1 of 2" in done.stderr
    assert "ended with status 0" in done.stderr
    assert processes_of(job.parent / "run") == []


def test_a_killed_launcher_leaves_no_process(job: Path) -> None:
    run = job.parent / "run"
    with started(job, {"0": "hang_with_helper", "1": "hang"}) as launcher:
        wait_for(lambda: both_hang(run))
        assert len(processes_of(run)) == 3
        launcher.kill()
        wait_for(lambda: not processes_of(run))


def test_a_killed_agent_leaves_no_worker_nor_what_it_started(job: Path) -> None:
    run = job.parent / "run"
    with started(job, {"0": "hang_with_helper", "1": "hang"}) as launcher:
        wait_for(lambda: both_hang(run))
        agent = int(
            Path(f"/proc/{min(processes_of(run))}/stat").read_text().rpartition(")")[2].split()[1]
        )
        os.kill(agent, signal.SIGKILL)
        assert launcher.wait(PATIENCE_S) == 6
        wait_for(lambda: not processes_of(run))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.at_most(1)
def test_a_signal_stops_the_workers(job: Path, number: signal.Signals) -> None:
    run = job.parent / "run"
    with started(job, {"0": "hang", "1": "hang"}) as launcher:
        wait_for(lambda: both_hang(run))
        launcher.send_signal(number)
        _, said = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 143, said
    assert f"{number.name}: finishing the step" in said
    assert processes_of(run) == []
    told = json.loads((run / "failure.json").read_text())
    assert (told["kind"], told["signal"], told["exit_code"]) == ("stopped", number.name, 143)


@pytest.mark.thorough
def test_patience_with_a_step_that_does_not_end_is_limited(job: Path) -> None:
    job.write_text(job.read_text() + "limits: {stop_s: 1}\n")
    with started(job, {"0": "will_not_finish", "1": "will_not_finish"}) as launcher:
        wait_for(lambda: both_hang(job.parent / "run"))
        launcher.send_signal(signal.SIGTERM)
        _, said = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 143, said
    assert "not finished after 1 s (limits.stop_s)" in said
    assert processes_of(job.parent / "run") == []


@pytest.mark.thorough
def test_a_closed_terminal_ends_the_run_in_order(job: Path) -> None:
    """The launcher leads a terminal's session; the terminal goes away."""
    run, settings = job.parent / "run", command(job, {"0": "hang", "1": "hang"})
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(settings["args"][0], settings["args"], settings["env"])
    wait_for(lambda: both_hang(run))
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 143
    assert processes_of(run) == []
    assert json.loads((run / "failure.json").read_text())["signal"] == "SIGHUP"


@pytest.mark.thorough
def test_nohup_outlives_the_terminal(job: Path) -> None:
    run = job.parent / "run"
    with started(job, {"0": "hang", "1": "hang"}, ignored=signal.SIGHUP) as launcher:
        wait_for(lambda: both_hang(run))
        launcher.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert launcher.poll() is None
        assert len(processes_of(run)) == 2
    wait_for(lambda: not processes_of(run))


@pytest.mark.thorough
def test_a_second_interrupt_ends_what_does_not_listen(job: Path) -> None:
    run = job.parent / "run"
    job.write_text(job.read_text() + "limits: {stop_s: 3600}\n")
    with started(job, {"0": "hang_with_helper", "1": "will_not_finish"}) as launcher:
        wait_for(lambda: both_hang(run))
        for says in ("SIGINT: finishing the step", "stopping the workers"):
            launcher.send_signal(signal.SIGINT)
            lines_of(launcher, says)
        assert launcher.wait(PATIENCE_S) == 130
        assert processes_of(run) == []


def test_a_run_directory_serves_one_run(job: Path, tmp_path: Path) -> None:
    """Two launchers at once: each its own directory, or a line that names the holder.

    Later, nothing is overwritten.
    """
    run = job.parent / "run"
    with started(job, {"0": "hang", "1": "hang"}) as first:
        wait_for(lambda: both_hang(run))
        same = zrun(job, {})
        assert same.returncode == 2
        assert f"is in use by the zrun process {first.pid}" in same.stderr
        other = zrun(job, {}, "--run-dir", str(tmp_path / "other"))
        assert other.returncode == 0, other.stderr
        assert len(processes_of(run)) == 2
    wait_for(lambda: not processes_of(run))
    later = zrun(job, {})
    assert later.returncode == 2
    assert "holds an earlier run" in later.stderr


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("batch.global=5",), 2, "do not divide over 2"),
        (("device=cuda",), 3, "no usable GPU"),
        (
            ("env.NOT_SET_ANYWHERE=null",),
            2,
            "NOT_SET_ANYWHERE: null takes the value from the shell",
        ),
        (("zero.stag=1",), 2, "stag"),
        (("--run-dir", "/proc/nowhere"), 2, "choose another with --run-dir"),
    ],
)
@pytest.mark.at_most(2)
def test_mistakes_cost_no_worker(
    job: Path, options: tuple[str, ...], code: int, words: str
) -> None:
    done = zrun(job, {}, *options)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (job.parent / "run").exists()


def test_a_dry_run_starts_nothing(job: Path) -> None:
    done = zrun(job, {}, "--dry-run", "--slots", "4")
    assert done.returncode == 0, done.stderr
    assert "4 data-parallel ranks" in done.stderr
    assert not (job.parent / "run").exists()
