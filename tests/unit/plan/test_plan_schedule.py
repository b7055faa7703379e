"""Streams beside each other, and pipelines replayed."""

from __future__ import annotations

import pytest

from zrun_core.hardware.simulated import parse_simulate
from zrun_core.plan.timing.link_cost import LinkedGroup, TransferCost
from zrun_core.plan.timing.stream_replay import ChunkTime, Stream, _play, replay, run_pass


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


# Pipelines


def efficiency(
    schedule: str, stages: int, micro_batches: int, chunk: ChunkTime, virtual: int = 1
) -> float:
    """Share of the time until all stages are done in which a stage computes."""
    ends = replay(schedule, [chunk] * stages * virtual, stages, micro_batches, 0.0)
    return micro_batches * virtual * sum(chunk) / max(ends)


SHAPES = [(2, 1), (2, 2), (3, 7), (4, 8), (8, 5), (8, 32), (16, 16)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream"])
@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
def test_equal_stages_have_the_textbook_bubble(
    schedule: str, stages: int, micro_batches: int
) -> None:
    bubble = (stages - 1) / (micro_batches + stages - 1)
    found = efficiency(schedule, stages, micro_batches, ChunkTime(1.0, 1.0, 1.0))
    assert found == pytest.approx(1 - bubble)


def test_gpipe_hides_its_bubble_behind_many_micro_batches() -> None:
    """Huang et al. 2019, section 2.3: it is small from 4 micro-batches per stage on."""
    four, eight = (efficiency("gpipe", 16, count * 16, ChunkTime(1.0, 2.0)) for count in (4, 8))
    assert (round(four, 2), round(eight, 2)) == (0.81, 0.90)


@pytest.mark.parametrize("virtual", [2, 3])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 8), (8, 16)])
def test_interleaving_divides_the_bubble(virtual: int, stages: int, micro_batches: int) -> None:
    found = efficiency("interleaved", stages, micro_batches, ChunkTime(1.0, 2.0), virtual)
    assert 1 / found - 1 == pytest.approx((stages - 1) / virtual / micro_batches)


@pytest.mark.parametrize("micro_batches", range(1, 18))
def test_a_group_that_is_not_full_makes_no_step_slower_than_without_interleaving(
    micro_batches: int,
) -> None:
    for stages, virtual in ((2, 2), (4, 2), (4, 4), (8, 2)):
        pieces = efficiency("interleaved", stages, micro_batches, ChunkTime(1.0, 2.0), virtual)
        whole = efficiency("1f1b", stages, micro_batches, ChunkTime(1.0, 2.0))
        assert pieces >= whole - 1e-9


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.3, 0.9), (0.8, 1.0, 0.6)])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 4), (4, 12), (8, 64)])
def test_late_weights_leave_the_bubble_of_the_zero_bubble_paper(
    times: tuple[float, float, float], stages: int, micro_batches: int
) -> None:
    """Qi et al. 2023, table 2, of ZB-H1: (p - 1) (F + B - W), where 1F1B has F + B + W."""
    forward, backward, weight = times
    chunks = [ChunkTime(*times)] * stages
    for schedule, wait in (("zero_bubble", -weight), ("1f1b", weight)):
        ends = replay(schedule, chunks, stages, micro_batches, 0.0)
        bubble = (stages - 1) * (forward + backward + wait)
        assert max(ends) - micro_batches * sum(times) == pytest.approx(bubble)


def test_updates_of_every_micro_batch_take_their_time() -> None:
    plain, updating = (
        max(replay("pipedream", [ChunkTime(1.0, 2.0, update=u)] * 4, 4, 16, 0.0)) for u in (0, 0.5)
    )
    assert updating - plain >= 16 * 0.5


def test_a_slow_stage_and_slow_links_have_their_price() -> None:
    chunk, slow = ChunkTime(1.0, 2.0), ChunkTime(1.5, 3.0)
    even = max(replay("1f1b", [chunk] * 4, 4, 16, 0.0))
    last_is_slow = max(replay("1f1b", [chunk] * 3 + [slow], 4, 16, 0.0))
    assert last_is_slow == pytest.approx(16 * 4.5 + 3 * 3.0), "it is the beat of all"
    assert even < max(replay("1f1b", [chunk] * 4, 4, 16, 0.1))


def test_chunks_of_one_stage_send_nothing() -> None:
    one = replay("1f1b", [ChunkTime(1.0, 2.0)], 1, 8, 5.0)
    assert one == (pytest.approx(24.0),)
    whole = replay("zero_bubble", [ChunkTime(1.0, 1.5, 0.5)], 1, 8, 5.0)
    assert whole == (pytest.approx(24.0),), "its backward makes both gradients"
    sliced = replay("layer_major", [ChunkTime(1.0, 2.0)] * 3, 1, 8, 5.0)
    assert sliced == (pytest.approx(72.0),)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble", "pipedream"])
@pytest.mark.parametrize("micro_batches", [61, 64])
def test_a_long_pipeline_only_repeats_itself(schedule: str, micro_batches: int) -> None:
    chunks = [ChunkTime(1.0, 2.0), ChunkTime(1.2, 2.1), ChunkTime(0.9, 1.9), ChunkTime(1.4, 2.6)]
    if schedule == "interleaved":
        chunks = [*[ChunkTime(0.5, 1.1)] * 7, ChunkTime(0.8, 1.5)]
    exact = _play(schedule, tuple(chunks), 4, micro_batches, 0.05)
    found = replay(schedule, chunks, 4, micro_batches, 0.05)
    assert found == pytest.approx(exact, rel=1e-6)


# Collectives


def test_a_group_inside_a_node_uses_its_links_only() -> None:
    hardware = parse_simulate("4x8xA100-80G")
    found = LinkedGroup(hardware, 8).gather(8e9)
    assert found.seconds == pytest.approx(7e9 / hardware.intra.bandwidth, rel=1e-3)
    assert (found.node, found.network) == (pytest.approx(7e9), 0)
    ends = LinkedGroup(hardware, 2, stride=6).all_reduce(1e6)  # first and last of 4 stages of 2
    assert (ends.node, ends.network) == (1e6, 0)


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
