"""`zrun run`: what of a command line is the script's, what a rank finds, and how a hang is told."""

from __future__ import annotations

import importlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from zrun.agent.script_observer import ScriptObserver
from zrun.agent.workers import WorkerCommand
from zrun.flags import Command, split_at_script
from zrun.job.load import load_job
from zrun.job.script import KEYS, ScriptCommand, load_script, script_text
from zrun.launch.failures import Failure, FailureNote, LostHost, WorkerExit
from zrun.launch.hangs import HangWatch
from zrun.launch.restarts import Restarts
from zrun.launch.script_hang import ScriptHang
from zrun.launch.supervise import SupervisedRun, judge
from zrun.runs.rundir import RunDir
from zrun.system.ports import free_port, listen_below_range
from zrun.system.signals import LauncherSignals
from zrun.watch.panel import body
from zrun.watch.panel_layout import Facts, PanelSpace
from zrun.watch.run_state import RunState
from zrun_core.errors import ExitCode, JobError
from zrun_core.script import testimony
from zrun_core.script import worker as script_worker
from zrun_core.spine.config import JobConfig
from zrun_core.spine.flight_page import RankProgress
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.spine.flight_view import FlightRecorderView
from zrun_core.spine.sections.guards import LimitsConfig
from zrun_core.spine.spec import LaunchPlan, RankPlace

PLAN = LaunchPlan(
    ranks=[RankPlace(rank=rank, host="node", local_rank=rank, device="cpu") for rank in range(3)]
)


@pytest.fixture
def options() -> dict[str, Any]:
    group = typer.Typer(add_completion=False)
    command = importlib.import_module("zrun.commands.run").run
    group.command("run", cls=Command)(command)
    found = typer.main.get_command(group)
    return {name: each for each in found.params for name in each.opts}


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("train.py --lr 1", 0),
        ("--slots 2 train.py --slots 3", 2),
        ("--slots=2 train.py", 1),
        ("--detach -H h1:2,h2:2 train.py x=1", 3),
        ("restarts=3 limits.hang_s=5 train.py a=b", 2),
        ("--restarts 3 env.A=b train.py", 3),
        ("--nproc-per-node 2 train.py", 2),  # torchrun's word for slots
        ("-m package.module --help", 1),
        ("--dry-run a/b=c.py", 1),  # a path, and no key
        ("--slots 2", 2),
    ],
)
def test_options_end_where_the_script_begins(options: dict[str, Any], line: str, own: int) -> None:
    words = line.split()
    assert split_at_script(words, options) == (words[:own], words[own:])


def test_two_dashes_end_the_options_too(options: dict[str, Any]) -> None:
    words = ["--slots", "2", "--", "name=x.py", "--lr", "1"]
    assert split_at_script(words, options) == (words[:2], words[3:])


@pytest.mark.parametrize(
    ("name", "is_module", "keys", "says"),
    [
        ("nowhere.py", False, (), "nowhere.py: no such file; usage: zrun run"),
        ("trainer", False, (), "a module is written zrun run -m trainer"),
        ("job.yaml", False, (), "job.yaml is a job, .* write zrun train job.yaml"),
        ("folder", False, (), "folder is a directory"),
        ("notes.txt", False, (), "notes.txt is not a Python script"),
        ("train.py", True, (), "-m train.py: .* leave -m out for a file: zrun run train.py"),
        ("no_such_package.train", True, (), "there is no module no_such_package"),
        ("a-b", True, (), "this is no name of a module"),
        (
            "train.py",
            False,
            ("optim.lr=1",),
            "optim.lr is not a key of zrun run: .* after train.py",
        ),
        ("train.py", False, ("slots=none",), "slots: "),
        ("train.py", False, ("limits.hangs=3",), "limits.hangs"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    is_module: bool,
    keys: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("train.py", "job.yaml", "notes.txt"):
        (tmp_path / file).write_text("some text\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(JobError, match=says):
        load_script(ScriptCommand(name, (), is_module), keys)


def test_a_file_without_an_ending_is_a_script_if_its_first_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tune").write_text("#!/usr/bin/env python3\n")
    loaded, script = load_script(ScriptCommand("tune", ("--lr", "1")), ["slots=2"])
    assert (script.name, script.args, script.folder) == (
        str(tmp_path / "tune"),
        ["--lr", "1"],
        str(tmp_path),
    )
    assert (loaded.config.name, loaded.config.slots) == ("tune", 2)


def test_the_record_names_the_script_and_the_keys_of_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    loaded, script = load_script(ScriptCommand("train.py", ("secret",)), ["limits.hang_s=5"])
    text = script_text(loaded, script)
    tops = [line.partition(":")[0] for line in text.splitlines() if not line.startswith(" ")]
    assert tops[0] == "script"
    assert set(tops[1:]) == set(KEYS)
    assert "hang_s: 5" in text
    assert "secret" not in text
    assert set(KEYS) <= set(JobConfig.model_fields)


def test_a_job_that_is_a_script_points_here(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.touch()
    with pytest.raises(JobError, match=f"`zrun run {path}` launches a script"):
        load_job(path)


def test_ranks_of_several_hosts_are_told_one_place_to_meet() -> None:
    command = WorkerCommand(
        run_id="id",
        module="m",
        argument="a",
        env={},
        world_size=6,
        host=(1, 3),
        ranks=range(2, 4),
        logs={},
        meeting=("10.0.0.1", 23456),
        restart=2,
        max_restarts=3,
    )
    found = command._variables()
    assert (
        found.items()
        >= {
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "23456",
            "WORLD_SIZE": "6",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "1",
            "NODE_RANK": "1",
            "GROUP_WORLD_SIZE": "3",
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": "6",
            "TORCHELASTIC_RUN_ID": "id",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_MAX_RESTARTS": "3",
        }.items()
    )
    assert command._own_variables(3).items() >= {"RANK": "3", "LOCAL_RANK": "1"}.items()


def test_a_port_for_later_is_none_that_the_kernel_gives_away() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if low < 21_000:
        pytest.skip(f"connections of this machine use ports from {low} on")
    port = free_port()
    assert port < low
    with listen_below_range("127.0.0.1") as server:
        taken = server.getsockname()[1]
        assert taken < low
    with socket.create_server(("127.0.0.1", taken)):  # it can be taken again at once
        pass


# What ranks do.


def test_a_rank_that_neither_computes_nor_prints_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    used = [0.0]
    monkeypatch.setattr("zrun.agent.script_observer.time.monotonic", lambda: now[0])
    monkeypatch.setattr("zrun.agent.script_observer._cpu_s", lambda pid: used[0])
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "rank-0.log"
    log.write_text("begin\n")
    page = FlightRecorder(tmp_path / "board", 0, range(1), 1)
    page.phase("script")
    observer = ScriptObserver(FlightRecorderView(tmp_path / "board", range(1)), tmp_path)

    def look(seconds: float, cpu_s: float, text: str = "") -> tuple[bool, int]:
        now[0] += seconds
        used[0] += cpu_s
        with log.open("a") as file:
            file.write(text)
        (state,) = observer.look([0])["states"].values()
        found = RankProgress(*state)
        assert found.phase == "script"
        return found.waiting, found.progress

    assert look(0.0, 5.0) == (False, 1)
    assert look(0.5, 0.0) == (False, 1)  # the window is not over
    assert look(2.0, 1.0) == (False, 2)
    assert look(2.0, 0.01) == (True, 2)
    assert look(2.0, 0.0, "still here\n") == (False, 3)
    assert look(2.0, -3.0) == (True, 3)  # a helper has ended, which nobody has waited for


@pytest.mark.parametrize(
    ("limits", "expected"),
    [({}, (600.0, "limits.collective_s")), ({"hang_s": 7}, (7.0, "limits.hang_s"))],
)
def test_a_script_may_wait_as_long_as_a_collective(
    limits: dict[str, Any], expected: tuple[float, str]
) -> None:
    watch = HangWatch(LimitsConfig.model_validate(limits))
    idle = RankProgress(0, True, 0, 1, "script", 1, 0)
    assert watch.limit(idle) == expected
    busy = idle._replace(waiting=False)
    watch.see(0.0, {0: idle, 1: busy})
    watch.see(expected[0] + 1, {0: idle, 1: busy._replace(progress=2)})
    assert watch.judge(expected[0] + 1, {0: idle, 1: busy._replace(progress=2)}) is None
    late = 2 * expected[0] + 2.5
    both = {0: idle, 1: idle._replace(progress=2)}
    watch.see(late, both)
    verdict = watch.judge(late, both)
    assert verdict is not None
    assert (verdict.ranks, verdict.limit_s, verdict.key) == ([0, 1], *expected)


STACK = """Thread 0x1 (most recent call first):
  File "/x/zrun_core/script/testimony.py", line 45 in _answer

Current thread 0x2 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in f
  File "/home/me/train.py", line {line} in step
  File "/home/me/train.py", line 99 in <module>
  File "/x/zrun_core/script/worker.py", line 111 in _run
"""


def collective(number: int, **more: Any) -> dict[str, Any]:
    return {
        "name": "all_reduce",
        "number": number,
        "is_message": False,
        "sizes": [[7]],
        "dtype": "Float",
        "group": "0",
        "described": "",
        **more,
    }


def hang(*told: dict[str, Any], ended: tuple[int, ...] = (), **more: Any) -> ScriptHang:
    ranks = [
        {"rank": rank, "step": 0, "phase": "script", "does": "is idle", "last": "no collective"}
        | each
        for rank, each in enumerate(told)
    ]
    frame = {
        "ranks": ranks,
        "to_blame": [each["rank"] for each in ranks],
        "limit_s": 5.0,
        "key": "limits.hang_s",
        "reason": None,
        "stacks": {each["rank"]: STACK.format(line=10 + each["rank"]) for each in ranks},
        "logs": {},
        "links": [],
    }
    return ScriptHang(frame | more, PLAN, Path("run"), ended=ended)


def waits(number: int, **more: Any) -> dict[str, Any]:
    awaited = collective(number, **more)
    return {"torch": {"waits": [awaited], "last": awaited, "counts": {awaited["group"]: number}}}


def has_made(number: int, **more: Any) -> dict[str, Any]:
    last = collective(number, **more)
    return {"torch": {"waits": [], "last": last, "counts": {last["group"]: number}}}


def test_the_rank_that_others_wait_for_is_named_by_its_collectives() -> None:
    found = hang(waits(4), has_made(3), waits(4))
    assert found.headline == (
        "no progress for 5 s (limits.hang_s): rank 1 of 3 (node, cpu) has not reached all_reduce 4 "
        "([7] Float), which others wait for"
    )
    text = found.describe()
    assert "rank 0 is idle at train.py:10, waits for all_reduce 4 ([7] Float)" in text
    assert "rank 1 is idle at train.py:11, last: all_reduce 3 ([7] Float)" in text
    assert "line 11 in step" in text  # the stack of the one to blame
    assert "zrun_core/script" not in text
    assert found.to_json()["rank"] == 1


def test_a_rank_that_torch_does_not_know_yet_has_come_to_nothing() -> None:
    nothing = {"torch": {"waits": [], "last": None, "counts": {}}}
    assert (
        "ranks 1, 2 of 3 have not reached all_reduce 1" in hang(waits(1), nothing, nothing).headline
    )


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ((waits(4), waits(4), waits(4)), "no rank uses the CPU or prints anything"),
        (({}, {}, {}), "no rank uses the CPU or prints anything"),
        # Of another group nobody knows that rank 1 is in it.
        (
            (waits(2, group="1"), has_made(3), waits(2, group="1")),
            "no rank uses the CPU or prints anything",
        ),
        (
            (waits(4), {"does": "is stopped"}, waits(4)),
            "rank 1 of 3 (node, cpu) is stopped by a signal or a debugger",
        ),
    ],
)
def test_where_nobody_is_known_to_be_late(told: tuple[dict[str, Any], ...], says: str) -> None:
    assert hang(*told).headline == f"no progress for 5 s (limits.hang_s): {says}"


def test_ranks_that_have_ended_are_named() -> None:
    found = hang(waits(4), waits(4), ended=(2,))
    assert found.headline.endswith("rank 2 ended with status 0, and no other rank does anything")
    assert "make every rank reach the same collectives" in found.advice


def test_a_cut_link_comes_first() -> None:
    link = {"rank": 0, "address": "10.0.0.2", "other": 1}
    assert (
        "the network between node and node is cut"
        in hang(waits(4), has_made(3), links=[link]).headline
    )


# How a run ends.


def end(rank: int, status: int, at: float = 1.0, message: str = "") -> WorkerExit:
    note = None
    if message:
        fields = {"rank": rank, "kind": "user", "type": "E", "message": message, "exit_code": 5}
        note = FailureNote.model_validate(fields)
    return WorkerExit(rank, status, at, note=note)


def judged(tmp_path: Path, *exits: WorkerExit) -> tuple[int, Any]:
    run = SupervisedRun(len(exits), exits=list(exits), is_script=True)
    with RunDir.claim("script", tmp_path / "run") as rundir:
        return judge(run, PLAN, rundir, LauncherSignals())


def test_ranks_of_a_script_end_each_at_its_time(tmp_path: Path) -> None:
    assert judged(tmp_path, end(0, 0), end(1, 0, 900.0)) == (ExitCode.OK, None)
    run = SupervisedRun(2, exits=[end(0, 0)], first_clean_exit=end(0, 0), is_script=True)
    assert run.left_early is None


def test_a_rank_that_felt_the_end_of_one_that_ended_well_says_so(tmp_path: Path) -> None:
    code, failure = judged(tmp_path, end(1, 0), end(0, 1, 2.0, "Connection closed by peer"))
    assert code == ExitCode.WORKER
    assert isinstance(failure, Failure)
    assert failure.headline == (
        "rank 0 of 3 (node, cpu) failed after rank 1 had ended with status 0"
    )


def test_an_exception_comes_before_those_that_felt_it(tmp_path: Path) -> None:
    _, failure = judged(tmp_path, end(0, 1, 1.0, "Connection closed by peer"), end(1, 1, 1.1, "no"))
    assert failure.headline == "rank 1 of 3 (node, cpu) failed"


def test_every_failure_of_a_script_is_tried_again() -> None:
    restarts = Restarts(2, is_script=True)
    failure = Failure(end(0, 1, message="no data"), PLAN, 0, Path("log"), is_script=True)
    assert restarts.after(failure, 0) == 5.0
    assert restarts.after(LostHost("node", "node: gone", 0), 0) == 10.0  # each counts once
    assert restarts.after(failure, 0) is None
    assert Restarts(2).after(failure, 0) is None  # of a job it would be the same next time


# Its process.


def test_a_rank_needs_no_torch_before_its_script() -> None:
    code = f"import sys, {script_worker.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def told(dump: dict[str, Any]) -> dict[str, Any]:
        bindings = ModuleType("bindings")
        bindings._dump_fr_trace_json = lambda *_: json.dumps(dump).encode()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", bindings)
        return testimony.tell()

    return told


def test_what_torch_remembers_is_told_in_short(
    tell: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    def entry(number: int, **more: Any) -> dict[str, Any]:
        return {
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "is_p2p": False,
            "input_dtypes": ["Float"],
            "input_sizes": [[7]],
            "process_group": ["0", "default_pg"],
            "profiling_name": "nccl:all_reduce",
            "retired": False,
            "state": "scheduled",
            **more,
        }

    done = entry(1, retired=True)
    ended = entry(2, state="completed")
    of_group = entry(1, process_group=["3", "tp"], profiling_name="gloo:broadcast")
    told = tell({"entries": [done, ended, entry(3), of_group]})
    assert told["waits"] == [
        collective(3),
        collective(1, name="broadcast", group="3", described="tp"),
    ]
    assert told["last"] == told["waits"][-1]
    assert told["counts"] == {"0": 3, "3": 1}
    assert tell({}) == {"waits": [], "last": None, "counts": {}}


def test_a_rank_survives_requests_that_only_the_library_obeys() -> None:
    """Of a plain script too the launcher may pass on `zrun save`."""
    code = (
        "import signal, os, tempfile, pathlib\n"
        f"from {script_worker.__name__} import _listen\n"
        "from zrun_core.spine.stop_signals import SAVE, PROFILE\n"
        "_listen(pathlib.Path(tempfile.mkdtemp()), 0)\n"
        "for number in (SAVE, PROFILE): os.kill(os.getpid(), number)\n"
        "print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "alive\n", done.stderr


def test_a_panel_of_a_script_waits_for_no_step() -> None:
    facts = Facts("train", "id", ("node",), is_script=True)
    text = "\n".join(line.plain for line in body(RunState(), facts, PanelSpace(80, 20)))
    assert "not reported: zrun logs shows what the script prints" in text
    assert "starting" not in text


@pytest.mark.parametrize(
    ("before", "status"),
    [
        ("pass", 3),
        # It is not at its end.
        ("threading.Thread(target=threading.Event().wait, args=(60,)).start()", -signal.SIGTERM),
        # The script obeys the signal by itself.
        ("signal.signal(signal.SIGTERM, lambda *_: os._exit(7))", 7),
    ],
)
def test_a_rank_that_has_ended_keeps_its_status(before: str, status: int) -> None:
    """The agent ends it together with those that felt its end, while Python still ends."""
    code = (
        "import os, pathlib, signal, sys, tempfile, threading\n"
        f"from {script_worker.__name__} import _Ending\n"
        f"{before}\n"
        "_Ending(pathlib.Path(tempfile.mkdtemp(), 'status')).keep(3)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == status
