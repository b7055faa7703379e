"""Which estimate of a search comes first: fast for sure, with memory to spare, and simple.

    choice = Choice(hardware, headroom=0.07, base=planner.estimate(asked))
    choice.lead(fitting)        # None: the base is as fast as anything, as far as can be told
    choice.rows(fitting)        # one of each time and memory, best first

An estimate is wrong by a few hundredths where it compares two ways to run the same operations, and
by more where ranks divide the model otherwise. What would replace a job that runs must be faster
than that by its estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from zrun_core.hardware.hardware import Hardware
from zrun_core.plan.answer.outcome import Estimate
from zrun_core.plan.question.candidate import Candidate, changes, features

HEADROOM = 0.07  # of a device's memory that is left free, where nobody says otherwise
_NEAR = 1.04  # times the seconds of the fastest: the simplest of these comes first
# Of the range around a step time: the part in which two estimates may differ from each other. What
# makes both wrong alike, such as the rate of products, does not change their order.
_OF_SPREAD_ALIKE = 0.2
_OF_SPREAD_OTHERWISE = 0.5  # where ranks divide the model in another way


class Lead(NamedTuple):
    """What comes first, and the seconds of the fastest that might."""

    first: Estimate
    fastest: float


@dataclass(frozen=True)
class Choice:
    """The order of what fits.

    Attributes:
        headroom: share of a device's memory: what leaves less comes behind what leaves as much.
        base: the estimate of what was asked for; None: nothing was, or it cannot run.
    """

    hardware: Hardware
    headroom: float = HEADROOM
    base: Estimate | None = None

    @property
    def room(self) -> float:
        """Bytes of a device that are to be left free."""
        return self.headroom * self.hardware.device.memory_bytes

    def is_roomy(self, found: Estimate) -> bool:
        return found.headroom >= self.room

    @property
    def replaces(self) -> bool:
        """True if what is found would replace a job that can run."""
        return self.base is not None and self.base.fits and not self.base.knows_states_only

    def latest(self, candidate: Candidate) -> float:
        """Return the seconds of a step up to which a candidate is faster than the base for sure."""
        if not self.replaces:
            return math.inf
        assert self.base is not None
        return self.base.time.cautious * (1 - self.margin(candidate))

    def margin(self, candidate: Candidate) -> float:
        """Return by what share of its step a candidate must be faster than the base."""
        assert self.base is not None
        alike, otherwise = margins_of(self.hardware)
        is_alike = _layout(candidate) == _layout(self.base.candidate)
        return alike if is_alike else otherwise

    def lead(self, fitting: Iterable[Estimate]) -> Lead | None:
        """Return what comes first; None: the base does, or nothing fits."""
        able = [each for each in fitting if each.time.cautious <= self.latest(each.candidate)]
        roomy = [each for each in able if self.is_roomy(each)]
        if roomy or self.replaces:
            able = roomy
        if not able:
            return None
        fastest = min(each.time.cautious for each in able)
        near = (each for each in able if each.time.cautious <= _NEAR * fastest)
        return Lead(min(near, key=self._simplicity), fastest)

    def may_lead(
        self, candidate: Candidate, seconds: float, room: float, lead: Lead | None
    ) -> bool:
        """Return whether a candidate may come first.

        Args:
            seconds, room: bounds of its step time, and of the bytes that it leaves.
        """
        if seconds > self.latest(candidate):
            return False
        has_room = room >= self.room
        if self.replaces and not has_room:
            return False
        if lead is None:
            return True
        leads_with_room = self.is_roomy(lead.first)
        if has_room != leads_with_room:
            return has_room
        if seconds <= lead.fastest:  # it may also move what is near
            return True
        is_near = seconds <= _NEAR * lead.fastest
        return is_near and self._plainness(candidate) < self._plainness(lead.first.candidate)

    def rows(self, fitting: Iterable[Estimate]) -> list[Estimate]:
        """Return one estimate of each time and memory, the simplest; those with room come first.

        The first of all is that of `lead`, or the base that stays.
        """
        fitting = list(fitting)
        lead = self.lead(fitting)
        first = None if lead is None else lead.first
        if first is None and self.replaces:
            first = self.base
        leading = [] if first is None else [first]
        rows = distinct([*leading, *sorted(fitting, key=self._simplicity)])
        return sorted(rows, key=lambda each: (each is not first, *self.rank(each)))

    def rank(self, found: Estimate) -> tuple[bool, float, int, str]:
        """Return what estimates are sorted by: room, time, memory."""
        is_tight = not self.is_roomy(found)
        return is_tight, found.time.cautious, -found.headroom, str(found.candidate)

    def _simplicity(self, found: Estimate) -> tuple[int, int, float, int, str]:
        return (*self._plainness(found.candidate), *self.rank(found)[1:])

    def _plainness(self, candidate: Candidate) -> tuple[int, int]:
        """Return how many features a candidate uses, and how many keys of the base it changes."""
        changed = 0 if self.base is None else changes(self.base.candidate, candidate)
        return features(candidate), changed


def margins_of(hardware: Hardware) -> tuple[float, float]:
    """Return by what share two estimates may be wrong to each other.

    Returns:
        Where ranks divide the model alike, and otherwise.
    """
    return _OF_SPREAD_ALIKE * hardware.spread, _OF_SPREAD_OTHERWISE * hardware.spread


def row_of(found: Estimate) -> tuple[float, int]:
    """Return the time and the free memory of an estimate as a table shows them."""
    seconds = found.time.seconds
    digits = 2 - math.floor(math.log10(seconds)) if seconds > 0 else 0
    return round(seconds, digits), round(100 * found.headroom / max(1, found.capacity))


def distinct(found: Iterable[Estimate]) -> list[Estimate]:
    """Return the first of each time and free memory."""
    rows: dict[tuple[float, int], Estimate] = {}
    for each in found:
        rows.setdefault(row_of(each), each)
    return list(rows.values())


def _layout(candidate: Candidate) -> tuple[object, ...]:
    """Return how ranks divide the model and the batch."""
    dims = candidate.dims
    return dims.dp, dims.tp, dims.pp, dims.virtual, candidate.schedule, candidate.sequence_parallel
