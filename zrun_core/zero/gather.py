"""When units become whole, and when they are given up.

A unit is demanded by the first of its modules that runs. What the last pass demanded next is gathered ahead of it; a
demand that no pass foresaw is met on the spot. Forward and backward have orders of their own, recorded anew in every
pass. A unit in use is never given up; one that is no longer in use lingers until another is demanded, because the
modules of a unit often run one after the other.

Several micro-batches may be under way. What one of them holds stays whole until it ends, whatever runs meanwhile.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zrun_core.distributed.comm import Comm, CommPhase
from zrun_core.errors import UserCodeError
from zrun_core.zero.micro_pass import MicroPass, PassKind
from zrun_core.zero.unit import FlatUnit, UnitState


class Gatherer:
    """Makes units whole in time.

    Attributes:
        micro: the pass of which something runs, or ran last.
        active: whether something runs; only then may a mere look at a parameter gather.
        num_refreshes: training forwards that found units stale, and gathered them.
        schedule_hash: digest of what each pass has demanded since the step began, to compare
            between ranks.
    """

    def __init__(
        self, units: Sequence[FlatUnit], comm: Comm, prefetch: int, *, sees_lookups: bool
    ) -> None:
        self._units = units
        self._comm = comm
        self._sees_lookups = sees_lookups  # of parameters outside of their modules
        self._reshards = any(unit.reshard_after_use for unit in units)
        # Units that are never given up are gathered once per step: all of them ahead, in one fixed order.
        self._num_prefetched = prefetch if self._reshards else len(units)
        self._fixed_order = [unit for unit in units if not unit.reshard_after_use]
        self._orders: dict[PassKind, list[FlatUnit]] = {kind: [] for kind in PassKind}
        self._idle: list[FlatUnit] = []
        self._needed: set[tuple[PassKind, int]] = set()  # in what, and which units by index
        self._kind = PassKind.FORWARD
        self.micro = MicroPass()
        self.active = False
        self.is_all_unsharded = False
        self.num_refreshes = 0
        self.schedule_hash = 0

    @property
    def in_backward(self) -> bool:
        return self.active and self._kind is PassKind.BACKWARD

    @property
    def in_forward(self) -> bool:
        """Whether a training forward has begun, and nothing after it."""
        return self.active and self._kind is PassKind.FORWARD

    def in_backward_of(self, micro: MicroPass) -> bool:
        """Return whether the backward of `micro` runs."""
        return self.in_backward and self.micro is micro

    def begin_pass(self, micro: MicroPass, kind: PassKind) -> None:
        """Begin the forward or backward of `micro`; what lingered from what ran before is given up."""
        self.end_pass()
        self.micro, self._kind = micro, kind
        self._comm.phase = CommPhase.BACKWARD if kind is PassKind.BACKWARD else CommPhase.FORWARD
        self.active = True
        stale = [unit for unit in self._fixed_order if unit.state is UnitState.SHARDED]
        self.num_refreshes += bool(stale) and kind is PassKind.FORWARD
        for unit in stale:  # stages 1 and 2, after an update: in this order on every rank
            unit.unshard(self._comm)
        if not self._sees_lookups:  # somebody may read a parameter that is still arriving
            for unit in stale:
                unit.unshard(self._comm)
                unit.wait_for_unshard()

    def end_pass(self) -> None:
        """End what runs: remember its order, keep only what is pinned."""
        if self.micro.unshard_order:
            self._orders[self._kind] = self.micro.unshard_order
        self.micro.unshard_order, self.micro.cursor = [], 0
        self.active = False
        for unit in self._units:
            if (
                not unit.reshard_after_use and unit.state is UnitState.UNSHARDING
            ):  # and nobody has used it
                unit.unshard(self._comm)
                unit.wait_for_unshard()
            if (
                unit.reshard_after_use
                and unit.state is not UnitState.SHARDED
                and not unit.num_active
                and not unit.pins
            ):
                unit.reshard()
        self._idle = []

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Run a forward inside that no backward follows. It may come between those of other passes."""
        before, micro = self.micro, MicroPass()
        self.begin_pass(micro, PassKind.EVAL)
        try:
            yield
        finally:
            self.unpin(micro)
        self.end_pass()
        self.micro = before

    def pin(self, units: Sequence[FlatUnit]) -> None:
        """Keep `units` whole until the pass of which something runs has ended."""
        if self.is_all_unsharded:
            return
        for unit in units:
            if unit not in self.micro.pinned:
                unit.pins += 1
                self.micro.pinned.append(unit)

    def unpin(self, micro: MicroPass) -> None:
        """Let go of what `micro` holds: no backward of it is to come."""
        for unit in micro.pinned:
            unit.pins -= 1
            if unit.reshard_after_use and not unit.pins and not unit.num_active and not self.active:
                unit.reshard()
        micro.pinned = []

    def abandon(self, micro: MicroPass) -> None:
        """Forget what runs of `micro`, which has raised: no module runs any more."""
        for unit in self._units:
            unit.num_active = 0
        self.unpin(micro)

    def num_gathers(self, unit: FlatUnit) -> int:
        """Return how often a micro-batch gathers a unit that is given up after use.

        Once for forward and once for backward, as far as the passes so far have needed it. Backward does not need a
        frozen unit that no gradient flows through, nor one that is held since forward.
        """
        return sum(
            (kind, unit.index) in self._needed for kind in (PassKind.FORWARD, PassKind.BACKWARD)
        )

    def _record_need(self, unit: FlatUnit) -> None:
        if not unit.pins:  # those that are held are there
            self._needed.add((self._kind, unit.index))

    def unshard(self, unit: FlatUnit) -> None:
        """`unit` is needed now."""
        if not unit.reshard_after_use:
            unit.unshard(self._comm)
            unit.wait_for_unshard()
            return
        self._record_need(unit)
        if unit.state is UnitState.UNSHARDED:
            if unit in self._idle:
                self._idle.remove(unit)
            return
        self.reshard_idle()
        place = f"{self._kind.value} {len(self.micro.unshard_order)} {unit.name}"
        self.schedule_hash = zlib.crc32(place.encode(), self.schedule_hash)
        self.micro.unshard_order.append(unit)
        unit.unshard(self._comm)
        self._prefetch_next(unit)
        unit.unshard(self._comm)
        unit.wait_for_unshard()

    def _prefetch_next(self, unit: FlatUnit) -> None:
        order, micro = self._orders[self._kind], self.micro
        try:
            micro.cursor = order.index(unit, micro.cursor) + 1
        except ValueError:
            return  # not foreseen: the order is recorded anew
        for following in order[micro.cursor : micro.cursor + self._num_prefetched]:
            following.unshard(self._comm)

    def pre_forward(self, unit: FlatUnit) -> None:
        """A module of `unit` begins to run."""
        unit.num_active += 1
        if self.in_forward:  # not a checkpoint's recomputation
            self.micro.num_calls[unit.index] += 1
        self.unshard(unit)

    def post_forward(self, unit: FlatUnit) -> None:
        """A module of `unit` has run."""
        unit.num_active -= 1
        if (
            unit.reshard_after_use
            and not unit.num_active
            and not unit.layout.keep_until_pass_ends
            and not self.in_backward
        ):
            self._idle.append(unit)

    def post_backward(self, unit: FlatUnit) -> None:
        """The backward of `unit` is over, except perhaps where it was used as a constant."""
        if unit.reshard_after_use and unit not in self._idle:
            self._idle.append(unit)

    def settle(self) -> None:
        """The outermost module has run: nothing lingers."""
        self.reshard_idle()

    def reshard_idle(self) -> None:
        idle, self._idle = self._idle, []
        for unit in idle:
            if not unit.num_active and not unit.pins:
                unit.reshard()

    def unshard_on_access(self, unit: FlatUnit) -> None:
        """A parameter is looked at while no module of its unit runs: whole until the pass has ended.

        Not so in a recomputation inside of a module whose backward is under way: it finishes the unit. Whoever else
        looks at the same parameter again did so in forward, and pins the unit since.
        """
        if self.active and not unit.num_active:
            if self.in_forward:
                self.micro.num_calls[unit.index] += 1
            self._record_need(unit)
            is_open = (
                self.in_backward and unit.state is UnitState.UNSHARDED and unit not in self._idle
            )
            if unit.reshard_after_use and not is_open:
                self.pin([unit])
            self.unshard(unit)

    @contextmanager
    def all_unsharded(self) -> Iterator[None]:
        """Every unit is whole inside. Collective on entry and on exit; nested in itself, it does nothing."""
        if self.active:
            raise UserCodeError(self.micro.gathered_refusal(self._kind))
        if self.is_all_unsharded:
            yield
            return
        self.is_all_unsharded = True
        for unit in self._units:
            unit.pins += 1
            unit.unshard(self._comm)
            unit.wait_for_unshard()
        self._comm.settle()  # who is inside may write
        try:
            yield
        finally:
            self.is_all_unsharded = False
            for unit in self._units:
                unit.pins -= 1
                unit.write_back()
                unit.mark_stale()
                if unit.reshard_after_use:
                    unit.reshard()
            for unit in self._units:
                if unit.pins:  # by a pass of which another backward may come
                    unit.unshard(self._comm)
                    unit.wait_for_unshard()
