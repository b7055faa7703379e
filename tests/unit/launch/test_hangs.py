"""Which rank hangs, by which limit, and how it is told."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zrun.agent.observer import Observer
from zrun.agent.unanswered import own_addresses, unanswered
from zrun.launch.failures import Hang
from zrun.launch.hangs import HangInvestigation, HangWatch, HungRanks, StepTimes
from zrun.launch.supervise import SupervisedRun
from zrun.system.processes import Process
from zrun_core.errors import ExitCode
from zrun_core.spine.flight_page import RankProgress
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.spine.flight_view import FlightRecorderView
from zrun_core.spine.sections.guards import LimitsConfig
from zrun_core.spine.spec import LaunchPlan, RankPlace


def state(
    step: int = 5,
    phase: str = "forward",
    *,
    waiting: bool = False,
    progress: int = 1,
    first: int = 1,
) -> RankProgress:
    return RankProgress(step, waiting, 0, progress, phase, 0, first)


def watch(**limits: Any) -> HangWatch:
    return HangWatch(LimitsConfig.model_validate(limits))


def look(hangs: HangWatch, now: float, states: dict[int, RankProgress]) -> HungRanks | None:
    hangs.see(now, states)
    return hangs.judge(now, states)


def test_a_rank_that_works_without_progress_is_found_when_its_limit_is_over():
    hangs = watch(hang_s=5)
    waits = state(waiting=True)
    assert look(hangs, 0.0, {0: waits, 1: state()}) is None
    assert look(hangs, 5.0, {0: waits, 1: state()}) is None
    verdict = look(hangs, 5.1, {0: waits, 1: state()})
    assert verdict is not None
    assert (verdict.ranks, verdict.limit_s, verdict.key) == ([1], 5.0, "limits.hang_s")


def test_any_progress_begins_anew_and_waiting_for_a_rank_that_works_is_no_hang():
    hangs = watch(hang_s=5)
    for second in range(100):
        assert look(hangs, second, {0: state(waiting=True), 1: state(progress=second // 4)}) is None


def test_when_all_wait_the_last_to_move_counts():
    hangs = watch(hang_s=5)
    waits = state(waiting=True)
    assert look(hangs, 0.0, {0: waits, 1: waits}) is None
    assert look(hangs, 4.0, {0: waits, 1: state(waiting=True, progress=2)}) is None
    assert look(hangs, 8.9, {0: waits, 1: state(waiting=True, progress=2)}) is None
    verdict = look(hangs, 9.1, {0: waits, 1: state(waiting=True, progress=2)})
    assert verdict is not None
    assert verdict.ranks == [0, 1]


@pytest.mark.parametrize(
    ("found", "seconds", "key"),
    [
        (state(0, "start"), 30.0, "limits.first_step_s"),
        (state(1, "backward"), 30.0, "limits.first_step_s"),
        (state(2, "data"), 5.0, "limits.hang_s"),
        (state(2, "evaluation"), 7.0, "limits.eval_s"),
        (state(0, "evaluation"), 30.0, "limits.eval_s"),
        (state(2, "hook"), 7.0, "limits.eval_s"),
        (state(1, "save"), 11.0, "limits.save_s"),
        (state(1, "profile"), 7.0, "limits.eval_s"),
        (state(1, "end"), 5.0, "limits.hang_s"),
    ],
)
def test_each_phase_has_its_limit(found, seconds, key):
    assert watch(hang_s=5, first_step_s=30, eval_s=7, save_s=11).limit(found) == (seconds, key)


def test_a_halted_rank_has_no_more_time_in_a_save_than_in_a_step():
    """A slow disk has `save_s`, as long as nobody stops the process; a profiler does at times."""
    hangs = watch(hang_s=5, save_s=1800)
    saves = {0: state(phase="save", waiting=True), 1: state(phase="save")}
    for now in range(100):
        hangs.see(now, saves, {1} if now % 5 else ())
        assert hangs.judge(now, saves) is None
    hangs.see(100, saves)
    for now in range(101, 107):
        hangs.see(now, saves, {1})
        assert hangs.judge(now, saves) is None
    hangs.see(107, saves, {1})
    assert hangs.judge(107, saves) == HungRanks([1], 5.0, "limits.hang_s")
    builds = {0: state(0, "build"), 1: state(0, "build")}
    assert hangs.judge(107, builds) is None  # a debugger


def test_an_agent_tells_which_ranks_are_halted(tmp_path: Path) -> None:
    """And the launcher forgets it, once they go on."""
    path = tmp_path / "board"
    recorders = [FlightRecorder(path, rank, range(2), 2) for rank in range(2)]
    observer = Observer(FlightRecorderView(path, range(2)), tmp_path)
    run = SupervisedRun(2)
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        recorders[1]._pid = sleeper.pid
        recorders[1].phase("save")
        sleeper.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
        for halted in (set(), {1}):  # it may have moved before the first look
            run.update("h", json.loads(json.dumps(observer.look(range(2)))))
            assert run.halted == halted
        sleeper.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED)
        run.update("h", json.loads(json.dumps(observer.look(range(2)))))
        assert run.halted == set()
        sleeper.kill()


def run_steps(hangs: HangWatch, seconds: list[float]) -> None:
    now = 0.0
    for step, length in enumerate(seconds, start=1):
        look(hangs, now, {0: state(step, progress=step)})
        now += length
    look(hangs, now, {0: state(len(seconds) + 1, progress=-1)})


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        ([1.0] * 10, 60.0),  # never below a minute
        ([100.0, *[1.0] * 10], 60.0),  # the first step warms up
        ([1.0, *[20.0] * 10], 100.0),
        ([1.0, *[20.0] * 150, 30.0], 100.0),  # one in 151 is beyond the 99th percentile
        ([1.0, *[20.0] * 50, 30.0], 150.0),
    ],
)
def test_auto_is_five_slow_steps_and_at_least_a_minute(seconds, limit):
    hangs = watch()
    run_steps(hangs, seconds)
    assert hangs.limit(state(1000)) == (limit, "limits.hang_s")


def test_the_first_step_of_a_resumed_run_has_the_first_steps_limit():
    hangs = watch(hang_s=5, first_step_s=30)
    for now, step in [(0, 0), (10, 812), (39, 812)]:
        assert look(hangs, now, {0: state(step, progress=step, first=812)}) is None
    assert look(hangs, 41, {0: state(813, progress=813, first=812)}) is None
    verdict = look(hangs, 47, {0: state(813, progress=813, first=812)})
    assert verdict is not None
    assert verdict.key == "limits.hang_s"


@pytest.mark.parametrize("is_waiting", [False, True])
def test_of_a_host_that_is_not_heard_its_connection_speaks_first(is_waiting):
    hangs = watch(hang_s=5)
    states = {0: state(2, waiting=True), 1: state(2, waiting=is_waiting)}
    assert look(hangs, 0, states) is None
    for now in (6, 12, 19):
        hangs.see(now, {0: states[0]})
        assert hangs.judge(now, states) is None
    hangs.see(21, {0: states[0]})
    verdict = hangs.judge(21, states)
    assert verdict is not None
    assert 1 in verdict.ranks


def test_steps_with_a_pause_do_not_count():
    times = StepTimes()
    for now, step, phase in [
        (0, 1, "update"),
        (1, 2, "update"),
        (2, 2, "evaluation"),
        (500, 3, "data"),
        (503, 4, "data"),
    ]:
        times.see(float(now), state(step, phase))
    assert times.p99 == 3.0


def hang(
    *, does: str = "runs", reason: str | None = None, to_blame: tuple[int, ...] = (1,)
) -> Hang:
    ranks = [
        {
            "rank": 0,
            "step": 5,
            "phase": "backward",
            "does": "waits",
            "last": "all_gather 9, 'blocks.0' (1.0 MiB)",
        },
        {"rank": 1, "step": 5, "phase": "forward", "does": does, "last": "small 4, 'step' (64 B)"},
    ]
    stack = (
        'Thread 0x01 (most recent call first):\n  File "board.py", line 1 in _watch\n\n'
        'Current thread 0x02 (most recent call first):\n  File "train.py", line 7 in forward\n'
    )
    frame = {"ranks": ranks, "to_blame": list(to_blame), "limit_s": 5.0, "key": "limits.hang_s"}
    places = [RankPlace(rank=rank, host="node", local_rank=rank, device="cpu") for rank in range(2)]
    plan = LaunchPlan(ranks=places)
    return Hang(frame | {"reason": reason, "stacks": {1: stack}, "logs": {}}, plan, Path("/runs/a"))


def test_a_stuck_rank_is_told_with_its_stack_and_the_last_collective_of_each():
    told = hang().describe()
    stuck = "rank 1 of 2 (node, cpu) is stuck in forward of step 5"
    assert f"no progress for 5 s (limits.hang_s): {stuck}" in told
    assert 'File "train.py", line 7 in forward' in told
    assert "_watch" not in told
    assert "rank 0 waits in backward of step 5, last: all_gather 9, 'blocks.0' (1.0 MiB)" in told
    assert "rank 1 runs in forward of step 5, last: small 4, 'step' (64 B)" in told
    assert "raise limits.hang_s" in told


def test_a_rank_that_waits_for_a_message_names_it_and_the_stage_that_sends_it() -> None:
    seen = hang()
    seen.frame["ranks"][0]["awaits"] = {
        "what": "gradients of micro-batch 2",
        "ranks": [1],
        "is_message": True,
    }
    places = [place.model_copy(update={"pp": place.rank}) for place in seen.plan.ranks]
    told = replace(seen, plan=LaunchPlan(ranks=places)).describe()
    assert "rank 1 of 2 (node, cpu, pp 1) is stuck in forward of step 5" in told
    what = "waits for gradients of micro-batch 2 from rank 1 (stage 1)"
    assert f"rank 0 (pp 0) {what} in backward of step 5, last: all_gather 9" in told


def test_a_rank_that_waits_for_a_collective_names_it_and_who_does_not_come() -> None:
    seen = hang()
    what = "all_gather 9, 'blocks.0' (1.0 MiB)"
    seen.frame["ranks"][0]["awaits"] = {"what": what, "ranks": [1], "is_message": False}
    assert f"rank 0 waits for rank 1 in backward of step 5: {what}\n" in seen.describe()


def test_a_stopped_rank_and_ranks_that_wait_for_each_other_are_told_apart():
    assert (
        "rank 1 of 2 (node, cpu) is stopped by a signal or a debugger in forward of step 5"
        in hang(does="is stopped").headline
    )
    both = hang(does="waits", reason="all ranks wait in step 5: ...", to_blame=(0, 1))
    assert "all ranks wait for each other at step 5" in both.headline
    assert "zero.leaf" in both.advice


def test_who_waits_for_its_disk_is_told_with_it(tmp_path: Path) -> None:
    boards = [FlightRecorder(tmp_path / "board", rank, range(2), 2) for rank in range(2)]
    observer = Observer(FlightRecorderView(tmp_path / "board", range(2)), tmp_path)
    boards[0].waiting(True)
    myself = Process.find(os.getpid())
    assert myself is not None
    with boards[1].wait_for_tier("its disk (/scratch)"):
        frame = observer.report_hang({0: myself, 1: myself})
    assert [told["does"] for told in frame["ranks"]] == [
        "waits",
        "has waited 0 s for its disk (/scratch)",
    ]
    told = hang(does="has waited 65 s for its disk (/scratch)")
    assert told.headline.endswith(
        ": rank 1 of 2 has waited 65 s for its disk (/scratch) in forward of step 5"
    )
    assert "if it is only slow, raise limits.hang_s" in told.advice


def test_failure_json_has_the_fields_of_any_failure():
    report = hang().to_json()
    assert (report["rank"], report["host"], report["step"], report["phase"]) == (
        1,
        "node",
        5,
        "forward",
    )
    assert report["exit_code"] == ExitCode.HANG
    assert {
        "kind",
        "message",
        "traceback",
        "log",
        "last_lines",
        "what_to_do",
        "time",
    } <= report.keys()


def saw(*ranks: int, does: str = "waits") -> dict[str, Any]:
    told = [
        {"rank": rank, "step": 5, "phase": "forward", "does": does, "last": "small 4"}
        for rank in ranks
    ]
    found = {"disagreement": None, "stalemate": "all ranks wait"}
    return {
        "ranks": told,
        **found,
        "stacks": {str(rank): f"stack {rank}" for rank in ranks},
        "logs": {},
    }


def test_what_several_agents_saw_becomes_one_finding():
    investigation = HangInvestigation(
        HungRanks([2], 5.0, "limits.hang_s"), {rank: state() for rank in range(3)}, 100.0
    )
    investigation.hear(saw(0, 1))
    assert not investigation.is_over(101.0)
    investigation.hear(saw(2, does="is stopped"))
    assert investigation.is_over(101.0)
    found = investigation.finding()
    assert [told["does"] for told in found["ranks"]] == ["waits", "waits", "is stopped"]
    assert (found["to_blame"], found["reason"], found["stacks"][2]) == ([2], None, "stack 2")


def test_a_host_that_does_not_answer_is_to_blame():
    investigation = HangInvestigation(
        HungRanks([0, 1], 5.0, "limits.hang_s"), {rank: state() for rank in range(2)}, 100.0
    )
    investigation.hear(saw(0))
    assert investigation.is_over(110.0)
    found = investigation.finding()
    assert (found["to_blame"], found["ranks"][1]["does"]) == ([1], "is silent")
    assert "rank 1 of 2 (node, cpu) is silent" in Hang(found, hang().plan, Path("/runs/a")).headline


def test_only_a_single_host_knows_that_all_ranks_wait_for_one_of_them():
    investigation = HangInvestigation(
        HungRanks([0, 1], 5.0, "limits.hang_s"), {rank: state() for rank in range(2)}, 100.0
    )
    investigation.hear(saw(0, 1))
    assert investigation.finding()["reason"] == "all ranks wait"


def test_nobody_waits_for_each_other_while_one_rank_works():
    investigation = HangInvestigation(
        HungRanks([1], 5.0, "limits.hang_s"), {rank: state() for rank in range(2)}, 100.0
    )
    seen = saw(0, 1)
    seen["ranks"][1]["does"] = "runs"
    investigation.hear(seen)
    found = investigation.finding()
    assert found["reason"] is None
    told = Hang(found, hang().plan, Path("/runs/a"))
    assert "rank 1 of 2 (node, cpu) is stuck in forward of step 5" in told.headline
    assert (
        told.advice == "see in the stack what it waits for; if it is only slow, raise limits.hang_s"
    )


def test_the_way_between_two_hosts_is_named_once_by_whichever_end_knows_it():
    def deaf(rank: int, own: str, other: str) -> dict[str, Any]:
        return saw(rank) | {"addresses": ["127.0.0.1", own], "unanswered": [other]}

    investigation = HangInvestigation(
        HungRanks([0, 1], 5.0, "limits.hang_s"), {rank: state() for rank in range(3)}, 100.0
    )
    investigation.hear(deaf(0, "10.0.0.1", "10.0.0.2"))
    investigation.hear(deaf(1, "10.0.0.2", "10.0.0.1"))
    investigation.hear(deaf(2, "10.0.0.3", "10.9.9.9"))
    places = [RankPlace(rank=n, host=f"node{n + 1}", local_rank=0, device="cpu") for n in range(3)]
    told = Hang(investigation.finding(), LaunchPlan(ranks=places), Path("/runs/a"))
    assert told.links == [
        "the network between node1 and node2 is cut: node2 (10.0.0.2) does not answer node1",
        "the network between node3 and 10.9.9.9 is cut: 10.9.9.9 does not answer node3",
    ]
    assert told.headline == f"no progress for 5 s (limits.hang_s): {told.links[0]}"
    assert told.links[1] in told.describe()
    assert "repair the network" in told.advice


def test_data_that_was_sent_again_and_again_shows_in_the_tables_of_the_kernel(
    tmp_path: Path,
) -> None:
    own, other = socket.socketpair()
    mine, foreign = os.fstat(own.fileno()).st_ino, 1
    rows = [  # ends, state, queues, timer, times sent anew, ..., inode
        f"0: 0100007F:0016 0302A8C0:A1B2 01 00000040:00000000 01:00000014 00000005 0 0 {mine} 2",
        f"1: 0100007F:0016 0402A8C0:A1B2 01 00000040:00000000 01:00000014 00000001 0 0 {mine} 2",
        f"2: 0100007F:0016 0502A8C0:A1B2 01 00000040:00000000 01:00000014 00000009 0 0 {foreign} 2",
        f"3: 0100007F:0016 0602A8C0:A1B2 02 00000040:00000000 01:00000014 00000009 0 0 {mine} 2",
    ]
    (tmp_path / "tcp").write_text("\n".join(["sl local_address", *rows]))
    mapped, plain = "0000000000000000FFFF00000702A8C0", "B80D01200000000000000000010000FE"
    rows = [
        f"{number}: 00:0016 {address}:A1B2 01 0:0 01:0 00000003 0 0 {mine} 2"
        for number, address in enumerate((mapped, plain))
    ]
    (tmp_path / "tcp6").write_text("\n".join(["sl local_address", *rows]))
    assert unanswered([os.getpid(), 1 << 30], tmp_path) == [
        "192.168.2.3",
        "192.168.2.7",
        "2001:db8::fe00:1",
    ]
    own.close()
    other.close()
    assert unanswered([os.getpid()]) == []
    assert "127.0.0.1" in own_addresses()


def test_after_two_steps_ranks_hold_what_they_need(tmp_path: Path) -> None:
    board = FlightRecorder(tmp_path / "board", 0, range(1), 1)
    observer = Observer(FlightRecorderView(tmp_path / "board", range(1)), tmp_path)
    assert not observer.have_allocated_all([0])
    for step, holds in ((7, False), (8, False), (9, True)):  # it resumes with step 7
        board.step(step)
        assert observer.have_allocated_all([0]) is holds
