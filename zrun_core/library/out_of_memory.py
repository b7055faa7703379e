"""What holds memory when a script of the user's own ends for want of it, printed at its end.

Python prints the exception with its lines first; this follows it, on each rank that has one.
"""

from __future__ import annotations

import atexit
import sys
import weakref

from zrun_core.guards.holders import CallsUnderWay, base_bytes, held_memory
from zrun_core.spine.held_memory import HeldMemory
from zrun_core.spine.tracebacks import causes
from zrun_core.user_code.user import is_out_of_memory
from zrun_core.zero.sharded_model import ShardedModel


class ModelsHeld:
    """The models of a run, as long as the script has them, and what the process held before.

    Attributes:
        at_end: what the rank held when its script failed; None: it did not, or had memory.
    """

    def __init__(self, rank: int) -> None:
        self.at_end: HeldMemory | None = None
        self._rank = rank
        self._models: list[weakref.ref[ShardedModel]] = []
        self._base_bytes = 0
        atexit.register(self._tell)

    def add(self, sharded: ShardedModel) -> None:
        """Note a model that was just made."""
        if not self._models:
            self._base_bytes = base_bytes(sharded)
        self._models.append(weakref.ref(sharded))

    def _tell(self) -> None:
        error: BaseException | None = getattr(sys, "last_value", None)
        if error is None or not any(map(is_out_of_memory, causes(error))):
            return
        models = [model for each in self._models if (model := each()) is not None]
        if not models:
            return
        try:
            held = held_memory(models, self._rank, CallsUnderWay.of_error(error), self._base_bytes)
        except Exception as failed:
            if not is_out_of_memory(failed):
                raise
            return  # there is none left even for this
        self.at_end = held
        lines = "\n".join(held.lines())
        print(f"zrun_core: rank {self._rank}: what holds most:\n{lines}", file=sys.stderr)
