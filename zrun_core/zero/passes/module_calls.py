"""The calls of modules that are under way, and their ends.

a module returns or raises    its hook ends its call
a stage is left               behind its last block, by an exception that is no error: torch
                              calls no hook for it, so all calls under way end here
a micro-batch is abandoned    nothing runs any more: there is nothing to end
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zrun_core.zero.unit.flat_unit import FlatUnit


class ModuleCalls:
    """The calls under way of one model's modules.

    Attributes:
        under_way: what ends each of them, should the module be left; the outermost first.
    """

    def __init__(self, units: Sequence[FlatUnit]) -> None:
        self._units = units
        self.under_way: list[Callable[[], None]] = []

    def leave(self) -> None:
        """End the calls under way, which a stage of a pipeline leaves behind its last block."""
        for end in reversed(self.under_way.copy()):
            end()

    def abandon(self) -> None:
        """Forget the calls under way: no module runs any more."""
        self.under_way.clear()
        for unit in self._units:
            unit.num_active = 0
