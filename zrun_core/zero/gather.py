"""When units become whole, and when they are given up.

A unit is demanded by the first of its modules that runs. What the last pass demanded next is gathered ahead of it; a
demand that no pass foresaw is met on the spot. Forward and backward have orders of their own, recorded anew in every
pass. A unit in use is never given up; one that is no longer in use lingers until another is demanded, because the
modules of a unit often run one after the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

from zrun_core.comm import Comm, Phase
from zrun_core.errors import UserCodeError
from zrun_core.zero.unit import FlatUnit, UnitState


class Pass(Enum):
    """What runs. Each pass has its own recorded order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EVAL = "eval"


class Gatherer:
    """Makes units whole in time.

    Attributes:
        active: whether a training step or an evaluation is under way; only then may a mere look at a parameter gather.
        pass_number: of the pass under way, from 1.
        num_refreshes: training forwards that found units stale, and gathered them.
        schedule_hash: digest of what was demanded since the step began, to compare between ranks.
        notice: called when a gradient comes in a backward pass that nobody announced, with whether it is a parameter's;
            None where every pass is announced.
    """

    def __init__(self, units: Sequence[FlatUnit], comm: Comm, prefetch: int, *, sees_lookups: bool) -> None:
        self._units = units
        self._comm = comm
        self._sees_lookups = sees_lookups  # of parameters outside of their modules
        self._frees = any(unit.frees for unit in units)
        # Units that are never given up are gathered once per step: all of them ahead, in one fixed order.
        self._prefetch = prefetch if self._frees else len(units)
        self._fixed_order = [unit for unit in units if not unit.frees]
        self._orders: dict[Pass, list[FlatUnit]] = {kind: [] for kind in Pass}
        self._trace: list[FlatUnit] = []
        self._cursor = 0
        self._pass = Pass.FORWARD
        self._idle: list[FlatUnit] = []
        self._seen_outside: list[FlatUnit] = []
        self._needed: set[tuple[Pass, int]] = set()  # in which passes, and which units by index
        self.is_all_whole = False
        self.active = False
        self.notice: Callable[[bool], None] | None = None
        self.pass_number = 0
        self.num_refreshes = 0
        self.schedule_hash = 0

    @property
    def in_backward(self) -> bool:
        return self.active and self._pass is Pass.BACKWARD

    @property
    def in_forward(self) -> bool:
        """Whether a training forward has begun whose backward has not."""
        return self.active and self._pass is Pass.FORWARD

    def notice_backward(self, *, of_param: bool) -> None:
        """The gradient of a module's output, or of a parameter, has come."""
        if self.notice is not None:
            self.notice(of_param)

    def begin(self, kind: Pass) -> None:
        """A pass begins; what lingered from the last one is given up."""
        self.end()
        self._pass = kind
        self.pass_number += 1
        self._comm.phase = Phase.BACKWARD if kind is Pass.BACKWARD else Phase.FORWARD
        self.active = True
        stale = [unit for unit in self._fixed_order if unit.state is UnitState.SHARDED]
        self.num_refreshes += bool(stale) and kind is Pass.FORWARD
        for unit in stale:  # stages 1 and 2, after an update: in this order on every rank
            unit.start_unshard(self._comm)
        if not self._sees_lookups:  # somebody may read a parameter that is still arriving
            for unit in stale:
                unit.unshard(self._comm)

    def begin_backward(self) -> None:
        self.begin(Pass.BACKWARD)

    def end(self) -> None:
        """The pass is over: remember its order, keep only what is pinned."""
        if self._trace:
            self._orders[self._pass] = self._trace
        self._trace, self._cursor = [], 0
        self.active = False
        # What forward looked at, backward needs; and a backward that nobody announced may be followed by another one.
        if self._pass is Pass.EVAL or (self._pass is Pass.BACKWARD and self.notice is None):
            self.let_go()
        for unit in self._units:
            if not unit.frees and unit.state is UnitState.GATHERING:  # and nobody has used it
                unit.unshard(self._comm)
            if unit.frees and unit.state is not UnitState.SHARDED and not unit.num_active and not unit.pins:
                unit.reshard()
        self._idle = []

    def let_go(self) -> None:
        """No backward of what forward looked at is to come."""
        for unit in self._seen_outside:
            unit.pins -= 1
            if unit.frees and not unit.pins and not unit.num_active and not self.active:
                unit.reshard()
        self._seen_outside = []

    def num_gathers(self, unit: FlatUnit) -> int:
        """Return how often a micro-batch gathers a unit that is given up after use.

        Once for forward and once for backward, as far as the passes so far have needed it. Backward does not need a
        frozen unit that no gradient flows through, nor one that is held since forward.
        """
        return sum((kind, unit.index) in self._needed for kind in (Pass.FORWARD, Pass.BACKWARD))

    def _note_need(self, unit: FlatUnit) -> None:
        if not unit.pins:  # those that are held are there
            self._needed.add((self._pass, unit.index))

    def demand(self, unit: FlatUnit) -> None:
        """`unit` is needed now."""
        if not unit.frees:
            unit.unshard(self._comm)
            return
        self._note_need(unit)
        if unit.state is UnitState.WHOLE:
            if unit in self._idle:
                self._idle.remove(unit)
            return
        self._give_up_idle()
        self.schedule_hash = zlib.crc32(unit.name.encode(), self.schedule_hash)
        self._trace.append(unit)
        unit.start_unshard(self._comm)
        self._gather_ahead(unit)
        unit.unshard(self._comm)

    def _gather_ahead(self, unit: FlatUnit) -> None:
        order = self._orders[self._pass]
        try:
            self._cursor = order.index(unit, self._cursor) + 1
        except ValueError:
            return  # not foreseen: the order is recorded anew
        for following in order[self._cursor : self._cursor + self._prefetch]:
            following.start_unshard(self._comm)

    def enter(self, unit: FlatUnit) -> None:
        """A module of `unit` begins to run."""
        unit.num_active += 1
        unit.num_calls += self._pass is Pass.FORWARD  # not a checkpoint's recomputation
        self.demand(unit)

    def leave(self, unit: FlatUnit) -> None:
        """A module of `unit` has run."""
        unit.num_active -= 1
        if unit.frees and not unit.num_active and not unit.layout.lasting and not self.in_backward:
            self._idle.append(unit)

    def finish(self, unit: FlatUnit) -> None:
        """The backward of `unit` is over, except perhaps where it was used as a constant."""
        if unit.frees and unit not in self._idle:
            self._idle.append(unit)

    def settle(self) -> None:
        """The outermost module has run: nothing lingers."""
        self._give_up_idle()

    def _give_up_idle(self) -> None:
        idle, self._idle = self._idle, []
        for unit in idle:
            if not unit.num_active and not unit.pins:
                unit.reshard()

    def demand_outside(self, unit: FlatUnit) -> None:
        """A parameter is looked at while no module of its unit runs: whole until backward, or evaluation, is over.

        Not so in a recomputation inside of a module whose backward is under way: it finishes the unit. Whoever else
        looks at the same parameter again did so in forward, and holds the unit since.
        """
        if self.active and not unit.num_active:
            unit.num_calls += not self.in_backward
            self._note_need(unit)
            is_open = self.in_backward and unit.state is UnitState.WHOLE and unit not in self._idle
            if unit.frees and not is_open:
                self.hold([unit])
            self.demand(unit)

    def hold(self, units: Sequence[FlatUnit]) -> None:
        """Keep `units` whole until the pass that follows forward, or evaluation itself, is over."""
        for unit in units:
            if unit not in self._seen_outside:
                unit.pins += 1
                self._seen_outside.append(unit)

    @contextmanager
    def all_whole(self) -> Iterator[None]:
        """Every unit is whole inside. Collective on entry and on exit; nested in itself, it does nothing."""
        if self.active:
            if self.notice is not None and self.in_forward:
                raise UserCodeError(
                    "gathered(): the model was called and backward() has not followed: enter gathered() after it, and "
                    "call the model under torch.no_grad() where no backward is to follow"
                )
            raise UserCodeError("gathered() inside a forward or backward pass: enter it between steps, on all ranks")
        if self.is_all_whole:
            yield
            return
        self.is_all_whole = True
        for unit in self._units:
            unit.pins += 1
            unit.unshard(self._comm)
        self._comm.settle()  # who is inside may write
        try:
            yield
        finally:
            self.is_all_whole = False
            for unit in self._units:
                unit.pins -= 1
                unit.adopt_writes()
                unit.mark_stale()
                if unit.frees:
                    unit.reshard()
