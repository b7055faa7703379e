"""What signals ask for: of a worker, of the launcher, and what a run that was asked to stop exits
with.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from zrun.launch.failures import FailureNote, WorkerExit
from zrun.launch.supervise import SupervisedRun, Supervisor, judge
from zrun.runs.rundir import RunDir
from zrun.system.deadlines import AwakeClock
from zrun.system.signals import STOP_NOW, LauncherSignals, held, stoppable
from zrun.transport.frames import Frame, StopMode
from zrun_core.errors import RendezvousError, StoppedError
from zrun_core.spine.profile_request import ProfileRequest
from zrun_core.spine.sections.guards import LimitsConfig
from zrun_core.spine.spec import LaunchPlan, RankPlace
from zrun_core.spine.stop_signals import PROFILE, SAVE, StopSignals

INT, TERM, HUP, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1


class EndedError(Exception):
    """Instead of the end of the process."""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> StopSignals:
    def end(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(os, "_exit", end)
    return StopSignals()


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([TERM], None),
        ([INT], None),
        ([USR1, USR1, HUP, TERM], None),  # warnings may come often, and before the order
        (
            [TERM, USR1],
            None,
        ),  # the scheduler tells the workers and the launcher, which tells the workers
        ([TERM, TERM], 143),
        ([USR1, INT, TERM], 143),  # the launcher's "now"
        ([INT, TERM], 130),
    ],
)
def test_a_worker_finishes_its_step_unless_told_twice(worker, numbers, code):
    worker.can_finish = True
    for number in numbers[:-1]:
        worker._note(number, None)
    with nullcontext() if code is None else pytest.raises(EndedError, match=str(code)):
        worker._note(numbers[-1], None)
    assert worker.first == numbers[0]


def test_before_the_first_step_there_is_nothing_to_finish(worker):
    with pytest.raises(EndedError, match="143"):
        worker._note(USR1, None)


def test_a_request_to_save_asks_for_no_end():
    stop = StopSignals()  # before the first step too
    handlers = {
        number: signal.getsignal(number) for number in (INT, TERM, HUP, USR1, signal.SIGUSR2, SAVE)
    }
    try:
        stop.listen()
        for _ in range(2):
            signal.raise_signal(SAVE)
        assert (stop.first, stop.take_save(), stop.take_save()) == (None, True, False)
        stop.ignore()
        signal.raise_signal(SAVE)
        assert not stop.take_save()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_forked_helper_ends_as_if_there_were_no_handler():
    code = (
        "import os, signal, time\nfrom zrun_core.spine.stop_signals import StopSignals\n"
        "stop = StopSignals()\nstop.can_finish = True\n"
        "stop.listen()\nread, write = os.pipe()\npid = os.fork()\n"
        "if pid == 0:\n    os.write(write, b'x')\n    while True:\n        time.sleep(0.01)\n"
        "os.read(read, 1)\nos.kill(pid, signal.SIGTERM)\n"
        "print(os.WTERMSIG(os.waitpid(pid, 0)[1]), stop.first)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "15 None\n", done.stderr


@pytest.mark.parametrize(
    ("numbers", "level"),
    [
        ([INT], 1),
        ([INT, INT], 2),
        ([INT, TERM, INT], 3),
        ([HUP, HUP, HUP], 1),
        ([USR1, TERM], 1),
        ([USR1, TERM, INT], 2),
    ],
)
def test_only_firm_signals_escalate(numbers, level):
    signals = LauncherSignals()
    for number in numbers:
        signals.on_stop(number)
    assert (signals.first, signals.level) == (numbers[0], level)
    assert (signals.forced_at is not None) == (level > 1)


class ScriptedAgents:
    """Say what a test wrote down; a callable is a signal, or whatever else happens between two
    frames.
    """

    def __init__(self, script: list[Any], hosts: list[str]) -> None:
        self.script, self.hosts = script, hosts
        self.asked: list[StopMode] = []
        self.told: list[Frame] = []
        self.lost: dict[str, str] = {}
        self.done: list[str] = []
        self.given_up: list[str] = []

    @property
    def all_ended(self) -> bool:
        return not self.unfinished

    @property
    def unfinished(self) -> list[str]:
        return [host for host in self.hosts if host not in self.done and host not in self.lost]

    def drop_host(self, host: str) -> None:
        self.given_up.append(host)

    def frames(self, patience_s: float) -> list[tuple[str, Frame]]:
        item = self.script.pop(0)
        if callable(item):
            item()
            return []
        host, frame = item if isinstance(item, tuple) else (self.hosts[0], item)
        if frame is None:
            self.lost[host] = f"{host}: the connection broke"
            return []
        if frame is DONE:
            self.done.append(host)
        return [(host, frame)]

    def send(self, frame: Frame) -> None:
        self.told.append(frame)

    def stop(self, how: StopMode) -> None:
        self.asked.append(how)


STARTED: Frame = {"frame": "started", "pids": {}}
DONE: Frame = {"frame": "done"}


def exit_frame(rank: int, status: int, note: FailureNote | None = None) -> Frame:
    told = note.model_dump_json() if note is not None else None
    return {"frame": "exit", "rank": rank, "status": status, "oom": False, "note": told, "log": []}


def follow(
    script: list[Any], signals: LauncherSignals, **limits: Any
) -> tuple[SupervisedRun, list[StopMode]]:
    run, agents = SupervisedRun(2), ScriptedAgents([STARTED, *script, DONE], ["node"])
    supervisor = Supervisor(agents, run, signals, LimitsConfig.model_validate(limits))
    supervisor.watch(lambda event, line: None, lambda: None)
    return run, agents.asked


class Hosts:
    """Two hosts, a and b, with a rank each, and a clock of their own."""

    def __init__(self, *script: Any, starts: tuple[str, ...] = ("a", "b"), **limits: Any) -> None:
        self.run, self.now, self.signals = SupervisedRun(2), 0.0, LauncherSignals()
        self.agents = ScriptedAgents([*((host, STARTED) for host in starts), *script], ["a", "b"])
        self._limits = LimitsConfig.model_validate(limits)

    def watch(self) -> None:
        script = self.agents.script
        script[:] = [
            partial(self._wait, item) if isinstance(item, float) else item for item in script
        ]
        supervisor = Supervisor(self.agents, self.run, self.signals, self._limits, lambda: self.now)
        supervisor.watch(lambda event, line: None, lambda: None)

    def _wait(self, seconds: float) -> None:
        self.now += seconds


def test_a_failure_on_one_host_stops_the_others(rundir):
    note = FailureNote(rank=0, kind="user", type="E", message="boom", exit_code=5)
    hosts = Hosts(
        ("a", exit_frame(0, 5, note)), 1.0, ("b", exit_frame(1, 143)), ("a", DONE), ("b", DONE)
    )
    hosts.watch()
    assert hosts.agents.asked == [StopMode.NOW]
    assert {"beat": True} in hosts.agents.told
    code, failure = judge(hosts.run, plan(), rundir, LauncherSignals())
    assert (code, failure.headline) == (5, "rank 0 of 2 (node, cpu) failed")


def test_a_lost_host_is_named_although_the_others_felt_it_first(rundir):
    note = FailureNote(
        rank=0, kind="peer", type="E", message="Connection closed by peer", exit_code=5
    )
    hosts = Hosts(("a", exit_frame(0, 5, note)), ("b", None), 1.0, ("a", DONE))
    hosts.watch()
    assert hosts.agents.asked == [StopMode.KILL], "nothing can be saved without b"
    code, failure = judge(hosts.run, plan(), rundir, LauncherSignals())
    assert (code, failure.headline) == (6, "lost b: the connection broke")


def test_who_waits_for_a_lost_host_is_asked_before_it_is_ended(rundir):
    told = {"rank": 0, "step": 3, "phase": "forward", "does": "waits", "last": "small 4"}
    board = {"frame": "board", "states": {"0": [3, True, 0, 7, "forward", 1, 1]}, "halted": []}
    testimony = {"frame": "testimony", "ranks": [told], "stacks": {}, "logs": {}}
    hosts = Hosts(("a", board), ("b", None), ("a", testimony), 1.0, ("a", DONE))
    hosts.watch()
    asked = [frame for frame in hosts.agents.told if "testify" in frame]
    assert (asked, hosts.agents.asked) == ([{"testify": True}], [StopMode.KILL])
    code, failure = judge(hosts.run, plan(), rundir, LauncherSignals())
    assert (code, failure.survivors) == (6, (told,))


def test_who_is_killed_for_a_lost_host_is_not_to_blame(rundir):
    hosts = Hosts(("b", None), 1.0, ("a", exit_frame(0, -9)), ("a", DONE))
    hosts.watch()
    code, failure = judge(hosts.run, plan(), rundir, LauncherSignals())
    assert (code, failure.headline) == (6, "lost b: the connection broke")


def test_a_host_that_says_no_more_is_not_waited_for(rundir):
    hosts = Hosts(("a", None), 1.0, 100.0)
    hosts.watch()
    assert not hosts.agents.script, "b never said that it was done"
    assert judge(hosts.run, plan(), rundir, LauncherSignals())[0] == 6


def test_a_host_that_falls_silent_is_lost_although_another_one_felt_it_first(rundir):
    """As when slurmstepd is killed: srun goes on for half a minute, and the other ranks only feel
    the loss.
    """
    note = FailureNote(
        rank=0, kind="peer", type="E", message="Connection reset by peer", exit_code=5
    )
    hosts = Hosts(("a", exit_frame(0, 5, note)), 1.0, ("a", DONE), 4.0, 4.0, ("b", DONE))
    hosts.watch()
    assert (hosts.agents.given_up, hosts.agents.script) == (["b"], [("b", DONE)])
    code, failure = judge(hosts.run, plan(), rundir, LauncherSignals())
    assert (code, failure.headline) == (
        6,
        "lost b: its agent no longer answers: it or its parent process was killed or is suspended",
    )


def test_a_host_that_still_speaks_has_its_time(rundir):
    note = FailureNote(rank=0, kind="user", type="E", message="boom", exit_code=5)
    board = ("b", {"frame": "board", "states": {}, "halted": []})
    ends = ("b", exit_frame(1, 143)), ("b", DONE)
    hosts = Hosts(
        ("a", exit_frame(0, 5, note)), 1.0, ("a", DONE), 4.0, board, 4.0, board, 4.0, *ends
    )
    hosts.watch()
    assert hosts.agents.given_up == []
    assert judge(hosts.run, plan(), rundir, LauncherSignals())[0] == 5


def test_a_host_that_could_not_start_its_workers_is_lost(rundir):
    hosts = Hosts(("b", DONE), 1.0, ("a", DONE), starts=("a",))
    hosts.watch()
    code, failure = judge(hosts.run, plan(), rundir, LauncherSignals())
    assert code == 6
    assert "b: its agent could not start the workers" in failure.headline


def test_a_host_that_never_starts_is_named():
    with pytest.raises(RendezvousError, match=r"^b: the workers had not started after 5 s"):
        Hosts(6.0, starts=("a",), start_s=5.0).watch()


def test_a_host_that_heard_nothing_and_went_on_has_saved(rundir):
    deaf = {"frame": "deaf", "silent_s": 120.4, "stop": "finish"}
    exits = ("a", exit_frame(0, 75)), ("b", exit_frame(1, 75))
    hosts = Hosts(("b", deaf), *exits, ("a", DONE), ("b", DONE))
    hosts.watch()
    assert judge(hosts.run, plan(), rundir, LauncherSignals()) == (75, None)
    assert hosts.run.stop_reason == "b: its agent heard nothing from this launcher for 120 s"


def test_a_host_that_heard_nothing_and_stood_still_is_lost_and_nobody_asked_for_the_end(rundir):
    deaf = {"frame": "deaf", "silent_s": 15.2, "stop": "now"}
    told = (
        "b",
        {"frame": "event", "event": {"type": "stop", "signal": "SIGINT", "rank": 1, "time": 1.0}},
    )
    hosts = Hosts(("b", deaf), told, ("b", exit_frame(1, 130)), 1.0, ("a", DONE), ("b", DONE))
    hosts.watch()
    code, failure = judge(hosts.run, plan(), rundir, LauncherSignals())
    assert (code, hosts.run.stop_reason) == (6, ""), "so that restarts apply"
    assert failure.headline.startswith(
        "lost b: its agent heard nothing from this launcher for 15 s, and its ranks made"
    )


def test_what_a_launcher_slept_through_is_no_delay():
    def doze(seconds: float) -> None:
        times.append(times[-1] + seconds)

    times = [100.0]
    clock = AwakeClock(lambda: times[-1])
    begin = clock()
    doze(1.5)
    assert clock() - begin == 1.5
    doze(70.0)  # ctrl-Z, and fg
    assert clock() - begin == 3.5
    doze(0.1)
    assert clock() - begin == pytest.approx(3.6)


def test_a_launcher_says_that_it_will_be_silent_before_it_stands_still(monkeypatch):
    signals, stopped = LauncherSignals(), []
    monkeypatch.setattr("os.kill", lambda pid, number: stopped.append(number))
    with signals.caught():
        told = told_to([lambda: signal.raise_signal(signal.SIGTSTP), lambda: None], signals)
    assert (told, stopped) == ([{"hold": True}], [signal.SIGSTOP])
    assert signals.level == 0


def test_a_hang_is_found_from_the_boards_of_all_hosts(rundir):
    def board(rank: int, *, waiting: bool) -> Frame:
        return {
            "frame": "board",
            "states": {str(rank): [3, waiting, 0, 7, "forward", 1, 1]},
            "halted": [],
        }

    def saw(rank: int, does: str) -> Frame:
        told = {"rank": rank, "step": 3, "phase": "forward", "does": does, "last": "small 4"}
        return {
            "frame": "testimony",
            "ranks": [told],
            "disagreement": None,
            "stalemate": "",
            "stacks": {},
            "logs": {},
        }

    boards = ("a", board(0, waiting=True)), ("b", board(1, waiting=False))
    told = ("a", saw(0, "waits")), ("b", saw(1, "runs")), ("a", DONE), ("b", DONE)
    hosts = Hosts(*boards, 6.0, *boards, 1.0, *told, hang_s=5.0)
    hosts.watch()
    assert {"testify": True} in hosts.agents.told
    assert hosts.agents.asked == [StopMode.KILL]
    code, failure = judge(hosts.run, plan(), rundir, LauncherSignals())
    assert code == 6
    assert "rank 1 of 2 (node, cpu) is stuck in forward of step 3" in failure.headline


def test_the_launcher_asks_once_per_level():
    signals = LauncherSignals()

    def press() -> None:
        signals.on_stop(INT)

    _, asked = follow([press, lambda: None, press, lambda: None, press], signals)
    assert asked == [StopMode.FINISH, StopMode.NOW, StopMode.KILL]


def told_to(
    script: list[Any], signals: LauncherSignals, run_dir: Path | None = None
) -> list[Frame]:
    """What the launcher says to the agents, but for its heartbeat."""
    agents = ScriptedAgents([STARTED, *script, DONE], ["node"])
    Supervisor(agents, SupervisedRun(2), signals, LimitsConfig(), run_dir=run_dir).watch(
        lambda event, line: None, lambda: None
    )
    return [frame for frame in agents.told if "beat" not in frame]


TRAINS: Frame = {"frame": "event", "event": {"type": "start", "rank": 0, "time": 1.0}}


def test_the_launcher_passes_a_request_to_save_on_once(capsys):
    signals = LauncherSignals()

    def ask() -> None:
        signal.raise_signal(SAVE)

    before = signal.getsignal(SAVE)
    with stoppable(lambda: "too early"):
        ask()  # before there are ranks
        with signals.caught():
            assert told_to([TRAINS, ask, lambda: None], signals) == [{"save": True}]
            assert (signals.level, signals.first) == (0, None)
            assert "saving at the end of the step" in capsys.readouterr().err
        ask()  # after them
    ask()  # the process is about to end
    signal.signal(SAVE, before)


def test_the_launcher_passes_a_request_for_a_profile_on_once(tmp_path, capsys):
    signals = LauncherSignals()
    request = ProfileRequest("id", 3, (0, 1))
    request.write(tmp_path)
    before = signal.getsignal(PROFILE)
    with stoppable(lambda: "too early"):
        signal.raise_signal(PROFILE)  # before there are ranks
        with signals.caught():
            script = [TRAINS, lambda: signal.raise_signal(PROFILE), lambda: None]
            passed_on = {"profile": request.to_text(), "run_dir": str(tmp_path)}
            assert told_to(script, signals, tmp_path) == [passed_on]
            assert (signals.level, signals.first) == (0, None)
            assert "zrun profile: 3 steps, traced on rank 0, 1" in capsys.readouterr().err
        signal.raise_signal(PROFILE)  # after them
    signal.raise_signal(PROFILE)  # the process is about to end
    signal.signal(PROFILE, before)
    script = [TRAINS, lambda: signals.on_profile(PROFILE), lambda: None]
    assert told_to(script, signals, tmp_path / "none") == []
    assert "the request cannot be read" in capsys.readouterr().err
    signals.on_profile(PROFILE)
    assert told_to([lambda: None], signals, tmp_path) == []
    assert "the run does not train" in capsys.readouterr().err


def test_while_no_rank_trains_there_is_nothing_to_save(capsys):
    signals = LauncherSignals()
    assert told_to([lambda: signals.on_save(SAVE), TRAINS, lambda: None], signals) == []
    assert "no rank trains yet" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [TERM, STOP_NOW])
def test_a_stop_wins_over_a_request_to_save(stop, capsys):
    signals = LauncherSignals()

    def both() -> None:
        signals.on_save(SAVE)
        signals.on_stop(stop)

    assert told_to([TRAINS, both, lambda: None], signals) == []
    assert "the run is already ending" in capsys.readouterr().err
    assert signals.first == stop


def test_patience_ends(monkeypatch):
    signals = LauncherSignals()
    _, asked = follow(
        [lambda: signals.on_stop(TERM), lambda: None, lambda: None], signals, stop_s=1e-9
    )
    assert asked[0] is StopMode.FINISH or asked == [StopMode.NOW]
    assert asked[-1] is StopMode.NOW
    assert signals.level == 2


def phases(host: str, rank: int, phase: str) -> tuple[str, Frame]:
    return host, {
        "frame": "board",
        "states": {str(rank): [3, False, 0, 7, phase, 1, 1]},
        "halted": [],
    }


def stopped(*script: Any) -> Hosts:
    """Two hosts that get a SIGTERM at 0 s, with 10 s to end and 100 s to save."""
    hosts = Hosts(
        lambda: hosts.signals.on_stop(TERM),
        *script,
        ("a", DONE),
        ("b", DONE),
        stop_s=10,
        save_s=100,
    )
    hosts.watch()
    return hosts


def test_a_save_that_a_signal_has_begun_is_not_cut_off(capsys):
    saves, trains = phases("b", 1, "save"), phases("b", 1, "forward")
    assert stopped(phases("a", 0, "end"), 5.0, saves, 9.0, 50.0).agents.asked == [StopMode.FINISH]
    said = capsys.readouterr().err
    assert (
        said.count(
            "a save is under way: it has 100 s (limits.save_s) instead of 10 (limits.stop_s); "
            "once more"
        )
        == 1
    )
    # It was due before the signal, and the step after it, with a save of its own, is still to come.
    assert stopped(saves, 30.0, trains, 9.0, saves, 20.0).agents.asked == [StopMode.FINISH]
    assert "stopping now" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ([("b", "forward"), 11.0], "not finished after 10 s (limits.stop_s): stopping now"),
        (
            [("b", "save"), 30.0, ("b", "forward"), 11.0],
            "not finished after 10 s (limits.stop_s): stopping now",
        ),
        ([("b", "save"), 99.0, 2.0], "not saved after 100 s (limits.save_s): stopping now"),
    ],
)
def test_the_patience_with_a_save_ends_too(capsys, script, said):
    items = [phases(item[0], 1, item[1]) if isinstance(item, tuple) else item for item in script]
    assert stopped(*items, lambda: None).agents.asked == [StopMode.FINISH, StopMode.NOW]
    assert said in capsys.readouterr().err


def test_a_rank_that_was_signalled_by_others_has_the_same_patience():
    signals = LauncherSignals()
    told = {
        "frame": "event",
        "event": {"type": "stop", "rank": 1, "time": 1.0, "signal": "SIGTERM"},
    }
    run, asked = follow([told, lambda: None, lambda: None], signals, stop_s=1e-9)
    assert run.stop_reason == "SIGTERM"
    assert asked == [StopMode.NOW]


@pytest.fixture
def rundir(tmp_path: Path):
    with RunDir.claim("job", tmp_path / "run") as claimed:
        yield claimed


def plan() -> LaunchPlan:
    return LaunchPlan(
        ranks=[RankPlace(rank=r, host="node", local_rank=r, device="cpu") for r in range(2)]
    )


@pytest.mark.parametrize(
    ("first", "statuses", "code"),
    [
        (INT, (75, 75), 75),
        (TERM, (75, 75), 75),
        (None, (75, 75), 75),  # signalled by others
        (INT, (143, 143), 130),  # nothing to save
        (TERM, (143, 143), 143),
        (HUP, (143, 143), 143),
        (USR1, (143, 143), 143),
        (None, (143, 143), 143),
        (None, (130, 130), 130),
        (INT, (-signal.SIGUSR1, -signal.SIGTERM), 130),  # before the workers had handlers
        (TERM, (5, 143), 5),  # it failed while it stopped
        (TERM, (8, -signal.SIGTERM), 8),
        (None, (0, 0), 0),
    ],
)
def test_the_exit_code_of_a_stopped_run(rundir, first, statuses, code):
    signals, run = LauncherSignals(), SupervisedRun(2)
    run.ended = statuses == (0, 0)
    if first is not None:
        signals.on_stop(first)
    for rank, status in enumerate(statuses):
        note = (
            FailureNote(rank=rank, kind="zrun", type="E", message="m", exit_code=status)
            if status in (5, 8)
            else None
        )
        run.exits.append(WorkerExit(rank, status, 1.0 + rank, note=note))
    found, failure = judge(run, plan(), rundir, signals)
    assert found == code
    assert (failure is not None) == (code in (5, 8))


def test_what_is_killed_after_now_is_no_failure(rundir):
    signals, run = LauncherSignals(), SupervisedRun(2)
    signals.on_stop(INT)
    signals.on_stop(INT)
    assert signals.forced_at is not None
    run.exits += [WorkerExit(rank, -signal.SIGKILL, signals.forced_at + 1) for rank in range(2)]
    assert judge(run, plan(), rundir, signals) == (130, None)


@pytest.mark.parametrize(("committed", "code"), [(7, 75), (6, 130), (0, 130)])
def test_what_is_cut_off_after_the_newest_step_was_saved_loses_nothing(rundir, committed, code):
    signals, run = LauncherSignals(), SupervisedRun(2)
    run.last_step = 7
    signals.on_stop(INT)
    signals.force()
    assert signals.forced_at is not None
    run.exits += [WorkerExit(rank, -signal.SIGTERM, signals.forced_at + 1) for rank in range(2)]
    assert judge(run, plan(), rundir, signals, committed) == (code, None)


def test_a_peer_that_felt_the_others_stop_is_no_failure(rundir):
    signals, run = LauncherSignals(), SupervisedRun(2)
    signals.on_stop(TERM)
    note = FailureNote(
        rank=1, kind="peer", type="E", message="Connection closed by peer", exit_code=5
    )
    run.exits += [WorkerExit(0, -signal.SIGUSR1, 1.0), WorkerExit(1, 5, 1.1, note=note)]
    assert judge(run, plan(), rundir, signals) == (143, None)


@pytest.mark.parametrize("number", [INT, TERM, USR1])
def test_a_signal_while_agents_are_started_waits_until_all_can_be_ended(number):
    started: list[str] = []

    def start() -> None:
        with stoppable(lambda: "early"), held():
            signal.raise_signal(number)
            signal.raise_signal(INT)
            started.extend(["a", "b"])

    handlers = {each: signal.getsignal(each) for each in (INT, TERM, HUP, USR1, SAVE)}
    try:
        with pytest.raises(StoppedError, match="stopped early"):
            start()
        assert started == ["a", "b"]
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
