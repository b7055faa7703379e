"""The sample order: equal to a plain loop, complete, and independent of ranks and interruptions."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zrun_core.data.order import EpochOrder, micro_batches, permutation, shifts, split, steps
from zrun_core.spine.spec import BatchPlan


def plan(ranks: int, micro: int, accumulation: int = 1) -> BatchPlan:
    return BatchPlan(
        global_size=ranks * micro * accumulation,
        micro=micro,
        accumulation=accumulation,
        ranks=ranks,
    )


def consumed(
    num_samples: int,
    batch: BatchPlan,
    *,
    shuffle: bool = False,
    epochs: int | None = None,
    start: int = 0,
    num_steps: int | None = None,
) -> list[list[list[list[int]]]]:
    """Dataset indices by [step][rank][micro-batch]; an empty micro-batch is a stand-in."""
    order = EpochOrder(num_samples, shuffle=shuffle, seed=7)
    total = None if epochs is None else epochs * num_samples
    return [
        [
            [
                [order.index(positions[offset]) for offset in part]
                for part in micro_batches(len(positions), batch, rank)
            ]
            for rank in range(batch.ranks)
        ]
        for positions in islice(steps(start, batch.global_size, total), num_steps)
    ]


def flat(nested: object) -> list[int]:
    return (
        [index for item in nested for index in flat(item)] if isinstance(nested, list) else [nested]
    )


def plain_loop(
    num_samples: int, global_size: int, num_steps: int, *, shuffle: bool
) -> list[list[int]]:
    """The contract written as the loop that a user would write."""
    stream: list[int] = []
    epoch = 0
    while len(stream) < num_steps * global_size:
        if shuffle:
            generator = torch.Generator().manual_seed((7 * 1_000_003 + epoch) % 2**32)
            stream += torch.randperm(num_samples, generator=generator).tolist()
        else:
            stream += range(num_samples)
        epoch += 1
    return [stream[k * global_size : (k + 1) * global_size] for k in range(num_steps)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_equals_a_plain_loop(ranks: int, shuffle: bool) -> None:
    batch = plan(ranks, micro=12 // ranks // 2, accumulation=2)  # 12 samples per step
    got = consumed(17, batch, shuffle=shuffle, num_steps=9)
    for step, expected in zip(got, plain_loop(17, 12, 9, shuffle=shuffle), strict=True):
        per_rank = 12 // ranks
        for rank, own in enumerate(step):
            assert flat(own) == expected[rank * per_rank : (rank + 1) * per_rank]
            assert [len(micro) for micro in own] == [batch.micro] * 2


@settings(max_examples=200, deadline=None)
@given(
    num_samples=st.integers(1, 40),
    ranks=st.integers(1, 4),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_every_sample_once_per_epoch(
    num_samples: int, ranks: int, micro: int, accumulation: int, epochs: int, shuffle: bool
) -> None:
    got = consumed(num_samples, plan(ranks, micro, accumulation), shuffle=shuffle, epochs=epochs)
    stream = flat(got)
    for epoch in range(epochs):
        assert sorted(stream[epoch * num_samples : (epoch + 1) * num_samples]) == list(
            range(num_samples)
        )
    assert len(stream) == epochs * num_samples
    for step in got:
        assert len({len(own) for own in step}) == 1  # as many micro-batches on every rank
        assert all(len(part) <= micro for own in step for part in own)
        sizes = [len(flat(own)) for own in step]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
        assert len(step[0]) == -(-sizes[0] // micro)


@settings(max_examples=100, deadline=None)
@given(
    num_samples=st.integers(1, 30),
    before=st.sampled_from([plan(1, 4), plan(2, 2), plan(2, 1, 2)]),
    after=st.sampled_from([plan(1, 4), plan(4, 1), plan(3, 2)]),
    num_steps=st.integers(0, 20),
)
def test_a_run_goes_on_where_it_stopped_on_other_ranks(
    num_samples: int, before: BatchPlan, after: BatchPlan, num_steps: int
) -> None:
    cursor = num_steps * before.global_size
    first = flat(consumed(num_samples, before, shuffle=True, num_steps=num_steps))
    second = flat(consumed(num_samples, after, shuffle=True, start=cursor, num_steps=6))
    whole = flat(
        consumed(num_samples, plan(1, 1), shuffle=True, num_steps=cursor + 6 * after.global_size)
    )
    assert first + second == whole


def test_a_short_last_step_gives_stand_ins_to_the_last_ranks() -> None:
    batch = plan(ranks=3, micro=2)
    assert consumed(7, batch, epochs=1) == [
        [[[0, 1]], [[2, 3]], [[4, 5]]],
        [[[6]], [[]], [[]]],
    ]


def test_split_is_contiguous_and_even() -> None:
    assert [split(8, 3, index) for index in range(3)] == [range(0, 3), range(3, 6), range(6, 8)]
    assert [split(1, 3, index) for index in range(3)] == [range(0, 1), range(1, 1), range(1, 1)]


def test_permutations_differ_by_epoch_and_by_seed() -> None:
    orders = {
        tuple(permutation(50, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)
    }
    assert len(orders) == 9


def test_permutation_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    permutation(10, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)


@given(st.integers(0, 60), st.integers(1, 25), st.integers(1, 25), st.booleans())
def test_a_position_shifts_unless_what_was_read_is_the_same(position, before, now, shuffle):
    orders = [EpochOrder(length, shuffle=shuffle, seed=7) for length in (before, now)]
    read = [[order.index(each) for each in range(position)] for order in orders]
    if not shifts(position, before, now, shuffle=shuffle):
        assert read[0] == read[1]
    elif not shuffle:
        assert read[0] != read[1]


def test_a_length_that_nobody_knows():
    assert not shifts(9, None, None, shuffle=False)
    assert not shifts(9, None, 9, shuffle=False)
    assert shifts(9, None, 8, shuffle=False)
    assert shifts(9, 8, None, shuffle=False)


def test_an_earlier_epoch_is_still_known_to_whoever_reads_ahead() -> None:
    order = EpochOrder(5, shuffle=True, seed=1)
    ahead = [order.index(position) for position in range(15)]
    assert [order.index(position) for position in range(15)] == ahead
