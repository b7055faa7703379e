"""The units that are kept unsharded from step to step, and are gathered once each has been updated.

These are all units at stages 1 and 2, and at stage 3 those that are too small to be resharded.

    updates before the forward    all stale ones are gathered at its start, in order of registration
    updates beside the forward    each is gathered when it is needed, in the order of the updates

Both orders are the same on every rank, whatever it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from zrun_core.distributed.comm import Comm
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.unit.micro_pass import PassKind
from zrun_core.zero.unit.unit_params import UnitState


class StaleUnits:
    """The units of one model that an update leaves stale, and that are not resharded.

    Attributes:
        update_order: returns the trainable units in the order in which they are updated.
        num_refreshes: training forwards that found units stale, and gathered them.
    """

    def __init__(
        self, units: Sequence[FlatUnit], comm: Comm, prefetch: int, *, sees_lookups: bool
    ) -> None:
        """
        Args:
            units: of the model, in order of registration; those resharded after use are left out.
            prefetch: units that are gathered ahead of their use.
            sees_lookups: as of `Gatherer`.
        """
        self._units = [unit for unit in units if not unit.param.reshard_after_use]
        self._comm = comm
        self._prefetch = prefetch
        self._sees_lookups = sees_lookups
        self._updating: deque[FlatUnit] = deque()  # units that no forward has needed since
        self.update_order: Callable[[], Sequence[FlatUnit]] = tuple
        self.num_refreshes = 0

    def _stale(self) -> list[FlatUnit]:
        return [unit for unit in self._units if unit.param.state is UnitState.SHARDED]

    def begin_pass(self, kind: PassKind) -> None:
        """Begin to gather the units that the last update left stale.

        Units whose update is still running follow when they are needed, in the order of their
        updates.
        """
        stale = self._stale()
        if not stale:
            return
        if kind is PassKind.FORWARD:
            self.num_refreshes += 1
        if self._sees_lookups and kind is PassKind.FORWARD:
            self._updating = deque(
                unit for unit in self.update_order() if unit.update_side.is_running
            )
            self._updating = deque(u for u in self._updating if not u.param.reshard_after_use)
            waits = set(self._updating)
            stale = [unit for unit in stale if unit not in waits]
        for unit in stale:
            unit.param.unshard(self._comm)
        if self._sees_lookups:
            return
        # Compiled blocks read parameters unseen: none may still be on its way.
        for unit in stale:
            unit.param.wait_for_unshard()

    def refresh(self) -> None:
        """Gather the units that the last update left stale now, before any pass needs them."""
        stale = self._stale()
        for unit in stale:
            unit.param.unshard(self._comm)
        for unit in stale:
            unit.param.wait_for_unshard()
        if stale:
            self.num_refreshes += 1

    def unshard(self, unit: FlatUnit) -> None:
        """Make the parameters of `unit` available now."""
        if unit in self._updating:
            self.refresh_up_to(unit)
        if unit.param.state is not UnitState.UNSHARDED:
            unit.param.unshard(self._comm)
            unit.param.wait_for_unshard()

    def refresh_up_to(self, unit: FlatUnit | None) -> None:
        """Gather the units that are being updated, up to `unit` and what comes after it.

        All ranks do it in the one order of updates, whatever they need first. `unit` is needed now;
        None: all of them are.
        """
        ahead = self._prefetch
        while self._updating:
            if unit is not None and unit.param.state is not UnitState.SHARDED:
                gathers_nothing = unit.shard.size == 1
                if not ahead or gathers_nothing:
                    return
                ahead -= 1
            self._updating.popleft().param.unshard(self._comm)
