"""Which runs there are and how they are, from files alone; who holds one; what its logs look like
on a terminal.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from zrun.agent.post_mortem import report_killed_launcher
from zrun.commands.logs import logs as logs_command
from zrun.launch import stop_request
from zrun.runs import listing, run_lock
from zrun.runs.listing import (
    RunStatus,
    RunSummary,
    find_run,
    job_name,
    list_runs,
    read_run,
    reference,
)
from zrun.runs.run_lock import LockHolder, RunLock, is_held, last_holder
from zrun.runs.rundir import EarlierRun, RunDir
from zrun.system.processes import Process
from zrun.system.tail_file import as_text
from zrun.watch import log_view
from zrun.watch.log_view import LogSource, Tail, shown, sources
from zrun.watch.runs_table import remarks, runs_table
from zrun_core.errors import HangError, JobError, PreflightError, SaveError
from zrun_core.spine.events import encode
from zrun_core.spine.flight_page import read_first_progress
from zrun_core.spine.flight_recorder import FlightRecorder

PLACES = [{"rank": rank, "host": f"n{rank // 2}"} for rank in range(4)]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, on a machine where nobody else trains."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(listing, "held_here", list)


def event(kind: str, time: float, rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"type": kind, "time": time, "rank": rank, **more}


def make(
    job: str, run_id: str, code: int | None = 0, events: list[dict[str, Any]] | None = None
) -> Path:
    """A run directory as a launcher leaves it that ends with `code`; None: that was killed."""
    path = Path("runs", job, run_id).absolute()
    with RunDir.claim(job, path) as rundir:
        rundir.write_job(f"# a job\nname: {job}  # file\nsteps: 9\n")
        (path / "plan.json").write_text(json.dumps({"ranks": PLACES}))
        for each in events or []:
            rundir.append([encode(each)])
        rundir.exit_code = code
    return path


def started_at(path: Path, time: float) -> None:
    """Its launcher took the lock at that time."""
    record = json.loads((path / run_lock.LOCK).read_text())
    (path / run_lock.LOCK).write_text(json.dumps(record | {"time": time}))


def test_a_run_that_finished() -> None:
    path = make(
        "gpt",
        "20260101-000000-aaaa",
        0,
        [
            event("start", 100.0, job="gpt", total_steps=9, world_size=4),
            event("step", 101.0, step=1),
            event("memory", 900.0, rank=3, step=1),
            event("step", 107.5, step=9),
            event("end", 108.0, step=9),
            event("memory", 901.0, rank=3, step=9),
        ],
    )
    run = read_run(path)
    assert (run.state, run.exit_code, run.job, run.step, run.total_steps) == (
        RunStatus.FINISHED,
        0,
        "gpt",
        9,
        9,
    )
    assert run.seconds == 8.0  # by rank 0's clock, whatever that of rank 3 says
    assert (run.hosts, run.ranks) == (("n0", "n1"), 4)
    assert run.holder is not None
    assert run.started == run.holder.time > 0


def test_the_time_of_a_run_that_goes_on_is_that_of_all_its_steps() -> None:
    told = {"step": 200, "path": "/x", "seconds": 60.0, "first_loss": 5.5}
    path = make(
        "gpt", "a", 0, [event("start", 100.0, resumed=told), event("step", 102.0, step=220)]
    )
    assert (read_run(path).step, read_run(path).seconds) == (220, 62.0)


def test_a_run_says_its_loss_and_what_is_left_of_it() -> None:
    path = Path("runs", "gpt", "a")
    told = {"step": 200, "path": "/x"}
    with RunDir.claim("gpt", path) as rundir:
        rundir.append([encode(event("start", 100.0, total_steps=300, resumed=told))])
        assert (read_run(path).loss, read_run(path).left_s) == (None, None)
        rundir.append([encode(event("step", 110.0, step=220, loss=2.5))])
        assert (read_run(path).loss, read_run(path).left_s) == (2.5, 40.0)  # 0.5 s each
        lines = table([read_run(path)])
        assert lines[0].split()[3:8] == ["step", "loss", "started", "time", "left"]
        assert lines[1].split()[3:5] == ["220/300", "2.5"]
        assert "40s" in lines[1].split()
        rundir.append([encode(event("step", 111.0, step=221, loss=float("nan")))])
        assert read_run(path).loss is None
        rundir.append([encode(event("step", 112.0, step=222, loss=None))])
        assert read_run(path).to_json()["loss"] is None
        rundir.exit_code = 0
    assert read_run(path).left_s is None, "it has ended"
    assert "left" not in table([read_run(path)])[0].split()


def table(found: list[RunSummary]) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=100).print(runs_table(found))
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (0, RunStatus.FINISHED),
        (5, RunStatus.FAILED),
        (75, RunStatus.STOPPED),
        (130, RunStatus.STOPPED),
        (143, RunStatus.STOPPED),
        (None, RunStatus.VANISHED),
        (1, RunStatus.FAILED),
    ],
)
def test_states(code: int | None, state: RunStatus) -> None:
    run = read_run(make("gpt", "a", code))
    assert (run.state, run.exit_code) == (state, code)


def test_the_lock_says_that_it_runs() -> None:
    path = make("gpt", "a", 5)
    with RunDir.claim("gpt", path, earlier=EarlierRun.CONTINUE):
        assert read_run(path).state is RunStatus.RUNNING
        assert read_run(path).exit_code is None
    assert read_run(path).state is RunStatus.VANISHED  # the new one did not say how it ended
    (path / "failure.json").write_text('{"message": "no rest", "exit_code": 4}')
    assert (read_run(path).state, read_run(path).exit_code, read_run(path).headline) == (
        RunStatus.FAILED,
        4,
        "no rest",
    )


def test_between_two_attempts_a_run_still_runs() -> None:
    path = Path("runs", "gpt", "a")
    with RunDir.claim("gpt", path) as rundir:
        rundir.exit_code = 5
        held = rundir.keep_lock()
    assert read_run(path).state is RunStatus.RUNNING
    with pytest.raises(JobError, match="in use"):
        RunDir.claim("gpt", path, earlier=EarlierRun.CONTINUE)
    with RunDir.claim("gpt", path, earlier=EarlierRun.CONTINUE, lock=held) as rundir:
        rundir.exit_code = 0
        assert (path / "attempts" / "1" / "exit.json").exists()
    assert read_run(path).state is RunStatus.FINISHED
    assert not is_held(path)


def test_an_error_is_an_end_too() -> None:
    for number, (error, code) in enumerate(
        [(SaveError("full"), 8), (KeyboardInterrupt(), 130), (ValueError(), 1)]
    ):
        path = Path("runs", "gpt", str(number))
        with pytest.raises(type(error)), RunDir.claim("gpt", path):
            raise error
        assert read_run(path).exit_code == code
        told = json.loads((path / "failure.json").read_text())
        kind = {SaveError: "zrun", KeyboardInterrupt: "stopped", ValueError: "bug"}[type(error)]
        assert (told["exit_code"], told["kind"], told["message"]) == (
            code,
            kind,
            str(error) or type(error).__name__,
        )
        assert ("traceback" in told) == (kind == "bug")


def files_of(path: Path) -> dict[str, str]:
    return {
        name: (path / name).read_text()
        for name in ("failure.json", "exit.json")
        if (path / name).exists()
    }


def test_for_a_launcher_that_was_killed_the_agent_speaks() -> None:
    path = make("gpt", "a", None, [event("start", 1.0), event("step", 2.0, step=4)])
    report_killed_launcher(path)
    run, told = read_run(path), json.loads((path / "failure.json").read_text())
    assert (run.state, run.exit_code, run.step) == (RunStatus.VANISHED, None, 4)
    assert (
        run.headline
        == f"the launcher, process {os.getpid()} on {os.uname().nodename}, was killed after step 4"
    )
    assert (told["kind"], told["step"], told["exit_code"]) == ("launcher", 4, None)
    assert json.loads((path / "exit.json").read_text())["exit_code"] is None
    before = files_of(path)
    report_killed_launcher(path)
    assert files_of(path) == before
    with RunDir.claim("gpt", path, earlier=EarlierRun.CONTINUE):
        assert files_of(path) == {}
        assert files_of(path / "attempts" / "1") == before


def test_nobody_speaks_for_a_launcher_that_lives_that_spoke_or_that_is_elsewhere() -> None:
    with RunDir.claim("gpt", Path("runs", "gpt", "a")) as rundir:
        report_killed_launcher(rundir.path)
        assert files_of(rundir.path) == {}
    ended = make("gpt", "b", 0)
    before = files_of(ended)
    report_killed_launcher(ended)
    assert files_of(ended) == before
    far = make("gpt", "c", None)
    (far / ".lock").write_text(
        json.dumps({"host": "far", "boot": "x", "pid": 1, "started": 1, "time": 1.0, "events": 0})
    )
    report_killed_launcher(far)
    assert files_of(far) == {}


def test_what_a_killed_launcher_had_told_stays() -> None:
    path = make("gpt", "a", None)
    (path / "failure.json").write_text('{"message": "no rest", "exit_code": 4}')
    report_killed_launcher(path)
    assert (read_run(path).state, read_run(path).exit_code, read_run(path).headline) == (
        RunStatus.FAILED,
        4,
        "no rest",
    )


def test_the_headline() -> None:
    path = make("gpt", "a", 5)
    (path / "failure.json").write_text(
        json.dumps({"rank": 3, "kind": "user", "message": "a wrong turn\nand more"})
    )
    assert read_run(path).headline == "rank 3: a wrong turn"
    (path / "failure.json").write_text(
        json.dumps({"rank": 3, "kind": "hang", "message": "no progress: rank 3"})
    )
    assert read_run(path).headline == "no progress: rank 3"


def test_a_run_that_goes_on_counts_from_its_own_start() -> None:
    """The record of the attempt before, which had ended, says nothing about this one."""
    first = [
        event("start", 1.0, total_steps=5),
        event("step", 2.0, step=5),
        event("end", 3.0, step=5),
    ]
    path = make("gpt", "a", 0, first)
    with RunDir.claim("gpt", path, earlier=EarlierRun.CONTINUE) as rundir:
        assert (read_run(path).step, read_run(path).total_steps, read_run(path).seconds) == (
            None,
            None,
            None,
        )
        rundir.append(
            [encode(event("start", 50.0, total_steps=20, resumed={"step": 5, "path": "x"}))]
        )
        assert (read_run(path).step, read_run(path).total_steps) == (5, 20)
        rundir.append([encode(event("step", 57.0, step=6))])
        assert (read_run(path).step, read_run(path).seconds) == (6, 7.0)
    assert read_run(path).state is RunStatus.VANISHED


def test_the_newest_step_is_found_behind_much_else(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [event("memory", 3.0, rank=1, step=1, filler="x" * 90) for _ in range(400)]
    path = make("gpt", "a", 0, [event("start", 1.0), event("step", 2.0, step=7), *many])
    for size in (64, 1000, 1 << 16):
        monkeypatch.setattr(listing, "_BLOCK_BYTES", size)
        assert read_run(path).step == 7, size


def test_damage_does_no_harm() -> None:
    path = make("gpt", "a", 0, [event("start", 1.0), event("step", 2.0, step=3)])
    with (path / "events.jsonl").open("ab") as file:
        file.write(b'\x00\xff[1]\n{"type": "step", "ti')
    for name in ("exit.json", "plan.json", "job.yaml"):
        (path / name).write_bytes(b"\x00\xff{")
    (path / run_lock.LOCK).write_text('{"host": 1')
    run = read_run(path)
    assert (run.step, run.state, run.job, run.ranks, run.holder) == (
        3,
        RunStatus.VANISHED,
        "gpt",
        None,
        None,
    )


def test_what_is_listed() -> None:
    old, new = make("gpt", "a"), make("bert", "b")
    other = make("gpt", "c")
    started_at(old, 1000.0)
    started_at(new, 2000.0)
    started_at(other, 1500.0)
    Path("runs", "gpt", "no-run").mkdir()
    found, others = list_runs(1200.0)
    assert ([run.run_id for run in found], others) == (["b", "c"], 1)
    assert [run.run_id for run in list_runs(None)[0]] == ["b", "c", "a"]
    with RunDir.claim("gpt", old, earlier=EarlierRun.CONTINUE):
        assert [run.run_id for run in list_runs(9e9)[0]] == ["a"]


def test_what_runs_elsewhere_on_this_machine_is_listed_too(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "held_here", run_lock.held_here)
    path = tmp_path_factory.mktemp("elsewhere") / "a run"
    with RunDir.claim("gpt", path):
        assert path in [run.path for run in list_runs(None)[0]]
        assert find_run("a run") == path
        assert reference(path) == f"'{path}'"
        here = make("gpt", "a run too")
        assert (
            find_run("a run") == here
        )  # what lies here comes first, even if only its beginning is given
        (path / "job.yaml").write_text("name: gpt")
        assert find_run("gpt", running=True) == here
    assert path not in [run.path for run in list_runs(None)[0]]


def test_a_run_is_found_by_path_id_beginning_and_job() -> None:
    old, new = make("gpt", "20260101-000000-aaaa"), make("gpt", "20260102-000000-bbbb")
    started_at(old, 1000.0)
    for text in (str(old), "runs/gpt/20260101-000000-aaaa/", "20260101-000000-aaaa", "20260101"):
        assert find_run(text) == old, text
    assert find_run("gpt") == new
    assert reference(new) == new.name
    assert job_name(new) == "gpt"


def test_of_the_runs_of_a_job_the_one_that_runs_is_meant() -> None:
    old, new = make("gpt", "a"), make("gpt", "b")
    started_at(old, 1000.0)
    with RunDir.claim("gpt", old, earlier=EarlierRun.CONTINUE) as rundir:
        rundir.write_job("name: gpt\n")
        started_at(old, 1000.0)
        assert find_run("gpt", running=True) == old
        with RunDir.claim("gpt", new, earlier=EarlierRun.CONTINUE) as other:
            other.write_job("name: gpt\n")
            with pytest.raises(JobError, match="any of 2 runs: name one\n  b  gpt"):
                find_run("gpt", running=True)
        assert find_run("gpt") == new


def test_what_is_not_found_is_answered_with_what_was_meant() -> None:
    make("gpt", "20260101-000000-aaaa")
    make("gpt", "20260101-000000-bbbb")
    for text, said in {
        "gtp": "did you mean gpt?",
        "20260101-000000-aaab": "did you mean 20260101-000000-aaaa?",
        "2026": "any of 2 runs: write more of it",
        "runs/gpt": "such as .*/runs/gpt/20260101-000000-bbbb",
        "runs/bert": "no such folder",
        "-": "no run and no job",
        "~nobody.at.all": "no run and no job",
        "~nobody.at.all/run": "no such folder",
        "x/" + "y" * 5000: "no such folder",
        "": "no run and no job",
    }.items():
        with pytest.raises(JobError, match=said):
            find_run(text)


@given(st.text(max_size=30))
def test_no_name_does_harm(text: str) -> None:
    with pytest.raises(JobError):
        find_run(text + "?nothing is called so")


def test_the_table() -> None:
    failed, vanished = (
        make("gpt", "20260101-000000-aaaa", 5),
        make("gpt", "20260101-000000-bbbb", None),
    )
    (failed / "failure.json").write_text('{"message": "a \\u001b[2J [red]wrong[/red] turn"}')
    out = io.StringIO()
    console = Console(file=out, width=80)
    found = [read_run(failed), read_run(vanished)]
    console.print(runs_table(found))
    lines = out.getvalue().splitlines()
    assert lines[1].split()[:3] == ["20260101-000000-aaaa", "gpt", "failed"]
    assert lines[1].rstrip().endswith("4 on n0, n1")
    assert remarks(found)[0] == "20260101-000000-aaaa: a  [red]wrong[/red] turn"
    assert f"process {os.getpid()}, was killed" in remarks(found)[1]


def test_who_holds_the_lock(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    me = last_holder(tmp_path)
    assert me is not None
    assert me.process == Process.find(os.getpid())
    assert is_held(tmp_path)
    with pytest.raises(BlockingIOError):
        RunLock(tmp_path)
    held.starts_at(12345)
    assert last_holder(tmp_path) == held.holder
    held.close()
    assert not is_held(tmp_path)
    assert tmp_path not in run_lock.held_here()


def test_whoever_only_looks_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunLock(tmp_path).close()
    with (tmp_path / run_lock.LOCK).open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(run_lock.time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
        RunLock(tmp_path).close()


def test_a_holder_is_told_from_later_and_distant_processes() -> None:
    me = LockHolder.me()
    assert LockHolder("", me.pid).process is not None  # as earlier versions wrote it
    assert LockHolder(me.host, me.pid, me.boot, me.started + 1).process is None
    assert LockHolder(me.host, me.pid, "another boot", me.started).process is None
    assert str(LockHolder("n7", 12, "another boot", 1)) == "process 12 on n7"


def run_held_by(holder: LockHolder | None) -> RunSummary:
    return RunSummary(
        Path("/runs/gpt/a"),
        "gpt",
        RunStatus.RUNNING,
        holder,
        None,
        "",
        0.0,
        None,
        None,
        None,
        (),
        None,
    )


@pytest.mark.parametrize(
    ("holder", "said"),
    [
        (
            LockHolder("n7", 12, "another boot", 1),
            "on n7 .process 12.: stop it there, with ssh n7 zrun stop /runs/gpt/a",
        ),
        (
            LockHolder.me().__class__("here", os.getpid(), LockHolder.me().boot, 1),
            "cannot be seen from here",
        ),
        (None, "try again"),
    ],
)
def test_a_launcher_that_cannot_be_reached(holder: LockHolder | None, said: str) -> None:
    with pytest.raises(PreflightError, match=said):
        stop_request.stop(run_held_by(holder), now=False, timeout_s=0)


def test_a_launcher_that_stands_still_is_named() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = Process.find(process.pid)
        assert found is not None
        me = LockHolder.me()
        run = run_held_by(LockHolder(me.host, process.pid, me.boot, found.started))
        process.send_signal(19)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        with pytest.raises(HangError, match=f"kill -CONT {process.pid}"):
            stop_request.stop(run, now=False, timeout_s=0)
        process.send_signal(18)
        assert process.wait() == -15  # what had been sent
        stopping_again = run_held_by(LockHolder(me.host, process.pid, me.boot, found.started))
        with pytest.raises(PreflightError):
            stop_request.stop(stopping_again, now=False, timeout_s=0)


def test_patience_is_that_of_the_job(tmp_path: Path) -> None:
    assert stop_request.limits_of(tmp_path).stop_s == 30
    (tmp_path / "spec.json").write_text('{"job": {"limits": {"stop_s": 100}}}')
    assert stop_request.limits_of(tmp_path).stop_s == 100
    (tmp_path / "spec.json").write_text("[]")
    assert stop_request.limits_of(tmp_path).stop_s == 30


def test_whoever_waits_for_a_launcher_waits_for_its_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after 500 s of saving; the limits are 30 and 1800 s, and 30 more."""
    board = FlightRecorder(tmp_path / "board", 0, range(2), 2)
    now = 0.0

    class Poll:
        def register(self, descriptor: int, event: int) -> None: ...

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            nonlocal now
            now += timeout_ms / 1000
            return [(0, 1)] if now > 500 else []

    monkeypatch.setattr(stop_request.select, "poll", Poll)
    monkeypatch.setattr(stop_request.time, "monotonic", lambda: now)
    assert not stop_request.wait_for_exit(0, tmp_path, None)
    assert 60 <= now < 65
    now = 0.0
    board.phase("save")
    assert stop_request.wait_for_exit(0, tmp_path, None)
    now = 0.0
    assert not stop_request.wait_for_exit(0, tmp_path, 100.0), "somebody has said how long to wait"


def test_a_board_is_looked_at_from_outside(tmp_path: Path) -> None:
    assert read_first_progress(tmp_path / "board") is None
    (tmp_path / "board").write_bytes(b"half")
    assert read_first_progress(tmp_path / "board") is None
    (tmp_path / "board").unlink()
    board = FlightRecorder(tmp_path / "board", 0, range(2), 2)
    board.step(7)
    board.phase("hook")
    before = (tmp_path / "board").stat().st_size
    assert read_first_progress(tmp_path / "board") == board.state(0)
    assert (tmp_path / "board").stat().st_size == before


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"plain \xc3\xa9", "plain é"),
        (b"\x1b[1;31mred\x1b[0m", "red"),
        (b"\x1b]0;title\x07\x1b[2J\x9b3J", "^[]0;title^G\\x9b3J"),
        ("\u009b2J\u202eoverridden\u2028".encode(), "\\u009b2J\\u202eoverridden\\u2028"),
        (b"\x00\x7f\xff", "^@^?\\xff"),
        (b"10%\r20%\r30%\r", "30%"),
        (b"a\tb", "a       b"),
    ],
)
def test_lines_do_a_terminal_no_harm(line: bytes, text: str) -> None:
    assert as_text(line) == text


@given(st.binary(max_size=200))
def test_every_line_is_printable(line: bytes) -> None:
    assert as_text(line).isprintable()


@given(st.lists(st.binary(max_size=6), max_size=12), st.integers(0, 5), st.integers(1, 9))
def test_lines_come_whole_however_the_file_grows(
    tmp_path_factory: Any, parts: list[bytes], last: int, size: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    data = b"".join(part.replace(b"\r", b"") + b"\n" for part in parts)
    path.write_bytes(b"")
    tail, found = Tail(LogSource("log", path)), []
    with path.open("ab", buffering=0) as file:
        for start in range(0, len(data), size):
            file.write(data[start : start + size])
            found += list(tail.lines())
    assert found == [as_text(line) for line in data.split(b"\n")[:-1]]
    assert list(Tail(LogSource("log", path), last).lines()) == found[max(0, len(found) - last) :]


def test_the_last_lines_of_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(1000)) + "unfinished")
    for size in (7, 64, 1 << 16):
        monkeypatch.setattr(log_view, "_READ_BYTES", size)
        for count in (1, 2, 500, 1001, 5000):
            tail = Tail(LogSource("log", path), count)
            expected = [*(f"line {number}" for number in range(1000)), "unfinished"][-count:]
            assert [*tail.lines(), *tail.rest()] == expected


def test_long_lines_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(
        b"x" * 1_000_000 + b"\nshort\n" + b"".join(b"%d%%\r" % i for i in range(20_000)) + b"done\n"
    )
    first, *others = Tail(LogSource("log", path)).lines()
    assert first == "x" * (1 << 14) + " ... (line cut here)"
    assert others == ["short", "done"]


def test_a_log_that_is_replaced_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank-0.log"
    tail = Tail(LogSource("rank 0", path))
    assert not tail.exists
    assert list(tail.lines()) == []
    path.parent.mkdir()
    path.write_text("one\nhalf")
    assert list(tail.lines()) == ["one"]
    path.parent.rename(tmp_path / "attempts")
    with (tmp_path / "attempts" / "rank-0.log").open("a") as old:
        old.write(" a line\nlast words")
    assert list(tail.lines()) == ["half a line"]
    path.parent.mkdir()
    path.write_text("two\n")
    assert list(tail.lines()) == ["last words", "two"]
    path.write_text("3\n")  # cut off and written anew
    assert list(tail.lines()) == ["3"]


def test_which_logs_are_meant() -> None:
    path = make("gpt", "a")
    (path / "logs" / "agent-n0.log").write_text("")

    def names(asked: str) -> list[str]:
        return [source.name for source in sources(path, asked)]

    assert names("all") == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert names("3,0-1,1") == ["rank 3", "rank 0", "rank 1"]
    assert names("launcher,agent") == ["launcher", "agent n0"]
    assert sources(path, "2")[0].host == "n1"
    for wrong, said in {
        "4": "ranks 0 to 3",
        "0-9": "ranks 0 to 3",
        "2-1": "ranks 0 to 3",
        "-1": "write a rank",
        "lancher": "write a rank",
        "": "write a rank",
        "0,": "write a rank",
    }.items():
        with pytest.raises(JobError, match=said):
            sources(path, wrong)
    (path / "plan.json").unlink()
    for rank in (10, 2):
        (path / "logs" / f"rank-{rank}.log").write_text("")
    assert names("all") == ["rank 2", "rank 10"]


def test_messages_come_from_the_record() -> None:
    told = [
        event("start", 1.0, params=9, stage=2, precision="bf16", device="cpu", notes=["a note"]),
        event("step", 2.0, step=1, loss=1.0),
        event("output", 2.0, lines=["of the log"], left_out=0),
        event("save", 3.0, step=1, bytes=1, seconds=0.1),
        event("warning", 4.0, 1, message="\x1b[31mlook"),
    ]
    path = make("gpt", "a", events=told)
    with (path / "events.jsonl").open("a") as record:
        record.write('[]\n{"type": "save"}\nno JSON\n{"type": "log", "rank": 0, "mess')
    (source,) = sources(path, "messages")
    assert sources(path, "launcher") == [source]  # which keeps no log without --detach
    tail = source.tail()
    assert [*tail.lines(), *tail.rest()] == [
        "start: 9 parameters, zero 2, bf16, cpu",
        "note: a note",
        "saved step 1 (1 B, 0.10s)",
        "warning (rank 1): look",
    ]
    (path / "launcher.log").write_text("its own words\n")
    assert [list(each.tail().lines()) for each in sources(path, "launcher")] == [["its own words"]]


def test_silence_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    path = make(
        "gpt", "a", events=[event("start", 1.0, params=9, stage=2, precision="bf16", device="cpu")]
    )
    for rank in range(4):
        (path / "logs" / f"rank-{rank}.log").write_text("")
    logs_command(str(path))
    said = capfd.readouterr()
    assert said.out == "launcher: start: 9 parameters, zero 2, bf16, cpu\n"
    assert said.err == f"nothing has been printed so far by any of 4 processes: see {path}/logs\n"
    logs_command(str(path), rank="2")
    assert capfd.readouterr().err.startswith("nothing has been printed so far by rank 2: ")
    (path / "logs" / "rank-3.log").write_text("a word")
    logs_command(str(path))
    assert capfd.readouterr() == (
        "rank 3: a word\nlauncher: start: 9 parameters, zero 2, bf16, cpu\n",
        "",
    )


def test_lines_of_several_logs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"{name}1\nno\n{name}2\n{name}3\nend of {name}")
    found = [LogSource(name, tmp_path / name) for name in ("a", "b")]
    pattern = re.compile(r"\d")
    told = shown([Tail(source) for source in found], pattern, 2, None)
    assert list(told) == [("a", "a2"), ("a", "a3"), ("b", "b2"), ("b", "b3")]

    turns = iter([True, False])

    def runs_on() -> bool:
        goes_on = next(turns)
        with (tmp_path / "a").open("a") as file:
            file.write("\nlater\nlast\n" if goes_on else "final 9")
        return goes_on

    told = shown([Tail(source, 1) for source in found], None, 1, runs_on)
    assert list(told) == [
        ("a", "end of a"),
        ("a", "later"),
        ("a", "last"),
        ("a", "final 9"),
        ("b", "end of b"),
    ]
