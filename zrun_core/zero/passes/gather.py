"""The schedule of unshards and reshards: what passes and modules do to the units of a model.

    running   the pass that runs                                             `running_pass.py`
    order     in which passes unshard what is resharded after use; prefetch  `unshard_order.py`
    idle      what nothing uses at the moment, and when it is resharded      `idle_units.py`
    stale     what is kept unsharded, and gathered once it was updated       `stale_units.py`
    pins      what a micro-batch keeps unsharded until it has ended          `pins.py`
    whole     the whole model unsharded, between two passes                  `whole_model.py`
    counts    how often passes gather each unit                              `gather_counts.py`
    calls     of modules, that are under way                                 `module_calls.py`

A unit is unsharded when the first of its modules runs, and again when the first gradient of what
they gave comes. Each part can be read without the others; whoever needs one alone asks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zrun_core.distributed.comm import Comm
from zrun_core.zero.passes.beside_checkpoints import beside_checkpoints
from zrun_core.zero.passes.gather_counts import GatherCounts
from zrun_core.zero.passes.idle_units import IdleUnits
from zrun_core.zero.passes.module_calls import ModuleCalls
from zrun_core.zero.passes.pins import Pins
from zrun_core.zero.passes.running_pass import RunningPass
from zrun_core.zero.passes.stale_units import StaleUnits
from zrun_core.zero.passes.unshard_order import UnshardOrder
from zrun_core.zero.passes.whole_model import WholeModel
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.unit.micro_pass import MicroPass, PassKind
from zrun_core.zero.unit.unit_params import UnitState


class Gatherer:
    """Unshards the units of one model in time, and reshards them.

    Attributes:
        running, order, idle, stale, pins, whole, counts, calls: its parts.
        spans: names what this rank does, while a profile is taken.
    """

    def __init__(
        self, units: Sequence[FlatUnit], comm: Comm, prefetch: int, *, sees_lookups: bool
    ) -> None:
        """
        Args:
            units: of the model, in order of registration.
            prefetch: units that are gathered ahead of their use, of those resharded after use.
            sees_lookups: access to a parameter outside of its module calls `unshard_on_access`.
        """
        self._units = units
        self._comm = comm
        self.spans = comm.spans
        self.running = RunningPass(comm)
        self.order = UnshardOrder(comm, self.running, prefetch)
        self.idle = IdleUnits(self.running)
        self.stale = StaleUnits(units, comm, prefetch, sees_lookups=sees_lookups)
        self.whole = WholeModel(units, comm, self.running)
        self.pins = Pins(self.running, self.whole)
        self.counts = GatherCounts()
        self.calls = ModuleCalls(units)

    # Passes

    def begin_pass(self, micro: MicroPass, kind: PassKind) -> None:
        """Begin the forward, backward or evaluation of `micro`, and end what ran before."""
        self.end_pass()
        self.running.switch_to(micro, kind)
        self.running.active = True
        self.stale.begin_pass(kind)
        if kind is PassKind.BACKWARD:
            for begins in micro.left:
                begins()
            micro.left = []

    def end_pass(self) -> None:
        """End what runs: record its order, and reshard what is not pinned."""
        self.stale.refresh_up_to(None)
        for key, asked in self.order.end_pass():
            self.counts.end_pass(key, asked)
        self.running.active = False
        for unit in self._units:
            if unit.param.reshard_after_use:
                if not unit.num_active and not unit.pins:
                    unit.param.reshard()
            elif unit.param.state is UnitState.UNSHARDING:  # no module has used it
                unit.param.wait_for_unshard()
        self.idle.end_pass()

    @contextmanager
    def evaluation(self, chunk: int = 0) -> Iterator[None]:
        """Run a forward inside that no backward follows. It may come between other passes."""
        before = self.running.micro
        micro = MicroPass(chunk)
        self.begin_pass(micro, PassKind.EVAL)
        try:
            yield
            self.calls.leave()
        except BaseException:
            self.abandon(micro)
            self.running.active = False  # not by `end_pass`, which gathers: others may go on
            self.running.micro = before
            raise
        self.pins.release(micro)
        self.end_pass()
        self.running.micro = before

    def abandon(self, micro: MicroPass) -> None:
        """Forget what runs of `micro`, which has raised."""
        self.calls.abandon()
        self.pins.release(micro)

    # Modules

    def pre_forward(self, unit: FlatUnit) -> None:
        """Unshard `unit`, of which a module begins to run."""
        unit.num_active += 1
        if self.running.in_forward:  # not the recomputation of a checkpointed block
            self.running.micro.num_calls[unit.index] += 1
        self.unshard(unit)

    def post_forward(self, unit: FlatUnit) -> None:
        """Let `unit`, of which a module has run, be resharded: not yet, it is idle now."""
        unit.num_active -= 1
        self.idle.post_forward(unit)

    def pre_backward(self, unit: FlatUnit) -> None:
        """Unshard `unit`, whose backward begins."""
        self.idle.pre_backward(unit)
        self.unshard(unit)

    def post_backward(self, unit: FlatUnit) -> None:
        """Let `unit` be resharded, whose backward is over."""
        self.idle.post_backward(unit)

    def unshard(self, unit: FlatUnit) -> None:
        """Make the parameters of `unit` available now, and prefetch what is used after it."""
        if not unit.param.reshard_after_use:
            self.stale.unshard(unit)
            return
        self.idle.hold(unit)
        if unit.param.state is UnitState.UNSHARDED:
            self.idle.remove(unit)
            return
        self.counts.need(self.running.key, unit)
        self.idle.reshard()  # first, so that this unit can have their memory
        self.order.ask_for(unit)
        with beside_checkpoints():
            unit.param.unshard(self._comm)
            self.order.prefetch_after(unit)  # issued before the wait: both are on their way
            unit.param.wait_for_unshard()

    def unshard_on_access(self, unit: FlatUnit) -> None:
        """Unshard `unit`, of which a parameter is accessed while none of its modules runs.

        It is pinned until the micro-batch ends, with one exception: a checkpointed block that is
        recomputed accesses parameters inside of a module whose backward is open. That backward
        reshards the unit; any other access to the same parameter happened in forward already, and
        pinned the unit then.
        """
        running = self.running
        if not running.active or unit.num_active:
            return
        if running.in_forward:
            running.micro.num_calls[unit.index] += 1
        if unit.param.state is not UnitState.UNSHARDED:
            # Once more where its modules have run before, and others since: no forward foresees it.
            self.counts.need(running.key, unit, 1 + self.order.times_asked(unit))
        if unit.param.reshard_after_use:
            is_unsharded = unit.param.state is UnitState.UNSHARDED and unit not in self.idle
            is_open_in_backward = running.in_backward and is_unsharded
            if not is_open_in_backward:
                self.pins.pin([unit])
        self.unshard(unit)
