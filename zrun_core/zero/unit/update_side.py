"""A unit as its update sees it: what comes to where the update runs, and what goes back.

                      device                      where the update runs
    gradient          grad.local      ───────►    grad()
    parameters        param.updated   ◄───────    target()
    record                                        record.home.at()

All of it is the device, unless the record has its home on the host or a disk. Then the update runs
in the host's memory, in a thread beside training: `begin` says that it has been asked for, and
whoever needs the unit waits for it.

Where parameters alone have their home elsewhere, the update runs on the device. What it makes of
them leaves from the window that they are gathered in, which is empty between two passes; the next
unit is updated meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zrun_core.memory.buffers import Kind, Tier
from zrun_core.tiers.transfer import DONE, Transfer

if TYPE_CHECKING:
    from zrun_core.zero.unit.flat_unit import FlatUnit


class UpdateSide:
    """The update's side of one unit.

    Attributes:
        is_elsewhere: the record is not on the device, and the update runs beside training.
        is_delayed: nobody but `FlatUnit.settle` waits for the update that runs, or has run.
    """

    def __init__(self, unit: FlatUnit) -> None:
        self._unit = unit
        self._tiers = unit.tiers
        self.is_elsewhere = unit.placement.optimizer is not Tier.DEVICE
        is_apart = self._tiers is not None and not self._tiers.host_is_device
        self._is_apart = self.is_elsewhere and is_apart
        has_param = unit.placement.param is Tier.DEVICE
        self._sends_params = is_apart and not self.is_elsewhere and not has_param
        self.is_delayed = False
        self._updating: Transfer | None = None
        self._arriving: Transfer = DONE  # updated parameters, on the device
        self._staged: torch.Tensor | None = None  # the gradient, where the update runs
        self._coming_down: Transfer = DONE  # to there
        self._going_up: torch.Tensor | None = None  # staging of the updated parameters
        self._leaving: Transfer | None = None  # updated parameters, from the window to their home

    # In the thread that updates

    def read_ahead(self, *, waits: bool = False) -> None:
        """Begin to fetch the record, if there is memory for it.

        Args:
            waits: as of `Home.fetch_if_free`.
        """
        self._unit.record.home.fetch_if_free(waits=waits)

    def prefetch(self) -> None:
        """Begin to fetch what the next update needs.

        The gradient takes one of two slots: the update before it has the other one.
        """
        unit = self._unit
        unit.record.home.fetch()
        if not unit.has_master:
            unit.param.home.fetch()
        if unit.grad.leaves:
            unit.grad.home.fetch()
        elif self._is_apart:
            self._bring_down()

    def grad(self) -> torch.Tensor:
        """Return the gradient, [updated range] in reduce dtype."""
        grad = self._unit.grad
        if grad.leaves or not self._is_apart:
            return grad.fetch()
        staged = self._bring_down()
        self._coming_down.wait_on_host()
        return staged

    def _bring_down(self) -> torch.Tensor:
        """Begin to copy the device's gradient to a slot, unless it is there or on its way."""
        if self._staged is None:
            assert self._tiers is not None
            local = self._unit.grad.local
            self._staged = self._tiers.gradients_down.take(local.nbytes).view(local.dtype)
            self._coming_down = self._tiers.copy_down(local, self._staged, Kind.GRAD)
        return self._staged

    def drop_grad(self) -> None:
        """Release the memory of the gradient."""
        self._unit.grad.drop()
        if self._staged is not None:
            assert self._tiers is not None
            self._tiers.gradients_down.give(self._staged)
            self._staged = None
            self._coming_down = DONE

    def target(self) -> torch.Tensor | None:
        """Return where the masters are cast to, [updated range] in compute dtype.

        None: the parameters are their own masters.
        """
        unit = self._unit
        if not unit.has_master:
            return None
        if self._sends_params:
            return unit.param.take_window()
        if unit.placement.param is not Tier.DEVICE or not self._is_apart:
            return unit.param.updated
        assert self._tiers is not None
        local = unit.param.updated
        self._going_up = self._tiers.parameters_up.take(local.nbytes).view(local.dtype)
        return self._going_up

    def forget(self) -> None:
        """Let go of what was read ahead for an update that is not made."""
        self._unit.record.home.drop()

    def end(self) -> None:
        """Store what was written in its homes, and let the memory go."""
        unit = self._unit
        self.drop_grad()
        unit.record.home.put()
        unit.record.home.drop()
        if self._sends_params:
            self._leaving = unit.param.store_window()
            return
        unit.param.home.put()
        unit.param.home.drop()
        if self._going_up is not None:
            assert self._tiers is not None
            self._arriving = self._tiers.copy_up(self._going_up, unit.param.updated, Kind.PARAM)
            self._tiers.parameters_up.give(self._going_up, after=self._arriving)
            self._going_up = None

    # In the thread that trains

    @property
    def is_running(self) -> bool:
        """True while an update is not known to be over."""
        return self._updating is not None

    def begin(self, updating: Transfer, *, delayed: bool) -> None:
        """Have others wait for an update that was asked for.

        Args:
            updating: is over when the update is.
        """
        self._updating = updating
        self.is_delayed = delayed

    def wait_to_unshard(self) -> None:
        """Wait for the update, if the next forward is to see it."""
        if not self.is_delayed:
            self.wait()

    def wait(self) -> None:
        """Wait for the update, if there is one. It raises its errors."""
        if self._updating is not None:
            assert self._tiers is not None
            self._tiers.wait_for_update(self._updating)
            self._updating = None
        self.wait_for_arrival()

    def wait_for_arrival(self) -> None:
        """Wait for updated parameters on their way to the device, or from there to their home."""
        if self._arriving is not DONE:
            assert self._tiers is not None
            self._tiers.wait(self._arriving, Tier.HOST)
            self._arriving = DONE
        if self._leaving is not None:
            assert self._tiers is not None
            self._tiers.wait(self._leaving, Tier.HOST)
            self._leaving = None
            self._unit.param.give_window()
