"""Versions of a stage's parameters: the newest, and older ones that micro-batches under way use.

PipeDream (Narayanan et al. 2019) updates a stage after each backward, while micro-batches whose
forward has run wait for theirs. Forward and backward of one must see the same parameters, and
autograd keeps views of those that forward saw: so an update leaves them alone. Each unit has a ring
of windows, and the update makes the next version in the window of the oldest, which nobody needs
any more. Stage 0 of 3, with three windows; version v is that after v updates:

                    F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 F5 B3 U3
    window 0        0  .  .  .  .  .  .  .  .  .  3  .  .  .        version 3 replaces 0, which
    window 1                    1  .  .  .  .  .  .  .  .  4        micro-batches 0 to 2 have used
    window 2                             2  .  .  .  .  .  .

A version that passes see is shown: the parameters' `data` are its views. Between two windows of
micro-batches the pipeline is drained, and the newest version is shown: what saves, evaluates or
loads finds one set of parameters, `FlatUnit.full`.
"""

from __future__ import annotations

from collections.abc import Sequence

from zrun_core.zero.unit.flat_unit import FlatUnit


class Versions:
    """The versions of all trained units of a stage.

    Attributes:
        newest: number of the newest version: updates since the pipeline was drained.
    """

    def __init__(self, units: Sequence[FlatUnit], num_versions: int) -> None:
        """
        Args:
            units: of the stage; frozen ones have one version.
            num_versions: windows of each trained unit.
        """
        self.newest = 0
        self._units = [unit for unit in units if unit.trainable]
        self._num_versions = num_versions
        self._place = 0  # of the newest version in the rings
        # By place in the ring, each unit's parameters.
        self._views = [
            [unit.views_of(unit.param.windows[place].full) for unit in self._units]
            for place in range(num_versions)
        ]

    def begin(self) -> None:
        """Count from the newest version on: the pipeline is drained."""
        self.newest = 0

    def show(self, version: int) -> None:
        """Let the module compute with a version."""
        age = self.newest - version
        assert 0 <= age < self._num_versions, f"version {version} is gone"
        shown = self._views[(self._place - age) % self._num_versions]
        for unit, views in zip(self._units, shown, strict=True):
            for param, view in zip(unit.params, views, strict=True):
                param.data = view

    def advance(self) -> None:
        """Make the window of the oldest version that of the next one, before an update.

        Parameters that are their own masters are copied: they are updated in place. Others are cast
        into the window from the masters.
        """
        self.newest += 1
        self._place = (self._place + 1) % self._num_versions
        for unit in self._units:
            before = unit.param.updated
            unit.param.use_window(unit.param.windows[self._place])
            if not unit.has_master and self._num_versions > 1:
                unit.param.updated.copy_(before)

    def repeat(self) -> None:
        """Fill the newest version from the masters: the update that was to do so was not made."""
        for unit in self._units:
            if unit.has_master:
                unit.param.updated.copy_(unit.master)
