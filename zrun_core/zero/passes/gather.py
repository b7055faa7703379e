"""The schedule of unshards and reshards.

A unit is unsharded when the first of its modules runs. What the last pass used next is gathered
ahead of it (prefetch); an unshard that no pass foresaw is done on the spot. Forward, backward and
evaluation each have an order of their own, recorded anew in every pass.

[Note: idle units]
A unit often has several modules, which run one after the other. So a unit that is no longer in use
is not resharded at once: it is idle until another unit has to be unsharded. With prefetch 1, and
units A with the modules a1 and a2, B with b, C with c:

    module that runs         a1        a2            b         c
    pre_forward of its unit  unshards  is unsharded  unshards  unshards
    ... reshards before                              A         B          (memory is reused)
    ... prefetches after     B                       C         D
    idle once it has run     A         A             B         C

At most two units are unsharded at a time. a2 takes A off the list again. When the outermost module
has run, what is idle is resharded. Units in use by a module (`num_active`) or pinned by a pass
(`pins`) are never resharded, whatever the list says.

[Note: tiles in recomputed blocks]
When a checkpointed block is recomputed in backward, its units stay unsharded until their backward
is over: it follows at once. A tile does not, because its tensor would be unsharded whole again: it
is idle when it has been recomputed, and the gradient of its output unshards it once more. Unless
that gradient was there before: the recomputation of the block came in the midst of the tile's own
backward, and that ends it (`_begun`).

Several micro-batches may be under way. What one of them has pinned stays unsharded until it ends,
whatever runs meanwhile.

[Note: slices]
Where all micro-batches go through a slice of the model before the next one comes, they share one
pass per step, and what the slice has used becomes idle at its end: of it each finds all units
unsharded, except the first. The units of the last slice stay from its forward to its backward.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from zrun_core.distributed.comm import Comm, CommPhase
from zrun_core.errors import UserCodeError
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.unit.micro_pass import MicroPass, PassKind
from zrun_core.zero.unit.unit_params import UnitState

_PassKey = tuple[PassKind, int]  # and its chunk
_CHECKPOINT_MODES = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)


@contextmanager
def _beside_checkpoints() -> Iterator[None]:
    """Run operators of ours inside that no selective checkpoint sees.

    It counts those of a block, and a recomputation gathers other units than the forward did.
    """
    if any(isinstance(mode, _CHECKPOINT_MODES) for mode in _get_current_dispatch_mode_stack()):
        with _disable_current_modes():
            yield
        return
    yield


class Gatherer:
    """Unshards the units of one model in time, and reshards them.

    Attributes:
        micro: the pass of which something runs, or ran last.
        active: something runs; only then may access to a parameter gather its unit.
        is_all_unsharded: inside of `all_unsharded`.
        under_way: what ends each call of a module that is not over, should the module be left.
        update_order: returns the trainable units in the order in which they are updated.
        spans: names what this rank does, while a profile is taken.
        num_refreshes: training forwards that found units stale, and gathered them.
        schedule_hash: digest of what was unsharded since the step began, to compare between ranks.
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
        self._sees_lookups = sees_lookups
        self._prefetch = prefetch
        # Stages 1 and 2: gathered once per step, all of them ahead, in one fixed order.
        self._fixed_order = [unit for unit in units if not unit.param.reshard_after_use]
        # By kind and chunk: what the last pass asked for, what this one has, and how far it
        # followed that.
        self._orders: dict[_PassKey, list[FlatUnit]] = defaultdict(list)
        self._asked: dict[_PassKey, list[FlatUnit]] = defaultdict(list)
        self._cursors: Counter[_PassKey] = Counter()
        self._idle: list[FlatUnit] = []
        self._held: set[FlatUnit] | None = None  # in use by this slice; None: there are no slices
        self._updating: deque[FlatUnit] = deque()  # units that no forward has needed since
        # By unit, kind and chunk: most gathers in a pass.
        self._needed: dict[int, Counter[_PassKey]] = defaultdict(Counter)
        self._begun: set[FlatUnit] = set()  # tiles whose backward is under way
        self._kind = PassKind.FORWARD
        self.under_way: list[Callable[[], None]] = []
        self.update_order: Callable[[], Sequence[FlatUnit]] = tuple
        self.micro = MicroPass()
        self.active = False
        self.spans = comm.spans
        self.is_all_unsharded = False
        self.num_refreshes = 0
        self.schedule_hash = 0

    @property
    def _key(self) -> _PassKey:
        """Return by which passes of one order are known."""
        return self._kind, self.micro.chunk

    @property
    def in_backward(self) -> bool:
        return self.active and self._kind is PassKind.BACKWARD

    @property
    def in_forward(self) -> bool:
        """True while a training forward has begun, and nothing after it."""
        return self.active and self._kind is PassKind.FORWARD

    @property
    def in_words(self) -> str:
        """Return what a module that runs now does, for a profile."""
        return "recompute" if self.in_backward else self._kind.value

    def in_backward_of(self, micro: MicroPass) -> bool:
        """Return whether the backward of `micro` runs."""
        return self.in_backward and self.micro is micro

    # Passes

    def begin_pass(self, micro: MicroPass, kind: PassKind) -> None:
        """Begin the forward, backward or evaluation of `micro`, and end what ran before."""
        self.end_pass()
        self.switch_to(micro, kind)
        self.active = True
        self._refresh_stale()
        if kind is PassKind.BACKWARD:
            for begins in micro.left:
                begins()
            micro.left = []

    def switch_to(self, micro: MicroPass, kind: PassKind) -> None:
        """Go on with `micro` in the pass that runs, which other micro-batches share with it."""
        self.micro = micro
        self._kind = kind
        if kind is PassKind.BACKWARD:
            self._comm.phase = CommPhase.BACKWARD
        else:
            self._comm.phase = CommPhase.FORWARD

    def begin_slice(self) -> None:
        """Reshard what the last slice used. What this one uses stays until it ends."""
        self._held = set()
        self.reshard_idle()

    def prefetch_backward(self) -> None:
        """Begin to gather what the last backward asked for first."""
        for unit in self._orders[PassKind.BACKWARD, self.micro.chunk][: self._prefetch]:
            unit.param.unshard(self._comm)

    def _refresh_stale(self) -> None:
        """Begin to gather the units that the last update left stale, and that are not resharded.

        These are all units at stages 1 and 2. The order is the same on every rank. Units whose
        update is still running follow when they are needed, in the order of their updates.
        """
        stale = [unit for unit in self._fixed_order if unit.param.state is UnitState.SHARDED]
        if not stale:
            return
        if self._kind is PassKind.FORWARD:
            self.num_refreshes += 1
        if self._sees_lookups and self._kind is PassKind.FORWARD:
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
        stale = [unit for unit in self._fixed_order if unit.param.state is UnitState.SHARDED]
        for unit in stale:
            unit.param.unshard(self._comm)
        for unit in stale:
            unit.param.wait_for_unshard()
        if stale:
            self.num_refreshes += 1

    def _refresh_up_to(self, unit: FlatUnit | None) -> None:
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

    def end_pass(self) -> None:
        """End what runs: record its order, and reshard what is not pinned."""
        self._refresh_up_to(None)
        for key, asked in self._asked.items():
            self._orders[key] = asked
            self._count_gathers(key, asked)
        self._asked.clear()
        self._cursors.clear()
        self._held = None
        self.active = False
        for unit in self._units:
            if unit.param.reshard_after_use:
                if not unit.num_active and not unit.pins:
                    unit.param.reshard()
            elif unit.param.state is UnitState.UNSHARDING:  # no module has used it
                unit.param.wait_for_unshard()
        self._idle = []
        self._begun.clear()

    @contextmanager
    def evaluation(self, chunk: int = 0) -> Iterator[None]:
        """Run a forward inside that no backward follows. It may come between other passes."""
        before = self.micro
        micro = MicroPass(chunk)
        self.begin_pass(micro, PassKind.EVAL)
        try:
            yield
            self.leave()
        except BaseException:
            self.abandon(micro)
            self.active = False  # not by `end_pass`, which gathers: others may go on
            self.micro = before
            raise
        self.unpin(micro)
        self.end_pass()
        self.micro = before

    def pin(self, units: Sequence[FlatUnit]) -> None:
        """Keep `units` unsharded until the micro-batch of which something runs has ended."""
        if self.is_all_unsharded:
            return
        for unit in units:
            if unit not in self.micro.pinned:
                unit.pins += 1
                self.micro.pinned.append(unit)

    def unpin(self, micro: MicroPass) -> None:
        """Release what `micro` has pinned: no backward of it follows."""
        for unit in micro.pinned:
            unit.pins -= 1
            in_use = unit.pins or unit.num_active or self.active
            if unit.param.reshard_after_use and not in_use:
                unit.param.reshard()
        micro.pinned = []

    def abandon(self, micro: MicroPass) -> None:
        """Forget what runs of `micro`, which has raised: no module runs any more."""
        self.under_way.clear()
        for unit in self._units:
            unit.num_active = 0
        self.unpin(micro)

    # Modules

    def leave(self) -> None:
        """End the calls under way, which a stage of a pipeline leaves behind its last block.

        It leaves them by an exception that is no error: torch calls no hook of theirs for it.
        """
        for end in reversed(self.under_way.copy()):
            end()

    def pre_forward(self, unit: FlatUnit) -> None:
        """Unshard `unit`, of which a module begins to run."""
        unit.num_active += 1
        if self.in_forward:  # not the recomputation of a checkpointed block
            self.micro.num_calls[unit.index] += 1
        self.unshard(unit)

    def post_forward(self, unit: FlatUnit) -> None:
        """Let `unit`, of which a module has run, be resharded: not yet, it is idle now."""
        unit.num_active -= 1
        if not unit.param.reshard_after_use or unit.num_active:
            return
        if unit.layout.keep_until_pass_ends:
            return
        if self.in_backward and (unit in self._begun or not unit.layout.tile):
            return  # a recomputation has run, and `post_backward` is yet to come
        self._idle.append(unit)

    def pre_backward(self, unit: FlatUnit) -> None:
        """Unshard `unit`, whose backward begins."""
        if unit.layout.tile:
            self._begun.add(unit)
        self.unshard(unit)

    def post_backward(self, unit: FlatUnit) -> None:
        """Let `unit` be resharded, whose backward is over except where it is used as a constant.

        In slices, another one may use it too.
        """
        self._begun.discard(unit)
        if unit.layout.keep_until_pass_ends and self._held is not None:
            return
        if unit.param.reshard_after_use and unit not in self._idle:
            self._idle.append(unit)

    def unshard(self, unit: FlatUnit) -> None:
        """Make the parameters of `unit` available now, and prefetch what is used after it."""
        if not unit.param.reshard_after_use:
            if unit in self._updating:
                self._refresh_up_to(unit)
            if unit.param.state is not UnitState.UNSHARDED:
                unit.param.unshard(self._comm)
                unit.param.wait_for_unshard()
            return
        if self._held is not None:
            self._held.add(unit)
        if unit.param.state is UnitState.UNSHARDED:
            if unit in self._idle:
                self._idle.remove(unit)
            return
        self._record_need(unit)
        self.reshard_idle()  # first, so that this unit can have their memory
        asked = self._asked[self._key]
        step = f"{self._kind.value} {len(asked)} {unit.name}"
        self.schedule_hash = zlib.crc32(step.encode(), self.schedule_hash)
        asked.append(unit)
        with _beside_checkpoints():
            unit.param.unshard(self._comm)
            self._prefetch_after(unit)  # issued before the wait: both gathers are on their way
            unit.param.wait_for_unshard()

    def _prefetch_after(self, unit: FlatUnit) -> None:
        """Begin to gather the units that followed `unit` in the last pass of this kind.

        The search begins where the last one ended: a unit that occurs twice in the order is found
        at its next place, not at its first.
        """
        order = self._orders[self._key]
        try:
            place = order.index(unit, self._cursors[self._key]) + 1
        except ValueError:
            return  # this pass runs differently; its order replaces the recorded one
        self._cursors[self._key] = place
        ahead = place + self._prefetch
        for following in order[place:ahead]:
            following.param.unshard(self._comm)
        for following in order[ahead : ahead + 1]:
            following.param.begin_fetch()

    def reshard_idle(self) -> None:
        """Reshard the idle units. See [Note: idle units]."""
        held = self._held or ()
        idle = self._idle
        self._idle = [unit for unit in idle if unit in held]
        for unit in idle:
            if unit not in held and not unit.num_active and not unit.pins:
                unit.param.reshard()

    def unshard_on_access(self, unit: FlatUnit) -> None:
        """Unshard `unit`, of which a parameter is accessed while none of its modules runs.

        It is pinned until the micro-batch ends, with one exception: a checkpointed block that is
        recomputed accesses parameters inside of a module whose backward is open. That backward
        reshards the unit; any other access to the same parameter happened in forward already, and
        pinned the unit then.
        """
        if not self.active or unit.num_active:
            return
        if self.in_forward:
            self.micro.num_calls[unit.index] += 1
        if unit.param.state is not UnitState.UNSHARDED:
            # Once more where its modules have run before, and others since: no forward foresees it.
            self._record_need(unit, 1 + self._asked[self._key].count(unit))
        if unit.param.reshard_after_use:
            is_unsharded = unit.param.state is UnitState.UNSHARDED and unit not in self._idle
            is_open_in_backward = self.in_backward and is_unsharded
            if not is_open_in_backward:
                self.pin([unit])
        self.unshard(unit)

    # Traffic that the passes cause

    def num_gathers(self, unit: FlatUnit) -> int:
        """Return how often a pass gathers a unit that is resharded after use.

        Passes are of a micro-batch each, or of all those of a step. Where they go through several
        chunks, the root's own parameters are gathered for each of them.

        Once for forward and once for backward, as far as the passes so far have needed it. Backward
        does not need a frozen unit that no gradient flows through, nor one pinned in forward; it
        needs a tile twice if its block is recomputed. Forward needs a unit twice if the loss looks
        at it, after its modules have run; backward finds it pinned then.
        """
        needed = self._needed[unit.index]
        return sum(count for (kind, _), count in needed.items() if kind is not PassKind.EVAL)

    def _record_need(self, unit: FlatUnit, num_gathers: int = 1) -> None:
        if not unit.pins:  # pinned units are unsharded already
            needed = self._needed[unit.index]
            needed[self._key] = max(num_gathers, needed[self._key])

    def _count_gathers(self, key: _PassKey, order: Sequence[FlatUnit]) -> None:
        for index, count in Counter(unit.index for unit in order if unit.layout.tile).items():
            needed = self._needed[index]
            needed[key] = max(count, needed[key])

    # Outside of passes

    @contextmanager
    def all_unsharded(self) -> Iterator[None]:
        """Keep every unit unsharded inside; writes to parameters are kept.

        Collective on entry and on exit. Nested in itself it does nothing.

        Raises:
            UserCodeError: a pass runs.
        """
        if self.active:
            raise UserCodeError(self.micro.gathered_refusal(self._kind))
        if self.is_all_unsharded:
            yield
            return
        self.is_all_unsharded = True
        for unit in self._units:
            unit.pins += 1
            unit.param.unshard(self._comm)
            unit.param.wait_for_unshard()
        self._comm.settle()  # before anything is written that another rank may still read
        try:
            yield
        finally:
            self.is_all_unsharded = False
            self._reshard_all()

    def _reshard_all(self) -> None:
        """Write the parameters back to the shards, and reshard what no pass has pinned."""
        for unit in self._units:
            unit.pins -= 1
            unit.write_back()
            unit.mark_stale()
            if unit.param.reshard_after_use:
                unit.param.reshard()
        for unit in self._units:
            if unit.pins:  # by a pass of which another backward may come
                unit.param.unshard(self._comm)
                unit.param.wait_for_unshard()
