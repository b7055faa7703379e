"""Where the sum of a unit's gradient over ranks is made, and what becomes of it: a case each.

    SumHere             the gradient lives on the device: it is summed to where it is kept
    SumElsewhere        it lives on another tier: each sum leaves for there, and is added there
    CopiesElsewhere     so it does, and replicas sum what micro-batches have added up to: with the
                        last one that comes back first

A unit has one of them for life: `sum_of`. Each says it for the first sum of a backward, for one of
what came late (see [Note: late units] in `reduce_order.py`), for what is summed with ranks of other
axes at the step's end, and for a gradient that this rank sums with nobody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zrun_core.zero.reduce.reductions import KEPT, Added, Arrival, Leaving, Reductions
from zrun_core.zero.unit.flat_unit import FlatUnit


class Target(NamedTuple):
    """Where a sum is made.

    Attributes:
        into: [updated range], in which the collectives leave it.
        accumulate: they add it to the values of `into`.
        arrival: what becomes of it once it is there.
        scratch: of the ring, in which it lies, beside what leaves from here.
    """

    into: torch.Tensor
    accumulate: bool
    arrival: Arrival
    scratch: Sequence[torch.Tensor] = ()


class UnitSum(ABC):
    """The sums of one unit's gradient.

    Attributes:
        goes_home_each_time: what this rank sums with nobody is stored as soon as it is complete,
            not with the last micro-batch of the step.
    """

    goes_home_each_time: bool

    def __init__(self, unit: FlatUnit, under_way: Reductions) -> None:
        """
        Args:
            under_way: the reductions of the model, of which scratch is taken.
        """
        self._unit = unit
        self._under_way = under_way

    @abstractmethod
    def first(self, own: torch.Tensor, *, boundary: bool) -> Target:
        """Return where the first sum of a backward is made.

        Args:
            own: this rank's gradient [padded_numel], complete.
            boundary: the step's gradient is complete with this one.
        """

    @abstractmethod
    def again(self, own: torch.Tensor, *, boundary: bool) -> Target:
        """Return where a sum of what came late is made, which the first one ends before.

        Args:
            own, boundary: as of `first`.
        """

    @abstractmethod
    def of_step(self) -> Target:
        """Return the part of the step's gradient that this rank updates, to be summed in place."""

    @abstractmethod
    def keep(self, own: torch.Tensor, *, is_last: bool) -> None:
        """Keep the gradient of this rank alone.

        Args:
            own: as of `first`.
            is_last: the step's gradient is complete with this one.
        """

    @abstractmethod
    def reopen(self, *, counts_here: bool) -> None:
        """Prepare for more gradients after the step's sum over ranks was made.

        Args:
            counts_here: of the replicas, which hold this sum alike, this one adds it to the next.
        """


class SumHere(UnitSum):
    """The gradient lives on the device."""

    goes_home_each_time = False

    def first(self, own: torch.Tensor, *, boundary: bool) -> Target:
        grad = self._unit.grad
        return Target(grad.sum_buffer(), grad.is_reduced, KEPT)

    def again(self, own: torch.Tensor, *, boundary: bool) -> Target:
        beside = self._unit.local_part(own)
        return Target(beside, False, Added(beside))

    def of_step(self) -> Target:
        return Target(self._unit.grad.fetch(), False, KEPT)

    def keep(self, own: torch.Tensor, *, is_last: bool) -> None:
        self._unit.grad.put()

    def reopen(self, *, counts_here: bool) -> None:
        self._unit.grad.reopen(counts_here=counts_here)


class SumElsewhere(UnitSum):
    """The gradient lives on another tier, and one rank holds each part of its sum."""

    goes_home_each_time = True

    def first(self, own: torch.Tensor, *, boundary: bool) -> Target:
        added = self._unit.local_part(own)
        is_added = self._unit.grad.is_reduced
        return Target(added, False, Leaving(added, accumulate=is_added, is_last=boundary))

    def again(self, own: torch.Tensor, *, boundary: bool) -> Target:
        added = self._unit.local_part(own)
        return Target(added, False, Leaving(added, accumulate=True, is_last=boundary))

    def of_step(self) -> Target:
        total = self._load()
        leaving = Leaving(total, accumulate=False, is_last=True)
        return Target(total, False, leaving, [total])

    def _load(self) -> torch.Tensor:
        """Return what its home has of the part that this rank updates, in scratch."""
        total = self._under_way.take_scratch(self._unit.layout.shard_numel)
        self._unit.grad.load(total)
        return total

    def keep(self, own: torch.Tensor, *, is_last: bool) -> None:
        """Send this rank's own gradient to its home, and add it there."""
        grad = self._unit.grad
        accumulate = grad.has_partial
        sent = grad.store(own, accumulate=accumulate, is_last=is_last)
        grad.has_partial = True
        grad.end()
        self._under_way.add_leaving(sent, [own])

    def reopen(self, *, counts_here: bool) -> None:
        if self._unit.grad.keeps_partial_sums:
            self._reopen_partial(counts_here=counts_here)
        else:
            self._unit.grad.reopen(counts_here=counts_here)

    def _reopen_partial(self, *, counts_here: bool) -> None:
        """Make this rank's part of the sum, and nothing else, what its micro-batches add up to."""
        grad = self._unit.grad
        whole = self._under_way.take_scratch(self._unit.layout.padded_numel).zero_()
        if counts_here:
            grad.load(self._unit.local_part(whole))
        sent = grad.store(whole, accumulate=False)
        grad.has_partial = True
        grad.is_reduced = False
        self._under_way.add_leaving(sent, [whole])


class CopiesElsewhere(SumElsewhere):
    """The gradient lives on another tier, and each replica holds the same sum."""

    def first(self, own: torch.Tensor, *, boundary: bool) -> Target:
        if not (boundary and self._unit.grad.is_reduced):
            return super().first(own, boundary=boundary)
        total = self._load()
        leaving = Leaving(total, accumulate=False, is_last=True)
        return Target(total, True, leaving, [total])


def sum_of(unit: FlatUnit, under_way: Reductions) -> UnitSum:
    """Return what the reductions of a trained unit have in common."""
    if not unit.grad.leaves:
        return SumHere(unit, under_way)
    if unit.replicate.size > 1:
        return CopiesElsewhere(unit, under_way)
    return SumElsewhere(unit, under_way)
