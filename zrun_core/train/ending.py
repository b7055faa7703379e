"""Requests to end a run before its job says so: of a signal, a hook, or an early stop."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import Group
from zrun_core.spine.events import Emitter
from zrun_core.spine.stop_signals import StopSignals
from zrun_core.telemetry.progress import Progress
from zrun_core.telemetry.step_totals import StepTotals
from zrun_core.train.user_hooks import Hooks


class Ending(NamedTuple):
    """The `reason` and `why` of the `end` event."""

    reason: str
    why: str | None = None

    def __str__(self) -> str:
        return self.reason if self.why is None else f"{self.reason}: {self.why}"


class EndRequests:
    """Requests to end the run, and what all ranks agreed on.

    A signal reaches one rank, and a hook may ask on one only. Both travel as numbers in the step's
    message, so every rank learns of them with the same step and all end together.

    Attributes:
        must_stop: a signal asked some rank: all leave after this step, saved.
        early: why the run ends early, the same on every rank; None: it goes on.
    """

    def __init__(
        self,
        stop: StopSignals,
        hooks: Hooks,
        comm: Comm,
        world: Group,
        emitter: Emitter,
        progress: Progress,
    ) -> None:
        self.progress = progress
        self.must_stop = False
        self.early: Ending | None = None
        self._stop = stop
        self._hooks = hooks
        self._comm = comm
        self._world = world
        self._emitter = emitter
        self._has_told_stop = False
        self._is_asked_by_hook = False  # on some rank

    def asked_to_stop(self) -> bool:
        """Return whether a signal came to this rank."""
        asked = self._stop.first
        if asked is not None and not self._has_told_stop:
            self._has_told_stop = True
            self._emitter.emit("stop", step=self.progress.steps, signal=asked.name)
        return asked is not None

    def update(self, totals: StepTotals) -> None:
        """Learn of requests on other ranks from a step's totals."""
        self.must_stop |= totals.stop > 0
        self._is_asked_by_hook |= totals.end > 0

    def request(self, ending: Ending) -> None:
        """End the run early, on every rank alike; the first request counts."""
        if self.early is None:
            self.early = ending

    def hear_hooks(self) -> None:
        """Learn of a hook's request outside of a step, as after `on_eval`. Collective."""
        own = torch.tensor([float(bool(self._hooks.wish))], device=self._comm.device)
        total = self._comm.all_reduce_small(own, self._world, name="ending")
        self._is_asked_by_hook |= self._comm.read(total)[0] > 0

    def agree(self) -> None:
        """Learn which hook asked for the end, and why. Collective if one did."""
        if not self._is_asked_by_hook or self.early is not None:
            return
        wishes = self._comm.all_gather_bytes(self._hooks.wish.encode(), self._world, name="ending")
        first = next(wish.decode() for wish in wishes if wish)
        self.request(Ending("hook", first))
