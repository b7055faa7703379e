"""Streams beside each other, and pipelines replayed."""

from __future__ import annotations

import pytest

from zrun_core.hardware.simulated import parse_simulate
from zrun_core.plan.timing.link_cost import LinkedGroup, TransferCost
from zrun_core.plan.timing.stream_replay import Stream, _play, replay, run_pass


def test_transfers_hide_behind_computation() -> None:
    found = run_pass([1.0] * 4, [Stream(before=[0.5] * 4)], ahead=1)
    assert found.seconds == pytest.approx(4.5), "the first has nothing to hide behind"
    assert found.tail == 0
    slow = run_pass([1.0] * 4, [Stream(before=[2.0] * 4)], ahead=1)
    assert slow.seconds == pytest.approx(9.0), "the link is the bottleneck"


def test_little_room_makes_transfers_wait() -> None:
    uneven = [3.0, 0.1, 0.1, 3.0]
    brought = [Stream(before=[1.0] * 4)]
    waits = [run_pass(uneven, brought, ahead=ahead).seconds for ahead in (0, 1, 3)]
    assert waits[0] == pytest.approx(sum(uneven) + 4)
    assert waits[0] > waits[1] > waits[2]


def test_what_leaves_may_last_longer_than_the_pass() -> None:
    found = run_pass([1.0, 1.0], [Stream(after=[0.5, 0.5])], ahead=0)
    assert (found.seconds, found.tail) == (pytest.approx(2.0), pytest.approx(0.5))
    shared = run_pass([1.0, 1.0], [Stream(before=[1.0, 1.0], after=[1.0, 1.0])], ahead=1)
    assert shared.seconds + shared.tail == pytest.approx(4.0), (
        "one stream does both: two arrive, then two leave"
    )
    apart = run_pass([1.0, 1.0], [Stream(before=[1.0, 1.0]), Stream(after=[1.0, 1.0])], ahead=1)
    assert apart.seconds + apart.tail == pytest.approx(4.0)
    assert apart.seconds == pytest.approx(3.0)


def test_contention_slows_computation_and_forbids_overlap_at_one() -> None:
    free, slowed = (
        run_pass([1.0] * 4, [Stream(before=[1.0] * 4, contention=c)], ahead=1).seconds
        for c in (0, 0.1)
    )
    assert slowed == pytest.approx(1 + 4 * 1.1)
    assert free < slowed
    assert run_pass(
        [1.0] * 4, [Stream([0.5] * 4, [0.25] * 4, 1.0)], ahead=1
    ).seconds == pytest.approx(7.0)


def test_a_part_that_is_not_there_yet_holds_up_the_rest() -> None:
    assert run_pass([1.0] * 3, [], ahead=3, ready=[0.5, 0.5, 5.0]).seconds == pytest.approx(6.0)
    assert run_pass([1.0] * 3, [], ahead=3, ready=[0.5, 1.0, 2.0]).seconds == pytest.approx(3.5), (
        "behind the others"
    )


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 8), (8, 32), (16, 16)])
def test_equal_stages_have_the_textbook_bubble(stages: int, micro_batches: int) -> None:
    ends = replay([1.0] * stages, [2.0] * stages, stages, micro_batches, 0.0)
    assert max(ends) == pytest.approx(3.0 * (micro_batches + stages - 1))
    assert ends.index(max(ends)) == 0, "the first stage ends last"


@pytest.mark.parametrize("virtual", [2, 3])
def test_interleaving_divides_the_bubble(virtual: int) -> None:
    stages, micro_batches = 4, 8
    chunk = 1.0 / virtual
    ends = replay(
        [chunk] * stages * virtual, [2 * chunk] * stages * virtual, stages, micro_batches, 0.0
    )
    assert max(ends) == pytest.approx(3.0 * (micro_batches + (stages - 1) / virtual))


def test_a_slow_stage_and_slow_links_have_their_price() -> None:
    even = max(replay([1.0] * 4, [2.0] * 4, 4, 16, 0.0))
    last_is_slow = max(replay([1.0, 1.0, 1.0, 1.5], [2.0, 2.0, 2.0, 3.0], 4, 16, 0.0))
    assert last_is_slow == pytest.approx(16 * 4.5 + 3 * 3.0), "it is the beat of all"
    assert even < max(replay([1.0] * 4, [2.0] * 4, 4, 16, 0.1))


@pytest.mark.parametrize(
    ("forward", "backward", "micro_batches"),
    [([1.0, 1.2, 0.9, 1.4], [2.0, 2.1, 1.9, 2.6], 61), ([0.5] * 7 + [0.8], [1.1] * 7 + [1.5], 64)],
)
def test_a_long_pipeline_only_repeats_itself(
    forward: list[float], backward: list[float], micro_batches: int
) -> None:
    exact = _play(tuple(forward), tuple(backward), 4, micro_batches, 0.05)
    assert replay(forward, backward, 4, micro_batches, 0.05) == pytest.approx(exact, rel=1e-6)


# Collectives


def test_a_group_inside_a_node_uses_its_links_only() -> None:
    hardware = parse_simulate("4x8xA100-80G")
    found = LinkedGroup(hardware, 8).gather(8e9)
    assert found.seconds == pytest.approx(7e9 / hardware.intra.bandwidth, rel=1e-3)
    assert (found.node, found.network) == (pytest.approx(7e9), 0)


def test_a_group_across_nodes_shares_the_adapters_of_its_members() -> None:
    hardware = parse_simulate("4x8xA100-80G")
    ring = LinkedGroup(hardware, 32).gather(32e9)
    assert ring.node + ring.network == pytest.approx(31e9), "(N - 1) / N of all, as a ring sends"
    assert ring.seconds == pytest.approx(
        max(28e9 / hardware.intra.bandwidth, 3e9 / hardware.inter.bandwidth), rel=1e-3
    )
    alone = LinkedGroup(hardware, 4, stride=8).gather(4e9)
    assert (alone.node, alone.network) == (0, pytest.approx(3e9))
    assert alone.seconds == pytest.approx(3e9 / hardware.inter.bandwidth, rel=1e-3)
    assert LinkedGroup(hardware, 4, stride=8).all_reduce(4e9) == alone.times(2)


def test_one_rank_moves_nothing() -> None:
    assert LinkedGroup(parse_simulate("1xA100"), 1).all_reduce(1e9) == TransferCost()
    hardware = parse_simulate("2x8xA100")
    assert LinkedGroup(hardware, 2, stride=8).send(1e6).network == 1e6
    assert LinkedGroup(hardware, 2, stride=4).send(1e6).node == 1e6
