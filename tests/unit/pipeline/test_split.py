"""The blocks of each stage of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zrun_core.errors import JobError
from zrun_core.pipeline.split import Split, at_names, balance_in_words, balanced, equal

BLOCKS = tuple(f"h.{number}" for number in range(10))


def every_split(num_blocks: int, pp: int, virtual: int) -> list[Split]:
    borders = itertools.combinations(range(1, num_blocks), pp * virtual - 1)
    return [Split((0, *each), num_blocks, pp) for each in borders]


def test_equal_stages_have_equally_many_blocks_and_the_first_ones_the_rest() -> None:
    split = equal(10, 4)
    assert [split.stage_blocks(stage) for stage in range(4)] == [
        (range(0, 3),),
        (range(3, 6),),
        (range(6, 8),),
        (range(8, 10),),
    ]
    assert equal(8, 2, 2).stage_blocks(1) == (range(2, 4), range(6, 8))
    assert equal(0, 1).stage_blocks(0) == (range(0, 0),), "a model without repeated blocks"


@given(num_blocks=st.integers(1, 60), pp=st.integers(1, 8), virtual=st.integers(1, 4))
def test_every_segment_is_in_one_chunk_and_every_chunk_on_one_stage(
    num_blocks: int, pp: int, virtual: int
) -> None:
    if num_blocks < pp * virtual:
        with pytest.raises(JobError, match=f"> {num_blocks} blocks"):
            equal(num_blocks, pp, virtual)
        return
    split = equal(num_blocks, pp, virtual)
    assert (split.num_chunks, split.virtual) == (pp * virtual, virtual)
    segments = [segment for chunk in range(split.num_chunks) for segment in split.segments(chunk)]
    assert segments == list(range(num_blocks + 1))
    for chunk in range(split.num_chunks):
        assert chunk in split.chunks(split.stage_of(chunk))
        assert {split.chunk_of_segment(segment) for segment in split.segments(chunk)} == {chunk}
    lengths = [len(split.blocks(chunk)) for chunk in range(split.num_chunks)]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1
    assert balanced([1.0] * num_blocks + [0.0], num_blocks, pp, virtual) == split


@settings(deadline=None)
@given(
    costs=st.lists(st.integers(1, 9), min_size=2, max_size=9),
    pp=st.integers(1, 5),
)
def test_no_split_has_a_cheaper_stage_at_its_most_expensive(costs: list[int], pp: int) -> None:
    num_blocks = len(costs) - 1
    pp = min(pp, num_blocks)
    found = balanced(costs, num_blocks, pp)
    least = min(max(each.stage_costs(costs)) for each in every_split(num_blocks, pp, 1))
    assert max(found.stage_costs(costs)) == least
    as_good = [
        each for each in every_split(num_blocks, pp, 1) if max(each.stage_costs(costs)) == least
    ]

    def squares(split: Split) -> int:
        return sum(cost * cost for cost in split.stage_costs(costs))

    most_even = min(map(squares, as_good))
    best = [each.starts for each in as_good if squares(each) == most_even]
    assert found.starts == max(best), "the first stages have more blocks than others as good"


@settings(deadline=None)
@given(
    block=st.integers(1, 9),
    first=st.integers(0, 20),
    after=st.integers(0, 20),
    num_blocks=st.integers(4, 9),
    shape=st.sampled_from([(2, 2), (3, 2), (2, 3), (2, 4)]),
)
def test_interleaved_stages_are_the_best_where_blocks_are_alike(
    block: int, first: int, after: int, num_blocks: int, shape: tuple[int, int]
) -> None:
    pp, virtual = shape
    if num_blocks < pp * virtual:
        return
    costs = [block + first, *[block] * (num_blocks - 1), after]
    found = balanced(costs, num_blocks, pp, virtual)
    others = every_split(num_blocks, pp, virtual)
    assert max(found.stage_costs(costs)) == min(max(each.stage_costs(costs)) for each in others)


def test_an_expensive_end_has_fewer_blocks_beside_it() -> None:
    assert balanced([1.0] * 12 + [2.0], 12, 4).starts == (0, 4, 8, 11)
    assert balanced([7.0, 1.0, 1.0, 1.0, 0.0], 4, 2).starts == (0, 1)
    assert balanced([0.0] * 11, 10, 4) == equal(10, 4), "nothing costs anything"
    assert balanced([5.0], 0, 1) == equal(0, 1)


def test_large_models_are_split_at_once() -> None:
    costs = [3.0, *[1.0 + number % 7 / 100 for number in range(127)], 9.0]
    split = balanced(costs, 128, 8, 4)
    assert max(split.stage_costs(costs)) < sum(costs) / 8 * 1.03


def test_chunks_begin_at_blocks_that_are_named() -> None:
    split = at_names(["h.2", "h.7"], BLOCKS, pp=3)
    assert split == Split((0, 2, 7), 10, 3)
    assert at_names([], BLOCKS, pp=1) == equal(10, 1)
    assert at_names(["h.1", "h.2", "h.9"], BLOCKS, 2, 2).stage_blocks(1) == (
        range(1, 2),
        range(9, 10),
    )


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["h.5", "hh.7"], "'hh.7' is no block: did you mean h.7"),
        (["h.5", "layers.7"], "'layers.7' is no block: the model's blocks are h.0 to h.9"),
        (["h.7", "h.5"], "h.5 does not come after h.7, where the chunk before it begins"),
        (["h.5", "h.5"], "h.5 does not come after h.5"),
        (["h.0", "h.5"], "h.0 does not come after h.0"),
        (["h.5"], r"3 stages have 2 borders, and it names 1: .* for example \[h.4, h.7\]"),
        (["h.2", "h.4", "h.6"], "3 stages have 2 borders, and it names 3"),
    ],
)
def test_a_split_that_makes_no_chunks_is_refused(names: Sequence[str], problem: str) -> None:
    with pytest.raises(JobError, match=f"^parallel.split: {problem}"):
        at_names(names, BLOCKS, pp=3)


@pytest.mark.parametrize(
    ("num_blocks", "pp", "virtual", "problem"),
    [
        (6, 8, 1, "8 stages = 8 > 6 blocks; write pp: 6 or less"),
        (6, 4, 2, "4 stages x 2 chunks = 8 > 6 blocks; write schedule: 1f1b"),
        (9, 4, 3, "4 stages x 3 chunks = 12 > 9 blocks; write virtual: 2"),
        (6, 8, 2, "8 stages x 2 chunks = 16 > 6 blocks; write pp: 6 or less, schedule: 1f1b"),
        (1, 2, 1, "2 stages = 2 > 1 blocks; write pp: 1"),
    ],
)
def test_more_chunks_than_blocks_are_refused(
    num_blocks: int, pp: int, virtual: int, problem: str
) -> None:
    with pytest.raises(JobError) as caught:
        balanced([1.0] * (num_blocks + 1), num_blocks, pp, virtual)
    assert str(caught.value).startswith(f"parallel.pp: {pp}: ")
    assert str(caught.value).endswith(problem)


def test_stage_costs_are_told_beside_the_best_that_there_is() -> None:
    costs = [1.0] * 10 + [2.0]
    good = balanced(costs, 10, 4)
    assert balance_in_words(good, costs, BLOCKS) == (
        "stage costs 25% 25% 25% 25%, best possible 25%: even"
    )
    poor = balance_in_words(equal(10, 4), costs, BLOCKS)
    assert poor == (
        "stage costs 25% 25% 17% 33%, best possible 25%: write parallel.split: auto, or "
        "[h.3, h.6, h.9]"
    )
    heavy = [1.0] * 10 + [10.0]
    assert balance_in_words(balanced(heavy, 10, 2), heavy, BLOCKS) == (
        "stage costs 45% 55%, best possible 55%: stage 1 makes steps 10% longer than even "
        "stages would"
    )
