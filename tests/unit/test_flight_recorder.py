"""Ranks that name different modules are told apart, in words, and only then is a rank stopped."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zrun_core.distributed import comm
from zrun_core.distributed.transport import Group
from zrun_core.errors import HangError
from zrun_core.spine.flight_recorder import FlightRecorder, FlightRecorderView, IssuedOp, Watchdog


def over(*ranks: int, axis: str = "world") -> Group:
    return Group(axis, ranks, 0, None)


WORLD = over(0, 1, 2)


def history(board: FlightRecorder, rank: int, kind: str) -> dict[int, IssuedOp]:
    (found,) = [line.issues for line in board.lines(rank).values() if line.kind == kind]
    return found


@pytest.fixture
def boards(tmp_path: Path) -> list[FlightRecorder]:
    return [FlightRecorder(tmp_path / "board", rank, range(3), 3) for rank in range(3)]


def test_ranks_that_agree_have_nothing_to_say(boards):
    for board in boards[:2]:
        for name in ("a", "b", "c"):
            board.issue("all_gather", WORLD, name)
    boards[0].issue("all_gather", WORLD, "d")  # ahead of the others
    assert [board.disagreement() for board in boards] == [None, None, None]


def test_a_disagreement_names_the_modules_the_ranks_and_what_to_write(boards):
    for rank, board in enumerate(boards):
        board.step(7)
        board.issue("all_gather", WORLD, "embed")
        board.issue("reduce_scatter", WORLD, "embed")
        board.issue("all_gather", WORLD, "experts.1" if rank == 2 else "experts.0")
    text = boards[0].disagreement()
    assert text is not None
    assert "all_gather 2 of step 7" in text
    assert "rank 0 is at 'experts.0'" in text
    assert "rank 2 at 'experts.1'" in text
    assert "zero.leaf" in text
    assert "'experts.1'" in (boards[2].disagreement() or "")


def test_a_mean_that_one_hook_alone_asks_for_is_called_that(boards):
    for board in boards:
        board.step(3)
    boards[0].issue("small", WORLD, "mean() in hooks.on_step", 8)
    boards[1].issue("small", WORLD, "step", 8)
    told = boards[1].disagreement() or ""
    assert "at 'mean() in hooks.on_step' (8 B). A hook called context.mean() on some ranks" in told
    boards[2].issue("small", WORLD, "step", 8)
    for _ in range(2):
        boards[0].issue("small", WORLD, "mean() in hooks.on_step", 8)
        boards[1].issue("all_gather", WORLD, "embed")
    told = boards[2].stalemate() or ""
    assert "rank 0 for small 3, 'mean() in hooks.on_step', to which rank 1 does not" in told
    assert "A hook called" in told


def test_the_history_is_a_ring_and_lags_do_not_matter(boards):
    for number in range(100):
        boards[0].issue("all_reduce", WORLD, f"unit {number}")
    for number in range(80):
        boards[1].issue("all_reduce", WORLD, f"unit {number}")
    assert boards[0].disagreement() is None
    assert len(history(boards[2], 0, "all_reduce")) == 32
    boards[1].issue("all_reduce", WORLD, "other")
    assert "all_reduce 81" in (boards[0].disagreement() or "")


def test_every_kind_of_collective_has_a_place(boards):
    sources = (Path(comm.__file__)).read_text()
    kinds = set(re.findall(r'self\._count\("(\w+)"', sources))
    assert {"push", "all_gather", "small"} <= kinds
    for kind in kinds:
        boards[0].issue(kind, WORLD, "unit")
        assert len(history(boards[1], 0, kind)) == 1


def test_long_names_are_cut_and_states_are_seen(boards):
    boards[0].issue("small", WORLD, "ü" * 200)
    assert history(boards[1], 0, "small")[1].name.startswith("üüü")
    boards[0].step(3)
    boards[0].phase("backward")
    boards[0].waiting(True)
    state = boards[1].state(0)
    assert (state.step, state.waiting, state.num_waits, state.phase, state.pid) == (
        3,
        True,
        1,
        "backward",
        os.getpid(),
    )
    boards[0].waiting(False)
    after = boards[1].state(0)
    assert (after.waiting, after.num_waits) == (False, 1)
    assert after.progress == state.progress + 1


def test_the_last_collective_is_told_with_its_size(boards):
    assert boards[1].last(0) is None
    boards[0].issue("all_gather", WORLD, "embed", 4096)
    boards[0].issue("small", WORLD, "step", 64)
    boards[0].issue("all_gather", WORLD, "blocks.0", 3 << 20)
    assert str(boards[1].last(0)) == "all_gather 2, 'blocks.0' (3.0 MiB)"


def test_a_new_run_forgets_an_earlier_one_in_the_same_file(tmp_path):
    FlightRecorder(tmp_path / "board", 0, range(2), 2).issue("small", WORLD, "old")
    assert FlightRecorder(tmp_path / "board", 0, range(2), 2).lines(0) == {}


class Stopped:
    """What `stop` was called with. The real one ends the process."""

    def __init__(self) -> None:
        self.errors: list[HangError] = []
        self.event = threading.Event()

    def __call__(self, error: HangError) -> None:
        self.errors.append(error)
        self.event.set()


def test_the_watchdog_stops_a_rank_that_waits_on_a_disagreement(boards):
    stopped = Stopped()
    watchdog = Watchdog(boards[0], stopped, patience_s=0.04)
    boards[0].issue("all_gather", WORLD, "left")
    boards[1].issue("all_gather", WORLD, "right")
    time.sleep(0.15)
    assert not stopped.errors, "a rank that works is left alone"
    boards[0].waiting(True)
    assert stopped.event.wait(5)
    watchdog.close()
    assert "'left'" in str(stopped.errors[0])
    assert "'right'" in str(stopped.errors[0])


def test_the_watchdog_leaves_long_waits_alone(boards):
    stopped = Stopped()
    watchdog = Watchdog(boards[0], stopped, patience_s=0.02)
    boards[0].issue("all_gather", WORLD, "left")
    boards[0].waiting(True)
    time.sleep(0.15)
    watchdog.close()
    assert not stopped.errors, "the other rank is merely late"


def test_a_disagreement_that_is_gone_at_the_second_look_was_half_written(boards, monkeypatch):
    looks = iter(["ranks disagree", None, "ranks disagree", *[None] * 1000])
    monkeypatch.setattr(boards[0], "disagreement", lambda: next(looks))
    stopped = Stopped()
    watchdog = Watchdog(boards[0], stopped, patience_s=0.02)
    boards[0].waiting(True)
    time.sleep(0.15)
    watchdog.close()
    assert not stopped.errors


def test_the_watchdog_stops_ranks_that_all_wait_for_different_things(boards):
    stopped = Stopped()
    boards[1].issue("all_gather", WORLD, "extra")
    for board in boards:
        board.issue("small", WORLD, "evaluation")
    boards[1].waiting(True)
    boards[2].waiting(True)
    watchdog = Watchdog(boards[2], stopped, patience_s=0.02)
    time.sleep(0.3)
    assert not stopped.errors, "the first rank still works"
    boards[0].waiting(True)
    assert stopped.event.wait(5)
    watchdog.close()
    assert "rank 1 for all_gather 1, 'extra', to which rank 0 does not come" in str(
        stopped.errors[0]
    )


def test_a_halted_process_is_late_and_no_stalemate(boards, tmp_path):
    """A rank that was sent SIGSTOP while it waits may still come: its peers must not be told that it disagrees."""
    code = (
        "import sys, os, signal\nfrom pathlib import Path\nfrom zrun_core.spine.flight_recorder import FlightRecorder\n"
        "board = FlightRecorder(Path(sys.argv[1]), 0, range(3), 3)\n"
        "board.waiting(True)\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "board")])
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        boards[1].issue("all_gather", WORLD, "extra")
        assert boards[1].state(0).is_halted
        assert boards[1].stalemate() is None
    finally:
        process.kill()
        process.wait()
    assert boards[1].stalemate() is not None


def test_a_loop_that_tells_no_steps_has_its_own_advice(tmp_path):
    boards = [FlightRecorder(tmp_path / "board", rank, range(2), 2, "Do this") for rank in range(2)]
    boards[0].issue("all_gather", over(0, 1), "extra")
    assert boards[0].stalemate() == (
        "all ranks wait: rank 0 for all_gather 1, 'extra', to which rank 1 does not come. Do this"
    )
    boards[1].issue("all_gather", over(0, 1), "other")
    assert boards[0].disagreement() == (
        "ranks disagree on all_gather 1: rank 0 is at 'extra' (0 B), rank 1 at 'other' (0 B). Do this"
    )


@pytest.mark.parametrize(
    ("world_size", "waits", "late"), [(3, [0, 2], [1]), (3, [0], [1, 2]), (6, [0, 1, 2], [])]
)
def test_who_is_waited_for_is_told_once_each_time(tmp_path, world_size, waits, late):
    boards = [FlightRecorder(tmp_path / "board", rank, range(3), world_size) for rank in range(3)]
    told: queue.Queue[list[int]] = queue.Queue()
    for rank in waits:
        boards[rank].waiting(True)
    watchdog = Watchdog(boards[1], Stopped(), patience_s=0.02, late=told.put, late_s=0.05)
    assert told.get(timeout=5) == late
    boards[0].tick()  # something moved: it begins anew
    assert told.get(timeout=5) == late
    watchdog.close()
    assert told.empty()


@pytest.mark.parametrize("waits", [[], [0, 1, 2]])
def test_nobody_is_late_where_all_compute_or_all_wait(boards, waits):
    told: queue.Queue[list[int]] = queue.Queue()
    for rank in waits:
        boards[rank].waiting(True)
    watchdog = Watchdog(boards[1], Stopped(), patience_s=0.02, late=told.put, late_s=0.03)
    time.sleep(0.2)
    watchdog.close()
    assert told.empty()


def test_groups_of_one_host_are_not_compared_with_each_other(tmp_path):
    """Two stages of two ranks each: other units, at other numbers, and messages between them."""
    boards = [FlightRecorder(tmp_path / "board", rank, range(4), 4) for rank in range(4)]
    for rank, board in enumerate(boards):
        pair = over(0, 1, axis="shard") if rank < 2 else over(2, 3, axis="shard")
        for number in range(3 if rank < 2 else 5):
            board.issue("all_gather", pair, f"blocks.{number + 6 * (rank // 2)}")
        neighbours = over(rank % 2, rank % 2 + 2, axis="pipe")
        board.issue("receive" if rank > 1 else "send", neighbours, "hidden")
        board.issue("small", over(0, 1, 2, 3), "step")
        board.waiting(True)
    assert [board.disagreement() for board in boards] == [None] * 4
    assert [board.stalemate() for board in boards] == [None] * 4


@pytest.fixture
def pairs(tmp_path: Path) -> list[FlightRecorder]:
    """Ranks 0 and 1 gather, and so do 2 and 3, all the same number of times."""
    boards = [FlightRecorder(tmp_path / "board", rank, range(4), 4) for rank in range(4)]
    for rank, board in enumerate(boards):
        board.step(5)
        board.issue("all_gather", over(0, 1) if rank < 2 else over(2, 3, axis="shard"), "embed")
    return boards


def test_a_disagreement_within_one_group_names_it(pairs, tmp_path):
    for rank in (2, 3):
        pairs[rank].issue("all_gather", over(2, 3, axis="shard"), f"experts.{rank}")
    assert [board.disagreement() is None for board in pairs] == [True, True, False, False]
    told = pairs[2].disagreement() or ""
    assert told.startswith(
        "ranks disagree on all_gather 2 over shard (ranks 2, 3) of step 5: "
        "rank 2 is at 'experts.2' (0 B), rank 3 at 'experts.3' (0 B). Some modules"
    )
    assert str(pairs[0].last(3)) == "all_gather 2 over shard (ranks 2, 3), 'experts.3' (0 B)"
    assert FlightRecorderView(tmp_path / "board", range(4)).disagreement() == told, (
        "the agent sees all groups"
    )


def test_a_stalemate_within_one_group_names_it(pairs):
    pairs[3].issue("all_gather", over(2, 3, axis="shard"), "experts.3")
    for rank in (0, 1, 2):
        pairs[rank].issue("small", over(0, 1, 2, 3), "step")
    told = pairs[0].stalemate() or ""
    what = "all_gather 2 over shard (ranks 2, 3), 'experts.3'"
    assert f"step 5: rank 3 for {what}, to which rank 2 does not come" in told


def test_equal_groups_of_two_axes_are_counted_together(boards):
    boards[0].issue("small", over(0, 1, 2, axis="host"), "host memory")
    boards[0].issue("small", WORLD, "step")
    assert str(boards[1].last(0)) == "small 2, 'step' (0 B)"


@pytest.mark.parametrize("is_sent", [True, False])
def test_who_waits_for_a_message_is_told_without_advice(boards, is_sent):
    """Also where receives were posted ahead."""
    kind, rank, other = ("send", 0, 2) if is_sent else ("receive", 2, 0)
    answer = "receive" if is_sent else "send"
    pair = over(0, 2, axis="pipe")
    for number in range(4):
        boards[rank].issue(kind, pair, f"hidden of {number}")
    for number in range(2):
        boards[other].issue(answer, pair, f"hidden of {number}")
    assert boards[1].disagreement() is None
    where = "to rank 2" if is_sent else "from rank 0"
    told = f"rank {rank} for {kind} 3 {where}, 'hidden of 2', to which rank {other} does not come."
    assert boards[1].stalemate() == f"all ranks wait: {told}"
    boards[0].issue("small", WORLD, "step")
    assert "rank 0 for small 1, 'step'" in (boards[1].stalemate() or ""), "this says more"


def test_messages_in_another_order_are_no_disagreement(boards):
    pair = over(0, 2, axis="pipe")
    for first, second, board in (("a", "b", boards[0]), ("b", "a", boards[2])):
        board.issue("send" if board is boards[0] else "receive", pair, first)
        board.issue("send" if board is boards[0] else "receive", pair, second)
    assert [board.disagreement() for board in boards] == [None] * 3
    assert boards[0].stalemate() is None


def test_more_groups_than_a_page_has_lines_are_not_compared_but_counted_as_progress(boards):
    for number in range(100):
        for rank in (0, 1):
            boards[rank].issue("small", over(0, 1, 10 + number), f"{number} of {rank}")
    assert "'0 of 0'" in (boards[0].disagreement() or "")
    assert len(boards[2].lines(0)) == 40
    before = boards[0].state(0).progress
    boards[0].issue("small", over(0, 1, 109), "more")
    assert boards[0].state(0).progress > before


def test_ranks_of_other_hosts_are_members_that_nobody_here_can_see(tmp_path):
    """The second host of three, with more ranks than a line has room for."""
    here = range(300, 600)
    boards = {rank: FlightRecorder(tmp_path / "board", rank, here, 900) for rank in (300, 301, 599)}
    everyone = over(*range(900))
    for rank, board in boards.items():
        board.issue("small", everyone, f"of {rank}")
    assert "rank 301 at 'of 301'" in (boards[300].disagreement() or "")
    line = next(iter(boards[300].lines(300).values()))
    assert line.members == tuple(range(300, 556))
    across = over(*range(100_000, 100_000 + 24, 3), 200_000, axis="replicate")
    boards[300].issue("small", across, "x")
    assert str(boards[300].last(300)).endswith("100018, 100021, ...), 'x' (0 B)")
