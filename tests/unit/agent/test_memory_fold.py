"""An agent folds what the ranks of its host tell of a step, and waits for none of them for long."""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_ranks import Simulated

from zrun.agent.memory_fold import MemoryFold
from zrun.agent.uplink import TelemetryRelay, Uplink
from zrun.transport.frame_reader import FrameReader
from zrun.transport.memories import apart
from zrun_core.spine.events import encode

RANKS = Simulated(64, 8)


def line(rank: int, number: int = 10) -> bytes:
    return encode(RANKS.memory(rank, number))


def heard(lines: Iterable[bytes]) -> list[list[tuple[int, int]]]:
    """Rank and step of what is in each line."""
    events = [json.loads(each) for each in lines]
    return [
        [(told["rank"], told["step"]) for told in apart(event)]
        if event["type"] == "memories"
        else [(event["rank"], event["step"])]
        for event in events
    ]


def test_ranks_of_a_step_go_up_together_once_the_last_one_has_told() -> None:
    fold = MemoryFold(range(8, 16))
    for rank in (9, 8, 15, 14, 13, 12, 11):
        assert list(fold.take(line(rank), 0.0)) == []
    (sent,) = fold.take(line(10), 0.5)
    assert apart(json.loads(sent)) == [json.loads(line(rank)) for rank in range(8, 16)]
    assert list(fold.due(100.0)) == []


def test_rank_0_and_what_is_no_memory_go_up_at_once_as_they_are() -> None:
    fold = MemoryFold(range(8))
    odd = [
        line(0),
        encode({"type": "peak", "time": 1.0, "rank": 3, "step": 2}),
        b'{"type":"memory","time":1,"rank":3}',
        b'{"type":"memory","time":1,"rank":"3","step":true}',
        b'{"type":"memory","rank":3,"step":1}',
        b'{"type":"memory",',
        b"\xff",
        line(9),  # a rank of another host
    ]
    for each in odd:
        assert list(fold.take(each, 0.0)) == [each]
    for rank in range(1, 7):
        assert list(fold.take(line(rank), 0.0)) == []
    assert heard(fold.take(line(7), 0.0)) == [[(rank, 10) for rank in range(1, 8)]]


def test_a_rank_that_is_late_is_waited_for_a_second() -> None:
    fold = MemoryFold(range(8, 12))
    for rank in (8, 9, 10):
        assert list(fold.take(line(rank), 5.0 + 0.1 * rank)) == []
    assert list(fold.due(6.7)) == []
    assert heard(fold.due(6.9)) == [[(8, 10), (9, 10), (10, 10)]]
    assert list(fold.take(line(11), 7.0)) == []
    assert heard(fold.due(8.1)) == [[(11, 10)]]


def test_steps_are_kept_apart() -> None:
    fold = MemoryFold((1, 2))
    assert list(fold.take(line(1, 10), 0.0)) == []
    assert list(fold.take(line(1, 20), 0.0)) == []
    assert heard(fold.take(line(2, 10), 0.0)) == [[(1, 10), (2, 10)]]
    assert heard(fold.take(line(2, 20), 0.0)) == [[(1, 20), (2, 20)]]


def test_a_rank_that_tells_of_a_step_again_loses_nothing() -> None:
    fold = MemoryFold((1, 2, 3))
    for rank in (1, 2):
        assert list(fold.take(line(rank), 0.0)) == []
    assert heard(fold.take(line(1), 0.1)) == [[(1, 10), (2, 10)]]
    assert list(fold.take(line(2), 0.1)) == []
    assert heard(fold.take(line(3), 0.1)) == [[(1, 10), (2, 10), (3, 10)]]


def test_the_end_of_a_rank_sends_what_waits_and_nobody_waits_for_it_again() -> None:
    fold = MemoryFold((1, 2, 3))
    assert list(fold.take(line(1, 10), 0.0)) == []
    assert list(fold.take(line(2, 20), 0.0)) == []
    assert heard(fold.end_of(3)) == [[(1, 10)], [(2, 20)]]
    assert list(fold.take(line(1, 30), 0.0)) == []
    assert heard(fold.take(line(2, 30), 0.0)) == [[(1, 30), (2, 30)]]
    assert heard(fold.take(line(3, 40), 0.0)) == [[(3, 40)]], "its last words"


def test_a_step_goes_up_behind_those_before_it() -> None:
    fold = MemoryFold((1, 2, 3))
    for rank, step in ((1, 1), (1, 2), (1, 3)):
        assert list(fold.take(line(rank, step), 0.0)) == []
    assert heard(fold.end_of(1)) == [[(1, 1)], [(1, 2)], [(1, 3)]]
    for rank, step in ((2, 3), (3, 2)):  # what is told of step 3 has begun to wait before step 2
        assert list(fold.take(line(rank, step), 0.0)) == []
    assert heard(fold.take(line(3, 3), 0.0)) == [[(3, 2)], [(2, 3), (3, 3)]]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_nothing_is_lost_and_each_rank_keeps_its_order(data: st.DataObject) -> None:
    """Of ranks that are steps apart, begin again from an earlier step, end, and are late."""
    fold = MemoryFold(range(8, 12))
    steps = dict.fromkeys(range(8, 12), 0)
    told: dict[int, list[int]] = {rank: [] for rank in steps}
    sent: list[bytes] = []
    now = 0.0
    for _ in range(data.draw(st.integers(1, 30))):
        rank = data.draw(st.sampled_from(sorted(steps)))
        what = data.draw(st.sampled_from(["tell", "tell", "tell", "again", "wait", "end"]))
        if what == "wait":
            now += data.draw(st.sampled_from([0.4, 0.7]))
            sent += fold.due(now)
        elif what == "end" and len(steps) > 1:
            sent += fold.end_of(rank)
            del steps[rank]
        else:
            if what == "again":
                steps[rank] = data.draw(st.integers(0, steps[rank]))
            steps[rank] += 1
            told[rank].append(steps[rank])
            sent += fold.take(line(rank, steps[rank]), now)
    for rank in list(steps):
        sent += fold.end_of(rank)
    arrived = [each for group in heard(sent) for each in group]
    for rank, its_steps in told.items():
        assert [step for each, step in arrived if each == rank] == its_steps


def test_a_relay_folds_and_tells_all_before_the_end_of_a_rank() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    output, pipe = os.pipe()
    os.set_blocking(output, False)
    selector = selectors.DefaultSelector()
    relay = TelemetryRelay(ours, Uplink(pipe, selector), selector)
    reader = FrameReader()

    def received() -> list[dict[str, Any]]:
        try:
            return [frame["event"] for frame in reader.feed(os.read(output, 1 << 20))]
        except BlockingIOError:
            return []

    theirs.send(line(1))
    relay.drain()
    assert [event["type"] for event in received()] == ["memory"], "few ranks: each by itself"
    relay.fold = MemoryFold(range(8))
    for rank in range(4):
        theirs.send(line(rank))
    relay.drain()
    relay.send_due()
    assert [event["rank"] for event in received()] == [0]
    theirs.send(line(4))
    relay.end_of(7)
    (event,) = received()
    assert [told["rank"] for told in apart(event)] == [1, 2, 3, 4]
    for each in (ours, theirs):
        each.close()
    os.close(output)
    os.close(pipe)
