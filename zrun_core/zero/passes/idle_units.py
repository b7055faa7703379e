"""The units that nothing uses at the moment, and when they are resharded.

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

[Note: slices]
Where all micro-batches go through a slice of the model before the next one comes, they share one
pass per step, and what the slice has used becomes idle at its end: of it each finds all units
unsharded, except the first. The units of the last slice stay from its forward to its backward.
"""

from __future__ import annotations

from zrun_core.zero.passes.running_pass import RunningPass
from zrun_core.zero.unit.flat_unit import FlatUnit


class IdleUnits:
    """The idle units of one model; none that is kept unsharded is ever among them."""

    def __init__(self, running: RunningPass) -> None:
        self._running = running
        self._units: list[FlatUnit] = []
        self._held: set[FlatUnit] | None = None  # in use by this slice; None: there are no slices
        self._begun: set[FlatUnit] = set()  # tiles whose backward is under way

    def __contains__(self, unit: FlatUnit) -> bool:
        return unit in self._units

    def hold(self, unit: FlatUnit) -> None:
        """Keep `unit`, which is used now, until its slice ends, if there are slices."""
        if self._held is not None:
            self._held.add(unit)

    def remove(self, unit: FlatUnit) -> None:
        """Take `unit` off the list, which is used again and still unsharded."""
        if unit in self._units:
            self._units.remove(unit)

    def post_forward(self, unit: FlatUnit) -> None:
        """Add `unit`, of which a module has run, unless something uses it yet."""
        if not unit.param.reshard_after_use or unit.num_active:
            return
        if unit.layout.keep_until_pass_ends:
            return
        if self._running.in_backward and (unit in self._begun or not unit.layout.tile):
            return  # a recomputation has run, and `post_backward` is yet to come
        self._units.append(unit)

    def pre_backward(self, unit: FlatUnit) -> None:
        """Remember that the backward of `unit` begins. See [Note: tiles in recomputed blocks]."""
        if unit.layout.tile:
            self._begun.add(unit)

    def post_backward(self, unit: FlatUnit) -> None:
        """Add `unit`, whose backward is over except where it is used as a constant.

        In slices, another one may use it too.
        """
        self._begun.discard(unit)
        if unit.layout.keep_until_pass_ends and self._held is not None:
            return
        if unit.param.reshard_after_use and unit not in self._units:
            self._units.append(unit)

    def reshard(self) -> None:
        """Reshard the idle units. See [Note: idle units]."""
        held = self._held or ()
        idle = self._units
        self._units = [unit for unit in idle if unit in held]
        for unit in idle:
            if unit not in held and not unit.num_active and not unit.pins:
                unit.param.reshard()

    def begin_slice(self) -> None:
        """Reshard what the last slice used. What this one uses stays until it ends."""
        self._held = set()
        self.reshard()

    def end_pass(self) -> None:
        """Forget all: whoever ends a pass reshards what is not pinned, idle or not."""
        self._held = None
        self._units = []
        self._begun.clear()
