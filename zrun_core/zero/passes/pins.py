"""What a micro-batch keeps unsharded until it has ended, whatever runs meanwhile.

    forward of 0     forward of 1     backward of 0     backward of 1
    looks at A       looks at A       releases A        releases A: now A may be resharded

Several micro-batches may be under way: a unit counts who has pinned it (`FlatUnit.pins`), and each
of them knows what (`MicroPass.pinned`).
"""

from __future__ import annotations

from collections.abc import Sequence

from zrun_core.zero.passes.running_pass import RunningPass
from zrun_core.zero.passes.whole_model import WholeModel
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.unit.micro_pass import MicroPass


class Pins:
    """The units of one model that micro-batches have pinned."""

    def __init__(self, running: RunningPass, whole: WholeModel) -> None:
        """
        Args:
            whole: while all is unsharded, nothing needs to be pinned.
        """
        self._running = running
        self._whole = whole

    def pin(self, units: Sequence[FlatUnit]) -> None:
        """Keep `units` unsharded until the micro-batch of which something runs has ended."""
        if self._whole.is_unsharded:
            return
        micro = self._running.micro
        for unit in units:
            if unit not in micro.pinned:
                unit.pins += 1
                micro.pinned.append(unit)

    def release(self, micro: MicroPass) -> None:
        """Release what `micro` has pinned: no backward of it follows."""
        for unit in micro.pinned:
            unit.pins -= 1
            in_use = unit.pins or unit.num_active or self._running.active
            if unit.param.reshard_after_use and not in_use:
                unit.param.reshard()
        micro.pinned = []
