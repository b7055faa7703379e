"""Shares of a window of steps, dealt out to ranks that do not wait for each other."""

from __future__ import annotations

import random

import pytest

from zrun_core.parameter_server.messages import Push, Reply
from zrun_core.parameter_server.shares import Share, Shares


def test_a_slow_rank_takes_fewer_and_each_share_is_taken_once() -> None:
    shares = Shares(num_steps=2, num_ranks=2, staleness=None)
    assert shares.take(0) == Share(0, 0)
    assert shares.take(1) == Share(0, 1)
    shares.push(0)
    assert shares.take(0) == Share(1, 0)
    shares.push(0)
    assert shares.take(0) == Share(1, 1), "that of rank 1, which has not come back"
    shares.push(0)
    assert shares.take(0) is None
    assert not shares.is_pushed
    assert shares.lead(0) == 3
    assert shares.slowest == 1
    shares.push(1)
    assert shares.take(1) is None
    assert shares.is_pushed


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_nobody_is_further_ahead_than_the_bound(staleness: int) -> None:
    """Whoever is slow: ranks come back in a random order, and the bound holds back who is ahead."""
    for seed in range(50):
        draw = random.Random(seed)
        shares = Shares(num_steps=8, num_ranks=3, staleness=staleness)
        taken = [shares.take(rank) for rank in range(3)]
        at_work = set(range(3))
        waiting: set[int] = set()
        while at_work:
            rank = draw.choice(sorted(at_work))
            at_work.remove(rank)
            shares.push(rank)
            waiting.add(rank)
            for each in sorted(waiting):
                if shares.may_go_on(each):
                    waiting.remove(each)
                    ahead = shares.lead(each)
                    if (share := shares.take(each)) is not None:
                        assert ahead <= staleness
                        taken.append(share)
                        at_work.add(each)
        assert not waiting
        assert shares.is_pushed
        assert sorted(each for each in taken if each) == [
            Share(step, part) for step in range(8) for part in range(3)
        ]


def test_without_staleness_each_rank_has_its_own_share_of_each_step() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        shares = Shares(num_steps=5, num_ranks=3, staleness=0)
        for rank in range(3):
            assert shares.take(rank) == Share(0, rank)
        for step in range(1, 6):
            for rank in draw.sample(range(3), 3):
                ahead = [r for r in range(3) if shares.lead(r)]
                assert step == 5 or not any(map(shares.may_go_on, ahead))
                shares.push(rank)
            expected = None if step == 5 else step
            for rank in draw.sample(range(3), 3):
                share = shares.take(rank)
                assert share == (None if expected is None else Share(expected, rank))


def test_a_window_ends_early_with_the_steps_that_were_begun() -> None:
    shares = Shares(num_steps=10, num_ranks=2, staleness=None)
    assert [shares.take(0), shares.take(0), shares.take(0)] == [
        Share(0, 0),
        Share(0, 1),
        Share(1, 0),
    ]
    shares.end_soon()
    assert shares.num_steps == 2
    assert shares.take(1) == Share(1, 1)
    assert shares.take(1) is None
    for rank in (0, 0, 0, 1):
        assert not shares.is_pushed
        shares.push(rank)
    assert shares.is_pushed


def test_messages_arrive_as_they_were() -> None:
    push = Push(3, 1, 4.0, 4, 1.5, True, bytes([1, 0, 1]))
    numbers = push.packed()
    assert numbers.shape == Push.room(num_params=3).shape
    assert Push.unpacked(numbers) == push
    reply = Reply(-1, -1, 7, False)
    assert reply.packed().shape == Reply.room().shape
    assert Reply.unpacked(reply.packed()) == reply
