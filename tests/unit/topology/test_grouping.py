"""Groups against brute force, rings, and orders of nested groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zrun.topology import grouping
from zrun.topology.grouping import arrange, best_groups, best_ring, weakest_pair

Weights = list[list[float]]


@st.composite
def weights(draw: st.DrawFn, least: int = 2, most: int = 8) -> Weights:
    """Symmetric: like hardware, few different values, or many."""
    count = draw(st.integers(least, most))
    value = draw(
        st.sampled_from(
            [st.sampled_from([6.0, 12.0, 20.0, 40.0]), st.integers(0, 9999).map(lambda n: n / 100)]
        )
    )
    table = [[0.0] * count for _ in range(count)]
    for a, b in itertools.combinations(range(count), 2):
        table[a][b] = table[b][a] = draw(value)
    return table


def divisions(items: tuple[int, ...], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Every division into groups, in lexicographic order."""
    if not items:
        yield []
        return
    for others in itertools.combinations(items[1:], size - 1):
        group = (items[0], *others)
        for rest in divisions(tuple(item for item in items if item not in group), size):
            yield [group, *rest]


def value(table: Weights, groups: list[tuple[int, ...]]) -> tuple[int, int]:
    pairs = [
        round(100 * table[a][b]) for group in groups for a, b in itertools.combinations(group, 2)
    ]
    return min(pairs), sum(pairs)


@settings(max_examples=150, deadline=None)
@given(weights(), st.data())
def test_no_division_is_better(table: Weights, data: st.DataObject) -> None:
    count = len(table)
    size = data.draw(st.sampled_from([size for size in range(2, count + 1) if count % size == 0]))
    best = max(
        divisions(tuple(range(count)), size), key=lambda groups: value(table, groups)
    )  # the first of the best
    assert best_groups(table, size) == best


def test_the_sum_counts_only_after_the_weakest_pair() -> None:
    """The best rest of a group is not always in the best whole.

    A weak group lets the others be weak and rich.
    """
    table = [[0.0] * 6 for _ in range(6)]
    for a, b, bandwidth in ((0, 1, 18), (2, 3, 20), (4, 5, 20), (2, 4, 18), (3, 5, 90)):
        table[a][b] = table[b][a] = bandwidth
    assert best_groups(table, 2) == [(0, 1), (2, 4), (3, 5)]


@settings(max_examples=60, deadline=None)
@given(weights(least=3, most=6))
def test_no_ring_is_better(table: Weights) -> None:
    members = tuple(range(len(table)))
    rings = [(0, *rest) for rest in itertools.permutations(members[1:])]
    steps = {
        ring: [round(100 * table[a][b]) for a, b in zip(ring, (*ring[1:], 0), strict=True)]
        for ring in rings
    }
    found = best_ring(table, members)
    assert (min(steps[found]), sum(steps[found])) == max(
        (min(each), sum(each)) for each in steps.values()
    )


@settings(max_examples=60, deadline=None)
@given(weights(least=8, most=8), st.sampled_from([2, 4]))
def test_grown_groups_are_groups_and_swaps_help(table: Weights, size: int) -> None:
    whole = [[round(100 * each) for each in row] for row in table]
    groups = grouping._grown(whole, size)
    assert sorted(item for group in groups for item in group) == list(range(8))
    assert {len(group) for group in groups} == {size}
    for a, b in itertools.combinations(groups, 2):
        assert not grouping._swap(whole, list(a), list(b))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_large_chassis_is_divided_at_its_seams(size: int) -> None:
    """24 items, too many for exact search.

    Cliques of `size`, whose members are not neighbours by number.
    """
    count = 24
    table = [
        [
            0.0 if a == b else 40.0 if a % 3 == b % 3 and a // 3 // size == b // 3 // size else 6.0
            for b in range(count)
        ]
        for a in range(count)
    ]
    groups = best_groups(table, size)
    assert weakest_pair(table, groups) == 40.0
    ring = best_ring(table, tuple(range(count)))
    assert sorted(ring) == list(range(count))
    assert ring[0] == 0


def test_sixteen_in_eights_are_exact() -> None:
    odd = [[40.0 if (a % 2) == (b % 2) else 6.0 for b in range(16)] for a in range(16)]
    assert best_groups(odd, 8) == [tuple(range(0, 16, 2)), tuple(range(1, 16, 2))]


def test_what_is_flat_keeps_its_order() -> None:
    flat = [[0.0 if a == b else 240.0 for b in range(16)] for a in range(16)]
    assert best_groups(flat, 4) == [tuple(range(start, start + 4)) for start in range(0, 16, 4)]
    assert arrange(flat, [4, 4]).order == tuple(range(16))


def test_groups_divide_the_items() -> None:
    with pytest.raises(ValueError, match="6 items are no groups of 4"):
        best_groups([[0.0] * 6] * 6, 4)


def test_replicas_face_each_other() -> None:
    """Two tp groups of three in a prism.

    Each member's dp partner is the one that it is linked to.
    """
    table = [[0.0] * 6 for _ in range(6)]
    for a, b, bandwidth in (
        (0, 1, 40),
        (1, 2, 40),
        (0, 2, 40),
        (3, 4, 40),
        (4, 5, 40),
        (3, 5, 40),
        (0, 5, 20),
        (1, 3, 20),
        (2, 4, 20),
    ):
        table[a][b] = table[b][a] = bandwidth
    found = arrange(table, [3, 2])
    assert found.groups(0) == [(0, 1, 2), (5, 3, 4)]
    assert [table[a][b] for a, b in zip(*found.groups(0), strict=True)] == [20, 20, 20]
    assert found.groups(1) == [(0, 1, 2, 5, 3, 4)]


@settings(max_examples=40, deadline=None)
@given(weights(least=8, most=8), st.sampled_from([(2, 4), (4, 2), (2, 2, 2), (8,)]))
def test_an_arrangement_has_everyone_once(table: Weights, sizes: tuple[int, ...]) -> None:
    found = arrange(table, sizes)
    assert sorted(found.order) == list(range(8))
    expected = best_groups(table, sizes[0])
    assert sorted(tuple(sorted(group)) for group in found.groups(0)) == expected
    ring = found.groups(0)[0]
    neighbours = zip(ring, (*ring[1:], ring[0]), strict=True)
    assert min(table[a][b] for a, b in neighbours) >= weakest_pair(table, expected)
