"""How often passes gather each unit, as far as they have needed it: what their traffic is made of.

Once for forward and once for backward, where a unit is resharded after use. Backward does not need
a frozen unit that no gradient flows through, nor one pinned in forward; it needs a tile twice if
its block is recomputed. Forward needs a unit twice if the loss looks at it, after its modules have
run; backward finds it pinned then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from zrun_core.zero.passes.running_pass import PassKey
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.unit.micro_pass import PassKind


class GatherCounts:
    """The gathers that passes have needed, by unit: the most in one of each kind and chunk."""

    def __init__(self) -> None:
        self._most: dict[int, Counter[PassKey]] = defaultdict(Counter)

    def num_gathers(self, unit: FlatUnit) -> int:
        """Return how often a forward and its backward gather a unit that is resharded after use.

        They are of a micro-batch, or of all those of a step. Where they go through several chunks,
        the root's own parameters are gathered for each of them.
        """
        most = self._most[unit.index]
        return sum(count for (kind, _), count in most.items() if kind is not PassKind.EVAL)

    def need(self, key: PassKey, unit: FlatUnit, num_gathers: int = 1) -> None:
        """Learn that a pass needs `unit` gathered so often, unless something keeps it unsharded."""
        if not unit.pins:
            self._raise_to(key, unit.index, num_gathers)

    def end_pass(self, key: PassKey, asked: Sequence[FlatUnit]) -> None:
        """Learn from what a pass has asked for how often it needs each tile."""
        for index, count in Counter(unit.index for unit in asked if unit.layout.tile).items():
            self._raise_to(key, index, count)

    def _raise_to(self, key: PassKey, index: int, num_gathers: int) -> None:
        most = self._most[index]
        most[key] = max(num_gathers, most[key])
