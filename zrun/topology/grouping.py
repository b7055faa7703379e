"""Groups of devices whose weakest pair is as strong as it can be, and an order to walk them in.

Pure: numbers in, numbers out. A weight is a bandwidth; larger is better, and 0 is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Weights = Sequence[Sequence[float]]
Group = tuple[int, ...]

_MOST_EXACT = 16  # items; beyond, groups are grown and improved by swaps
_MOST_RINGED = 8  # members: 2,520 rings
_UNIT = 100  # weights are compared as whole hundredths: sums of them do not depend on their order


@dataclass(frozen=True)
class Arrangement:
    """An order of devices for ranks of nested groups, innermost first.

    Attributes:
        order: device of each rank.
        sizes: of each level's groups, in groups of the level below; their product is the number of
            devices.
    """

    order: Group
    sizes: Group

    def groups(self, level: int = 0) -> list[Group]:
        """Return the devices of each group of a level, in rank order."""
        length = 1
        for size in self.sizes[: level + 1]:
            length *= size
        return [self.order[start : start + length] for start in range(0, len(self.order), length)]


def best_groups(weights: Weights, size: int) -> list[Group]:
    """Divide all items into groups of `size`.

    The division whose weakest pair is strongest wins; of equals, the one with the largest sum over
    all pairs, then the first in lexicographic order. Exact up to 16 items.

    Args:
        weights: between items, [items][items].

    Raises:
        ValueError: `size` does not divide the number of items.
    """
    count = len(weights)
    if size < 1 or count % size:
        raise ValueError(f"{count} items are no groups of {size}")
    whole = _as_integers(weights)
    if size == 1 or size == count or _is_flat(whole):
        return [tuple(range(start, start + size)) for start in range(0, count, size)]
    if count > _MOST_EXACT:
        return _grown(whole, size)
    return _exact(whole, size)


def weakest_pair(weights: Weights, groups: Iterable[Group]) -> float:
    """Return the smallest weight between two members of one group; 0 where no group has two."""
    pairs = [pair for group in groups for pair in itertools.combinations(group, 2)]
    return min((weights[a][b] for a, b in pairs), default=0.0)


def best_ring(weights: Weights, members: Group) -> Group:
    """Return `members` in an order whose neighbours, last and first too, have the strongest links.

    It begins with the first member. Exact up to 8 members; of equals, the first in lexicographic
    order.
    """
    first, *rest = members
    if len(rest) < 2:
        return tuple(members)
    whole = _as_integers(weights)
    if len(members) <= _MOST_RINGED:
        rings = ((first, *order) for order in itertools.permutations(rest) if order[0] < order[-1])
        return max(rings, key=lambda ring: _ring_value(whole, ring))  # the first of the best
    return max([tuple(members), _walked(whole, members)], key=lambda ring: _ring_value(whole, ring))


def arrange(weights: Weights, sizes: Sequence[int]) -> Arrangement:
    """Order all devices so that each level's groups are consecutive, and well connected.

    Group at the first level, contract each group to one item, group those at the next level, and so
    on. Inside of a group, items follow the best ring; each is turned so that its members face their
    counterparts of the one before:

        links 0-3, 1-2: 40 GB/s          groups of 2:    (0 3) (1 2)
              0-2, 1-3: 20 GB/s          the second, turned to face the first:  (0 3) (2 1)
              others:   10 GB/s          lanes: 0-2 and 3-1, 20 GB/s each

    Args:
        weights: between devices, [devices][devices].
        sizes: items in a group of each level, innermost first; their product is the number of
            devices.
    """
    items: list[list[Group]] = [[(device,)] for device in range(len(weights))]
    for size in sizes:
        between = _between(weights, items)
        merged: list[list[Group]] = []
        for group in best_groups(between, size):
            blocks: list[Group] = []
            for index in best_ring(between, group):
                item = items[index]
                if blocks:
                    item = _turned(weights, blocks[-1], item)
                blocks.append(_flat(item))
            merged.append(blocks)
        items = merged
    return Arrangement(tuple(device for item in items for device in _flat(item)), tuple(sizes))


def _between(weights: Weights, items: Sequence[list[Group]]) -> list[list[float]]:
    """Return the weights between items: of the weakest lane, when they face each other best."""
    table = [[0.0] * len(items) for _ in items]
    for a, b in itertools.permutations(range(len(items)), 2):
        weakest, _ = _facing(weights, items[a], items[b])
        table[a][b] = weakest / _UNIT
    return table


def _exact(weights: Sequence[Sequence[int]], size: int) -> list[Group]:
    """Solve by dynamic programming: first the best weakest pair, then the best sum that has it."""
    values = _values(weights, size)
    everything = (1 << len(weights)) - 1
    lows = {mask: low for mask, (low, _) in values.items()}
    weakest = _Division(size, lows, min).best(everything)
    assert weakest is not None
    sums = {mask: total for mask, (low, total) in values.items() if low >= weakest}
    return _Division(size, sums, lambda a, b: a + b).groups(everything)


class _Division:
    """The best division of a set of items into groups, by dynamic programming over what is left.

    A set is an integer, with a bit for each item. Its value is join(value of a group, value of the
    rest), where the group has the set's lowest item in it.
    """

    def __init__(self, size: int, values: dict[int, int], join: Callable[[int, int], int]) -> None:
        self._size = size
        self._values = values
        self._join = join
        self._only_weakest = join is min
        self._best: dict[int, tuple[int, int] | None] = {}  # set -> value, first group

    def best(self, left: int) -> int | None:
        """Return the best value of the set `left`; None if it has no division."""
        found = self._solve(left)
        if found is None:
            return None
        return found[0]

    def groups(self, left: int) -> list[Group]:
        groups: list[Group] = []
        while left:
            found = self._solve(left)
            assert found is not None
            groups.append(_members(found[1]))
            left &= ~found[1]
        return groups

    def _solve(self, left: int) -> tuple[int, int] | None:
        """Return the best value of the set `left`, and the group of its lowest item in it."""
        if left in self._best:
            return self._best[left]
        bits = [1 << item for item in _members(left)]
        best: tuple[int, int] | None = None
        values = self._values
        solved = self._best
        for others in itertools.combinations(bits[1:], self._size - 1):
            group = bits[0] + sum(others)
            value = values.get(group)
            if value is None:
                continue
            if self._only_weakest and best is not None and value <= best[0]:
                continue  # the rest can only be weaker
            if rest := left & ~group:
                found = solved[rest] if rest in solved else self._solve(rest)
                if found is None:
                    continue
                value = self._join(value, found[0])
            if best is None or value > best[0]:
                best = value, group
        self._best[left] = best
        return best


def _values(weights: Sequence[Sequence[int]], size: int) -> dict[int, tuple[int, int]]:
    """Return weakest pair and sum of every group of `size` items, by its set of bits."""
    values: dict[int, tuple[int, int]] = {}

    def grow(members: list[int], mask: int, low: int, total: int) -> None:
        if len(members) == size:
            values[mask] = low, total
            return
        for item in range(members[-1] + 1, len(weights)):
            pairs = [weights[item][member] for member in members]
            grow([*members, item], mask | 1 << item, min(low, *pairs), total + sum(pairs))

    for item in range(len(weights)):
        grow([item], 1 << item, 1 << 62, 0)
    return values


def _grown(weights: Sequence[Sequence[int]], size: int) -> list[Group]:
    """Grow each group by the best item left, then swap members of two groups while that helps."""
    left = list(range(len(weights)))
    groups: list[list[int]] = []
    while left:
        group = [left.pop(0)]

        def gain(item: int, group: list[int] = group) -> tuple[int, int]:
            to_group = [weights[item][member] for member in group]
            return min(to_group), sum(to_group)

        while len(group) < size:
            best = max(left, key=gain)
            left.remove(best)
            group.append(best)
        groups.append(group)
    while any(_swap(weights, a, b) for a, b in itertools.combinations(groups, 2)):
        pass  # each swap raises a value that has an upper bound
    return sorted(tuple(sorted(group)) for group in groups)


def _swap(weights: Sequence[Sequence[int]], a: list[int], b: list[int]) -> bool:
    """Exchange a member of `a` and one of `b` if both groups together gain; return whether."""

    def value() -> tuple[int, int]:
        pairs = [weights[x][y] for group in (a, b) for x, y in itertools.combinations(group, 2)]
        return min(pairs), sum(pairs)

    before = value()
    for i, j in itertools.product(range(len(a)), range(len(b))):
        a[i], b[j] = b[j], a[i]
        if value() > before:
            return True
        a[i], b[j] = b[j], a[i]
    return False


def _ring_value(weights: Sequence[Sequence[int]], ring: Group) -> tuple[int, int]:
    steps = [weights[a][b] for a, b in _neighbours(ring)]
    return min(steps), sum(steps)


def _neighbours(ring: Group) -> Iterable[tuple[int, int]]:
    if len(ring) < 2:
        return ()
    return zip(ring, (*ring[1:], ring[0]), strict=True)


def _walked(weights: Sequence[Sequence[int]], members: Group) -> Group:
    """Go from the first member on to the best one left, then reverse parts while it helps."""
    ring = [members[0]]
    left = list(members[1:])
    while left:
        ring.append(max(left, key=lambda item: weights[ring[-1]][item]))
        left.remove(ring[-1])
    best = _ring_value(weights, tuple(ring))
    improved = True
    while improved:
        improved = False
        for i, j in itertools.combinations(range(1, len(ring)), 2):
            turned = ring[:i] + ring[i : j + 1][::-1] + ring[j + 1 :]
            value = _ring_value(weights, tuple(turned))
            if value > best:
                ring = turned
                best = value
                improved = True
    return tuple(ring)


def _facing(weights: Weights, a: list[Group], b: list[Group]) -> tuple[int, int]:
    """Return weakest and sum of the lanes between two items, when `b` is turned as it fits best."""
    first = _flat(a)
    return max(_lanes(weights, first, _flat(turn)) for turn in _turns(b))


def _turned(weights: Weights, before: Group, item: list[Group]) -> list[Group]:
    """Return `item` turned as it fits best after `before`; as it is, where nothing is better."""
    return max(_turns(item), key=lambda turn: _lanes(weights, before, _flat(turn)))


def _lanes(weights: Weights, a: Group, b: Group) -> tuple[int, int]:
    lanes = [round(weights[x][y] * _UNIT) for x, y in zip(a, b, strict=True)]
    return min(lanes), sum(lanes)


def _turns(item: list[Group]) -> list[list[Group]]:
    """Return a ring from each of its members on, in both directions; first the item as it is."""
    turns = [item[start:] + item[:start] for start in range(len(item))]
    if len(item) <= 2:
        return turns
    return turns + [turn[::-1] for turn in turns]


def _flat(item: Iterable[Group]) -> Group:
    return tuple(device for block in item for device in block)


def _members(mask: int) -> Group:
    return tuple(item for item in range(mask.bit_length()) if mask >> item & 1)


def _as_integers(weights: Weights) -> list[list[int]]:
    return [[round(value * _UNIT) for value in row] for row in weights]


def _is_flat(weights: Sequence[Sequence[int]]) -> bool:
    pairs = itertools.permutations(range(len(weights)), 2)
    return len({weights[a][b] for a, b in pairs}) <= 1
