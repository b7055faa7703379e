"""Ranks that name different modules are told apart, in words, and only then is a rank stopped."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zrun_core.distributed import comm
from zrun_core.distributed.line import Line
from zrun_core.distributed.transport import Group
from zrun_core.errors import PeerError, ZrunError
from zrun_core.guards.watchdog import Watchdog
from zrun_core.hardware.accelerator import TimingEvent
from zrun_core.hardware.clock import Stretch, Unpassed
from zrun_core.spine.flight_page import IssuedOp
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.spine.flight_view import FlightRecorderView


def over(*ranks: int, axis: str = "world") -> Group:
    return Group(axis, ranks, 0, None)


WORLD = over(0, 1, 2)


def history(recorder: FlightRecorder, rank: int, kind: str) -> dict[int, IssuedOp]:
    (found,) = [record.ops for record in recorder.records(rank).values() if record.kind == kind]
    return found


@pytest.fixture
def recorders(tmp_path: Path) -> list[FlightRecorder]:
    return [FlightRecorder(tmp_path / "board", rank, range(3), 3) for rank in range(3)]


def test_ranks_that_agree_have_nothing_to_say(recorders):
    for recorder in recorders[:2]:
        for name in ("a", "b", "c"):
            recorder.issue("all_gather", WORLD, name)
    recorders[0].issue("all_gather", WORLD, "d")  # ahead of the others
    assert [recorder.disagreement() for recorder in recorders] == [None, None, None]


def test_a_disagreement_names_the_modules_the_ranks_and_what_to_write(recorders):
    for rank, recorder in enumerate(recorders):
        recorder.step(7)
        recorder.issue("all_gather", WORLD, "embed")
        recorder.issue("reduce_scatter", WORLD, "embed")
        recorder.issue("all_gather", WORLD, "experts.1" if rank == 2 else "experts.0")
    text = recorders[0].disagreement()
    assert text is not None
    assert "all_gather 2 of step 7" in text
    assert "rank 0 is at 'experts.0'" in text
    assert "rank 2 at 'experts.1'" in text
    assert "zero.leaf" in text
    assert "'experts.1'" in (recorders[2].disagreement() or "")


def test_a_mean_that_one_hook_alone_asks_for_is_called_that(recorders):
    for recorder in recorders:
        recorder.step(3)
    recorders[0].issue("small", WORLD, "mean() in hooks.on_step", 8)
    recorders[1].issue("small", WORLD, "step", 8)
    told = recorders[1].disagreement() or ""
    assert "at 'mean() in hooks.on_step' (8 B). A hook called context.mean() on some ranks" in told
    recorders[2].issue("small", WORLD, "step", 8)
    for _ in range(2):
        recorders[0].issue("small", WORLD, "mean() in hooks.on_step", 8)
        recorders[1].issue("all_gather", WORLD, "embed")
    told = recorders[2].stalemate() or ""
    assert "rank 0 for small 3, 'mean() in hooks.on_step', which rank 1 does not reach" in told
    assert "A hook called" in told


def test_the_history_is_a_ring_and_lags_do_not_matter(recorders):
    for number in range(100):
        recorders[0].issue("all_reduce", WORLD, f"unit {number}")
    for number in range(80):
        recorders[1].issue("all_reduce", WORLD, f"unit {number}")
    assert recorders[0].disagreement() is None
    assert len(history(recorders[2], 0, "all_reduce")) == 32
    recorders[1].issue("all_reduce", WORLD, "other")
    assert "all_reduce 81" in (recorders[0].disagreement() or "")


def test_every_kind_of_collective_has_a_place(recorders):
    sources = (Path(comm.__file__)).read_text()
    kinds = set(re.findall(r'self\._issuing\("(\w+)"', sources))
    assert {"push", "all_gather", "small"} <= kinds
    for kind in kinds:
        recorders[0].issue(kind, WORLD, "unit")
        assert len(history(recorders[1], 0, kind)) == 1


def test_long_names_are_cut_and_states_are_seen(recorders):
    recorders[0].issue("small", WORLD, "ü" * 200)
    assert history(recorders[1], 0, "small")[1].name.startswith("üüü")
    recorders[0].step(3)
    recorders[0].phase("backward")
    recorders[0].waiting(True)
    state = recorders[1].state(0)
    assert (state.step, state.waiting, state.num_waits, state.phase, state.pid) == (
        3,
        True,
        1,
        "backward",
        os.getpid(),
    )
    recorders[0].waiting(False)
    after = recorders[1].state(0)
    assert (after.waiting, after.num_waits) == (False, 1)
    assert after.progress == state.progress + 1


def test_a_rank_that_waits_for_its_disk_is_at_work_and_says_so(recorders):
    stopped = Stopped()
    recorders[1].issue("all_gather", WORLD, "extra")
    for recorder in recorders[1:]:
        recorder.waiting(True)
    before = recorders[1].state(0)
    watchdog = Watchdog(recorders[1], stopped, patience_s=0.01)
    with recorders[0].wait_for_tier("its disk (/scratch)"):
        found = recorders[1].tier_wait(0)
        assert found is not None
        assert re.fullmatch(r"has waited \d+ s for its disk \(/scratch\)", str(found))
        inside = recorders[1].state(0)
        assert (inside.waiting, inside.progress) == (False, before.progress + 1)
        time.sleep(0.15)
    watchdog.close()
    assert not stopped.errors, "others wait for it, which is no stalemate"
    assert recorders[1].tier_wait(0) is None
    assert recorders[1].state(0).progress == inside.progress + 1


def test_a_failed_wait_for_a_tier_is_over(recorders):
    def fail() -> None:
        found = recorders[1].tier_wait(0)
        assert found is not None
        assert found.what.startswith("üüü")
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"), recorders[0].wait_for_tier("ü" * 300):
        fail()
    assert recorders[1].tier_wait(0) is None


def test_the_last_collective_is_told_with_its_size(recorders):
    assert recorders[1].last(0) is None
    recorders[0].issue("all_gather", WORLD, "embed", 4096)
    recorders[0].issue("small", WORLD, "step", 64)
    recorders[0].issue("all_gather", WORLD, "blocks.0", 3 << 20)
    assert str(recorders[1].last(0)) == "all_gather 2, 'blocks.0' (3.0 MiB)"


def test_a_new_run_forgets_an_earlier_one_in_the_same_file(tmp_path):
    FlightRecorder(tmp_path / "board", 0, range(2), 2).issue("small", WORLD, "old")
    assert FlightRecorder(tmp_path / "board", 0, range(2), 2).records(0) == {}


class Stopped:
    """What `stop` was called with. The real one ends the process."""

    def __init__(self) -> None:
        self.errors: list[ZrunError] = []
        self.event = threading.Event()

    def __call__(self, error: ZrunError) -> None:
        self.errors.append(error)
        self.event.set()


def test_the_watchdog_stops_a_rank_that_waits_on_a_disagreement(recorders):
    stopped = Stopped()
    watchdog = Watchdog(recorders[0], stopped, patience_s=0.04)
    recorders[0].issue("all_gather", WORLD, "left")
    recorders[1].issue("all_gather", WORLD, "right")
    time.sleep(0.15)
    assert not stopped.errors, "a rank that works is left alone"
    recorders[0].waiting(True)
    assert stopped.event.wait(5)
    watchdog.close()
    assert "'left'" in str(stopped.errors[0])
    assert "'right'" in str(stopped.errors[0])


def test_the_watchdog_leaves_long_waits_alone(recorders):
    stopped = Stopped()
    watchdog = Watchdog(recorders[0], stopped, patience_s=0.02)
    recorders[0].issue("all_gather", WORLD, "left")
    recorders[0].waiting(True)
    time.sleep(0.15)
    watchdog.close()
    assert not stopped.errors, "the other rank is merely late"


def test_a_disagreement_that_is_gone_at_the_second_look_was_half_written(recorders, monkeypatch):
    looks = iter(["ranks disagree", None, "ranks disagree", *[None] * 1000])
    monkeypatch.setattr(recorders[0], "disagreement", lambda: next(looks))
    stopped = Stopped()
    watchdog = Watchdog(recorders[0], stopped, patience_s=0.02)
    recorders[0].waiting(True)
    time.sleep(0.15)
    watchdog.close()
    assert not stopped.errors


def test_the_watchdog_stops_ranks_that_all_wait_for_different_things(recorders):
    stopped = Stopped()
    recorders[1].issue("all_gather", WORLD, "extra")
    for recorder in recorders:
        recorder.issue("small", WORLD, "evaluation")
    recorders[1].waiting(True)
    recorders[2].waiting(True)
    watchdog = Watchdog(recorders[2], stopped, patience_s=0.02)
    time.sleep(0.3)
    assert not stopped.errors, "the first rank still works"
    recorders[0].waiting(True)
    assert stopped.event.wait(5)
    watchdog.close()
    assert "rank 1 for all_gather 1, 'extra', which rank 0 does not reach" in str(stopped.errors[0])


def test_a_halted_process_is_late_and_no_stalemate(recorders, tmp_path):
    """A rank that was sent SIGSTOP while it waits may still come: its peers must not be told that
    it disagrees.
    """
    code = (
        "import sys, os, signal\nfrom pathlib import Path\nfrom zrun_core.spine.flight_recorder "
        "import FlightRecorder\n"
        "board = FlightRecorder(Path(sys.argv[1]), 0, range(3), 3)\n"
        "board.waiting(True)\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "board")])
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        recorders[1].issue("all_gather", WORLD, "extra")
        assert recorders[1].state(0).is_halted
        assert recorders[1].stalemate() is None
    finally:
        process.kill()
        process.wait()
    assert recorders[1].stalemate() is not None


def test_a_loop_that_tells_no_steps_has_its_own_advice(tmp_path):
    recorders = [
        FlightRecorder(tmp_path / "board", rank, range(2), 2, "Do this") for rank in range(2)
    ]
    recorders[0].issue("all_gather", over(0, 1), "extra")
    assert recorders[0].stalemate() == (
        "all ranks wait: rank 0 for all_gather 1, 'extra', which rank 1 does not reach. Do this"
    )
    recorders[1].issue("all_gather", over(0, 1), "other")
    assert recorders[0].disagreement() == (
        "ranks disagree on all_gather 1: rank 0 is at 'extra' (0 B), rank 1 at 'other' (0 B). Do "
        "this"
    )


@pytest.mark.parametrize(
    ("world_size", "waits", "late"), [(3, [0, 2], [1]), (3, [0], [1, 2]), (6, [0, 1, 2], [])]
)
def test_who_is_waited_for_is_told_once_each_time(tmp_path, world_size, waits, late):
    recorders = [
        FlightRecorder(tmp_path / "board", rank, range(3), world_size) for rank in range(3)
    ]
    told: queue.Queue[list[int]] = queue.Queue()
    for rank in waits:
        recorders[rank].waiting(True)
    watchdog = Watchdog(recorders[1], Stopped(), patience_s=0.02, late=told.put, late_s=0.05)
    assert told.get(timeout=5) == late
    recorders[0].tick()  # something moved: it begins anew
    assert told.get(timeout=5) == late
    watchdog.close()
    assert told.empty()


@pytest.mark.parametrize("waits", [[], [0, 1, 2]])
def test_nobody_is_late_where_all_compute_or_all_wait(recorders, waits):
    told: queue.Queue[list[int]] = queue.Queue()
    for rank in waits:
        recorders[rank].waiting(True)
    watchdog = Watchdog(recorders[1], Stopped(), patience_s=0.02, late=told.put, late_s=0.03)
    time.sleep(0.2)
    watchdog.close()
    assert told.empty()


def test_groups_of_one_host_are_not_compared_with_each_other(tmp_path):
    """Two stages of two ranks each: other units, at other numbers, and messages between them."""
    recorders = [FlightRecorder(tmp_path / "board", rank, range(4), 4) for rank in range(4)]
    for rank, recorder in enumerate(recorders):
        pair = over(0, 1, axis="shard") if rank < 2 else over(2, 3, axis="shard")
        for number in range(3 if rank < 2 else 5):
            recorder.issue("all_gather", pair, f"blocks.{number + 6 * (rank // 2)}")
        neighbours = over(rank % 2, rank % 2 + 2, axis="pipe")
        recorder.issue("receive" if rank > 1 else "send", neighbours, "hidden")
        recorder.issue("small", over(0, 1, 2, 3), "step")
        recorder.waiting(True)
    assert [recorder.disagreement() for recorder in recorders] == [None] * 4
    assert [recorder.stalemate() for recorder in recorders] == [None] * 4


@pytest.fixture
def pairs(tmp_path: Path) -> list[FlightRecorder]:
    """Ranks 0 and 1 gather, and so do 2 and 3, all the same number of times."""
    recorders = [FlightRecorder(tmp_path / "board", rank, range(4), 4) for rank in range(4)]
    for rank, recorder in enumerate(recorders):
        recorder.step(5)
        recorder.issue("all_gather", over(0, 1) if rank < 2 else over(2, 3, axis="shard"), "embed")
    return recorders


def test_a_disagreement_within_one_group_names_it(pairs, tmp_path):
    for rank in (2, 3):
        pairs[rank].issue("all_gather", over(2, 3, axis="shard"), f"experts.{rank}")
    assert [recorder.disagreement() is None for recorder in pairs] == [True, True, False, False]
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
    assert f"step 5: rank 3 for {what}, which rank 2 does not reach" in told


def test_equal_groups_of_two_axes_are_counted_together(recorders):
    recorders[0].issue("small", over(0, 1, 2, axis="host"), "host memory")
    recorders[0].issue("small", WORLD, "step")
    assert str(recorders[1].last(0)) == "small 2, 'step' (0 B)"


@pytest.mark.parametrize("is_sent", [True, False])
def test_who_waits_for_a_message_is_told_without_advice(recorders, is_sent):
    """Also where receives were posted ahead."""
    kind, rank, other = ("send", 0, 2) if is_sent else ("receive", 2, 0)
    answer = "receive" if is_sent else "send"
    pair = over(0, 2, axis="pipe")
    for number in range(4):
        recorders[rank].issue(kind, pair, f"hidden of {number}")
    for number in range(2):
        recorders[other].issue(answer, pair, f"hidden of {number}")
    assert recorders[1].disagreement() is None
    where = "to rank 2" if is_sent else "from rank 0"
    told = f"rank {rank} for {kind} 3 {where}, 'hidden of 2', which rank {other} does not reach."
    assert recorders[1].stalemate() == f"all ranks wait: {told}"
    recorders[0].issue("small", WORLD, "step")
    assert "rank 0 for small 1, 'step'" in (recorders[1].stalemate() or ""), "this says more"


def test_a_rank_waits_for_the_message_that_nobody_has_sent_yet(tmp_path):
    """Two stages of two ranks each: what one pair lacks is not what the other lacks."""
    recorders = [FlightRecorder(tmp_path / "board", rank, range(4), 4) for rank in range(4)]
    for rank, recorder in enumerate(recorders):
        data = over(0, 1, axis="shard") if rank < 2 else over(2, 3, axis="shard")
        recorder.issue("all_gather", data, f"blocks.{6 * (rank // 2)}")
    for first in (0, 1):
        pair = over(first, first + 2, axis="pipe")
        recorders[first].issue("send", pair, "activations of micro-batch 0")
        recorders[first + 2].issue("receive", pair, "activations of micro-batch 0")
        recorders[first + 2].waiting(True)  # for the device, or its own copy of what has come
        back = over(first + 2, first, axis="pipe_back")
        recorders[first].issue("receive", back, "gradients of micro-batch 0")
        recorders[first].waiting(True)
    recorders[3].issue("send", over(3, 1, axis="pipe_back"), "gradients of micro-batch 0")
    view = FlightRecorderView(tmp_path / "board", range(4))
    ((rank, awaited),) = view.awaited().items()
    assert (rank, awaited.op.name, awaited.ranks) == (0, "gradients of micro-batch 0", (2,))
    recorders[0].waiting(False)
    assert view.awaited() == {}
    assert view.disagreement() is None
    recorders[2].issue("receive", over(0, 2, axis="pipe"), "activations of micro-batch 1")
    recorders[2].waiting(True)
    awaited = view.awaited()[2]
    assert (awaited.op.name, awaited.ranks) == ("activations of micro-batch 1", (0,))


def test_a_rank_waits_for_the_first_collective_that_another_one_does_not_come_to(tmp_path):
    """What it has issued last may be over, or wait for the same rank."""
    recorders = [FlightRecorder(tmp_path / "board", rank, range(4), 4) for rank in range(4)]
    view = FlightRecorderView(tmp_path / "board", range(4))
    for rank, recorder in enumerate(recorders):
        tensor = over(0, 1, axis="tensor") if rank < 2 else over(2, 3, axis="tensor")
        data = over(rank % 2, rank % 2 + 2, axis="data")
        recorder.issue("reduce_scatter", data, "blocks.1")
        if rank != 2:
            recorder.issue("reduce_scatter", data, "blocks.0")
        recorder.issue("all_reduce", tensor, "output of blocks.0")
    assert view.awaited() == {}, "all compute"
    for rank in (0, 1):
        recorders[rank].waiting(True)
    ((rank, awaited),) = view.awaited().items()  # all have come to what rank 1 waits for
    assert str(awaited.op) == "reduce_scatter 2 over data (ranks 0, 2), 'blocks.0' (0 B)"
    assert (rank, awaited.ranks) == (0, (2,))


def test_messages_in_another_order_are_no_disagreement(recorders):
    pair = over(0, 2, axis="pipe")
    for first, second, recorder in (("a", "b", recorders[0]), ("b", "a", recorders[2])):
        recorder.issue("send" if recorder is recorders[0] else "receive", pair, first)
        recorder.issue("send" if recorder is recorders[0] else "receive", pair, second)
    assert [recorder.disagreement() for recorder in recorders] == [None] * 3
    assert recorders[0].stalemate() is None


def test_more_groups_than_a_page_has_lines_are_not_compared_but_counted_as_progress(recorders):
    for number in range(100):
        for rank in (0, 1):
            recorders[rank].issue("small", over(0, 1, 10 + number), f"{number} of {rank}")
    assert "'0 of 0'" in (recorders[0].disagreement() or "")
    assert len(recorders[2].records(0)) == 40
    before = recorders[0].state(0).progress
    recorders[0].issue("small", over(0, 1, 109), "more")
    assert recorders[0].state(0).progress > before


def test_what_a_full_page_does_not_say_is_not_held_against_its_rank(recorders):
    """Rank 0 has come to what the others wait for; its page has no room to say so."""
    for number in range(40):
        recorders[0].issue("small", over(0, 10 + number), "of another host")
    for recorder in recorders:
        recorder.issue("all_gather", WORLD, "unit")
    recorders[0].issue("send", over(0, 1), "hidden")
    recorders[1].issue("receive", over(0, 1), "hidden")
    for recorder in recorders:
        recorder.waiting(True)
    assert [recorder.stalemate() for recorder in recorders] == [None] * 3
    assert recorders[2].awaited() == {}
    assert recorders[2].awaits_in_words(1).startswith("for other ranks, last: receive 1 from rank")
    recorders[1].issue("all_gather", WORLD, "more")
    told = recorders[0].stalemate() or ""
    assert "rank 1 for all_gather 2, 'more', which rank 2 does not reach" in told


NUM_SERVED = 100  # ranks with two lines each: many more than a page has other records


@pytest.fixture
def served(tmp_path: Path) -> list[FlightRecorder]:
    """The pages of a server and its ranks, of which each has pushed and pulled 50 times."""
    ranks = range(NUM_SERVED + 1)
    found = [FlightRecorder(tmp_path / "served", rank, ranks, len(ranks)) for rank in ranks]
    group = over(*ranks)
    for rank in ranks[1:]:
        here, there = Line(replace(group, index=rank), 0), Line(group, rank)
        for _ in range(50):
            talk(found[rank], here, "send", "gradients")
            talk(found[0], there, "receive", "gradients")
            talk(found[rank], here, "receive", "parameters")
            talk(found[0], there, "send", "parameters")
    return found


def talk(recorder: FlightRecorder, line: Line, kind: str, name: str) -> None:
    """Issue a message of a line, as its thread does before it sends or receives."""
    own = comm.Comm(torch.device("cpu"), flight_recorder=recorder)
    own.issue_at(line, kind, name, 8)


def test_a_server_of_many_ranks_has_room_for_its_own_collectives(served):
    for recorder in served:
        for number in range(20):  # of groups that are made after the first window
            for kind in ("all_gather", "small"):
                named = "other" if recorder is served[7] and number == 19 else "unit"
                recorder.issue(kind, over(*range(NUM_SERVED + 1), 1000 + number), named)
    records = served[1].records(0)
    assert len(records) == 40 + 2 * NUM_SERVED
    assert "rank 0 is at 'unit'" in (served[0].disagreement() or "")
    assert "rank 7 at 'other'" in (served[0].disagreement() or "")


def test_of_each_line_the_newest_message_is_known(served):
    records = served[1].records(0)
    kinds = [record.kind for record in records.values()]
    assert (kinds.count("send"), kinds.count("receive")) == (NUM_SERVED, NUM_SERVED)
    assert {number for record in records.values() for number in record.ops} == {50}
    assert [recorder.stalemate() for recorder in (served[0], served[-1])] == [None, None]
    line = Line(replace(over(*range(NUM_SERVED + 1)), index=99), 0)
    talk(served[99], line, "send", "gradients")
    talk(served[99], line, "receive", "parameters")
    told = served[1].awaits_in_words(99)
    assert told == "for receive 51 from rank 0, 'parameters' (8 B), which rank 0 has not sent"
    there = Line(over(*range(NUM_SERVED + 1)), 98)
    talk(served[0], there, "receive", "gradients")
    told = served[1].awaits_in_words(0)
    assert told == "for receive 51 from rank 98, 'gradients' (8 B), which rank 98 has not sent"


def test_more_lines_than_a_page_has_room_for_leave_the_others_alone(recorders):
    for rank in range(1, 400):
        for kind in ("send", "receive"):
            recorders[0].issue(kind, over(0, 1000 + rank), "unit", is_line=True)
    recorders[0].issue("small", WORLD, "step")
    assert len(recorders[1].records(0)) == 512 + 1
    with recorders[0].wait_for_tier("its disk"):
        assert recorders[1].tier_wait(0).what == "its disk"
    assert recorders[2].records(1) == {}


def test_ranks_of_other_hosts_are_members_that_nobody_here_can_see(tmp_path):
    """The second host of three, with more ranks than a line has room for."""
    here = range(300, 600)
    recorders = {
        rank: FlightRecorder(tmp_path / "board", rank, here, 900) for rank in (300, 301, 599)
    }
    everyone = over(*range(900))
    for rank, recorder in recorders.items():
        recorder.issue("small", everyone, f"of {rank}")
    assert "rank 301 at 'of 301'" in (recorders[300].disagreement() or "")
    record = next(iter(recorders[300].records(300).values()))
    assert record.members == tuple(range(300, 556))
    across = over(*range(100_000, 100_000 + 24, 3), 200_000, axis="replicate")
    recorders[300].issue("small", across, "x")
    assert str(recorders[300].last(300)).endswith("100018, 100021, ...), 'x' (0 B)")


def test_the_watchdog_stops_a_rank_that_waits_for_one_that_has_ended(recorders, tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from zrun_core.spine.flight_recorder import FlightRecorder\n"
        "FlightRecorder(Path(sys.argv[1]), 1, range(3), 3)\n"
    )
    stopped = Stopped()
    watchdog = Watchdog(recorders[0], stopped, patience_s=0.02)
    recorders[0].issue("all_gather", WORLD, "left")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "board")], check=True)
    time.sleep(0.1)
    assert not stopped.errors, "a rank that works is left alone"
    recorders[0].waiting(True)
    assert stopped.event.wait(5)
    watchdog.close()
    assert isinstance(stopped.errors[0], PeerError)
    assert str(stopped.errors[0]) == (
        "rank 1 has ended (see its log), and this rank waits for all_gather 1, 'left' (0 B), which "
        "ranks 1, 2 have not reached"
    )


def test_a_wait_that_is_too_long_says_for_what(recorders):
    stopped = Stopped()
    recorders[0].issue("reduce_scatter", WORLD, "embed", 4096)
    for recorder in recorders[:2]:
        recorder.issue("all_gather", WORLD, "head", 2048)
    recorders[0].waiting(True)
    watchdog = Watchdog(
        recorders[0], stopped, patience_s=0.02, limit_s=0.3, limit_key="limits.collective_s"
    )
    assert stopped.event.wait(5)
    watchdog.close()
    assert str(stopped.errors[0]) == (
        "rank 0 has waited for more than 0.3 s (limits.collective_s) for reduce_scatter 1, 'embed' "
        "(4.0 KiB), which ranks 1, 2 have not reached"
    )


def test_a_wait_of_the_device_is_one_while_the_host_is_in_code_of_the_users(recorders):
    """It has passed the first of the two marks around it."""
    begin, stopped = threading.Event(), Stopped()
    waits = Unpassed()
    waits.add(Stretch(_Mark(begin), _Mark(threading.Event())))
    recorders[0].issue("all_gather", WORLD, "head", 2048)
    watchdog = Watchdog(
        recorders[0], stopped, 0.02, limit_s=0.3, limit_key="timeout_s", device_waits=waits
    )
    assert not stopped.event.wait(0.5), "the device computes"
    begin.set()
    assert stopped.event.wait(5)
    watchdog.close()
    assert str(stopped.errors[0]).startswith(
        "rank 0 has waited for more than 0.3 s (timeout_s) for all_gather 1, 'head' (2.0 KiB), "
    )


class _Mark(TimingEvent):
    """A mark that a device passes when the test says so."""

    def __init__(self, is_passed: threading.Event) -> None:
        self.is_completed = is_passed.is_set  # type: ignore[method-assign]


def test_a_host_that_runs_ahead_waits_for_the_first_that_does_not_come(recorders):
    """On a GPU much may be issued behind a message that nobody has sent."""
    recorder = recorders[1]
    recorder.issue("receive", over(0, 1, axis="pipe"), "activations of micro-batch 0")
    recorder.issue("receive", over(0, 1, axis="pipe"), "activations of micro-batch 1")
    recorders[0].issue("send", over(0, 1, axis="pipe"), "activations of micro-batch 0")
    recorder.issue("small", WORLD, "step")
    assert recorder.awaits_in_words(1) == (
        "for receive 2 from rank 0, 'activations of micro-batch 1' (0 B), which rank 0 has not sent"
    )
    assert recorder.awaits_in_words(2) == "for other ranks"


@pytest.mark.parametrize("in_order", [True, False])
def test_kinds_that_follow_each_other_in_another_order_are_a_disagreement(recorders, in_order):
    """NCCL pairs up what ranks issue by its order alone; messages with tags find each other."""
    orders = (["ag", "rs", "ag"], ["ag", "ag", "rs"], ["ag"])
    for recorder, order in zip(recorders, orders, strict=True):
        recorder.step(3)
        for kind in order:
            name = {"ag": "all_gather", "rs": "reduce_scatter"}[kind]
            recorder.issue(name, WORLD, f"{kind} of a unit", in_order=in_order)
    told = [recorder.disagreement() for recorder in recorders]
    if not in_order:
        assert told == [None] * 3
        return
    first = (
        "ranks disagree on the order of reduce_scatter 1 and all_gather 2 of step 3: rank 0 is at "
        "'rs of a unit' first, rank 1 at 'ag of a unit'. "
    )
    assert told[0] is not None
    assert told[0].startswith(first)
    assert told[1] is not None
    assert "order of all_gather 2 and reduce_scatter 1 of step 3: rank 1 is at 'ag" in told[1]
    assert told[2] is None, "it is merely behind"


def test_orders_are_compared_where_some_has_been_forgotten(recorders):
    for recorder in recorders[:2]:
        for number in range(100):
            recorder.issue("small", WORLD, "step", in_order=True)
            if number % 50 == 0:
                recorder.issue("broadcast", WORLD, "buffer", in_order=True)
    assert recorders[0].disagreement() is None
    recorders[0].issue("broadcast", WORLD, "buffer", in_order=True)
    assert recorders[0].disagreement() is None
    recorders[1].issue("small", WORLD, "step", in_order=True)
    told = str(recorders[0].disagreement())
    assert "ranks disagree on the order of broadcast 3 and small 101: rank 0 is at 'buffer'" in told
