"""The order in which passes unshard units, and what is gathered ahead by it.

What the last pass used next is gathered ahead of it (prefetch); an unshard that no pass foresaw is
done on the spot. Forward, backward and evaluation each have an order of their own, for each chunk,
recorded anew in every pass. With prefetch 1:

    the last forward    A  B  C  B  D
    this one asks for   A             and gathers B ahead
                           B          and gathers C ahead
                              C       and gathers B ahead, at its next place
                                 E    and nothing: this pass runs differently, and is recorded

Only units that are resharded after use are in it. `stale_units.py` has the others.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict

from zrun_core.distributed.comm import Comm
from zrun_core.zero.passes.running_pass import PassKey, RunningPass
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.unit.micro_pass import PassKind


class UnshardOrder:
    """What passes ask for, one unit after the other.

    Attributes:
        digest: of what was unsharded since the step began, to compare between ranks.
    """

    def __init__(self, comm: Comm, running: RunningPass, prefetch: int) -> None:
        """
        Args:
            prefetch: units that are gathered ahead of their use.
        """
        self._comm = comm
        self._running = running
        self._prefetch = prefetch
        # What the last pass asked for, what this one has, and how far it followed that.
        self._recorded: dict[PassKey, list[FlatUnit]] = defaultdict(list)
        self._asked: dict[PassKey, list[FlatUnit]] = defaultdict(list)
        self._cursors: Counter[PassKey] = Counter()
        self.digest = 0

    def begin_step(self) -> None:
        """Forget what the last step unsharded."""
        self.digest = 0

    def ask_for(self, unit: FlatUnit) -> None:
        """Record that the pass that runs needs `unit` next."""
        asked = self._asked[self._running.key]
        step = f"{self._running.kind.value} {len(asked)} {unit.name}"
        self.digest = zlib.crc32(step.encode(), self.digest)
        asked.append(unit)

    def times_asked(self, unit: FlatUnit) -> int:
        """Return how often the pass that runs has asked for `unit`."""
        return self._asked[self._running.key].count(unit)

    def prefetch_after(self, unit: FlatUnit) -> None:
        """Begin to gather the units that followed `unit` in the last pass of this kind.

        The search begins where the last one ended: a unit that occurs twice in the order is found
        at its next place, not at its first.
        """
        key = self._running.key
        order = self._recorded[key]
        try:
            place = order.index(unit, self._cursors[key]) + 1
        except ValueError:
            return  # this pass runs differently; its order replaces the recorded one
        self._cursors[key] = place
        ahead = place + self._prefetch
        for following in order[place:ahead]:
            following.param.unshard(self._comm)
        for following in order[ahead : ahead + 1]:
            following.param.begin_fetch()

    def prefetch_backward(self) -> None:
        """Begin to gather what the last backward asked for first."""
        order = self._recorded[PassKind.BACKWARD, self._running.micro.chunk]
        for unit in order[: self._prefetch]:
            unit.param.unshard(self._comm)

    def end_pass(self) -> list[tuple[PassKey, list[FlatUnit]]]:
        """Keep what was asked for as the order of the next passes, and return it."""
        ended = list(self._asked.items())
        self._recorded.update(self._asked)
        self._asked.clear()
        self._cursors.clear()
        return ended
