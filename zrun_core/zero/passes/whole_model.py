"""The whole model unsharded between two passes, for whoever reads it, writes to it or generates.

enter    every unit is pinned and gathered; nobody reads this rank's shards any more
inside   no pass runs, and nothing is resharded
leave    what was written goes back to the shards; all else is stale, and gathered again
         only where a pass has pinned it, of which another backward may come
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zrun_core.distributed.comm import Comm
from zrun_core.errors import UserCodeError
from zrun_core.zero.passes.running_pass import RunningPass
from zrun_core.zero.unit.flat_unit import FlatUnit


class WholeModel:
    """All units of one model, for as long as someone looks at them.

    Attributes:
        is_unsharded: inside of `unsharded`.
    """

    def __init__(self, units: Sequence[FlatUnit], comm: Comm, running: RunningPass) -> None:
        self._units = units
        self._comm = comm
        self._running = running
        self.is_unsharded = False

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Keep every unit unsharded inside; writes to parameters are kept.

        Collective on entry and on exit. Nested in itself it does nothing.

        Raises:
            UserCodeError: a pass runs.
        """
        running = self._running
        if running.active:
            raise UserCodeError(running.micro.gathered_refusal(running.kind))
        if self.is_unsharded:
            yield
            return
        self.is_unsharded = True
        for unit in self._units:
            unit.pins += 1
            unit.param.unshard(self._comm)
            unit.param.wait_for_unshard()
        self._comm.settle()  # before anything is written that another rank may still read
        try:
            yield
        finally:
            self.is_unsharded = False
            self._reshard()

    def _reshard(self) -> None:
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
