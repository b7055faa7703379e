"""The search for the best configuration, and for the cheapest change of a job that makes it fit.

Every candidate of the space is considered. Two bounds that cost next to nothing, on its memory and
on its time (`bounds.py`), decide which of them must be estimated; the result is that of estimating
all of them. States leave the device only where they do not fit on it with room to spare, and no
more of them than needed. The order is fixed, so that the answer is, too; `choice.py` says what
comes first. Whoever interrupts a search gets what it has found so far.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from zrun_core.errors import JobError
from zrun_core.hardware.hardware import Hardware
from zrun_core.plan.answer.bounds import BoundedCandidate, Bounds
from zrun_core.plan.answer.choice import Choice, Lead, distinct, row_of
from zrun_core.plan.answer.outcome import Estimate, SearchResult, offloaded_bytes
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.answer.search_space import SearchSpace, candidates, offload_chains
from zrun_core.plan.question.candidate import Candidate, changes

__all__ = ["SHOWN", "SearchGoal", "SearchResult", "SearchSpace", "SearchState", "search"]

SearchGoal = Literal["fit", "best"]
SHOWN = 10
_SAME_ROOM = 0.01  # of the capacity: headroom that differs by less is the same
_SAME_TIME = 1.01  # and so are seconds, where both matter


@dataclass(frozen=True)
class SearchState:
    """Where a search stands.

    Attributes:
        tried: configurations that were estimated.
        considered: known so far, those included that a bound has ruled out.
        best: so far; None: nothing fits yet.
        tp: tensor-parallel ranks of which a part of the model is traced now.
        way, ways: which of how many numbers of such ranks; 0: nothing is traced.
    """

    tried: int
    considered: int
    best: Estimate | None
    tp: int = 1
    way: int = 0
    ways: int = 0


Watch = Callable[[SearchState], None]


def search(
    planner: Planner,
    space: SearchSpace,
    goal: SearchGoal,
    watch: Watch = lambda state: None,
) -> SearchResult:
    """Search a space for the fastest configuration that fits, or for the cheapest change that does.

    The cheapest change of `space.base` is the one with the fewest keys changed, then the one that
    slows a step least.

    Args:
        goal: "best" or "fit".

    Raises:
        JobError: the space leaves nothing to choose from, or has no base to change.
        KeyboardInterrupt: it was interrupted before anything was found.
    """
    try:
        searching = _Search(planner, space, watch)
        return searching.cheapest_change() if goal == "fit" else searching.fastest()
    finally:
        planner.parts.close()


class _Missed(NamedTuple):
    """A candidate that does not fit. Ordered by the bytes that it lacks."""

    num_bytes: float
    bound: BoundedCandidate


class _Standing:
    """What fits so far, and which candidates need not be estimated any more.

    Attributes:
        fitting: estimates, in the order in which they were made.
        lead: the first of them.
    """

    def __init__(self, choice: Choice, capacity: int) -> None:
        self.choice = choice
        self.capacity = capacity
        self.fitting: list[Estimate] = []
        self.lead: Lead | None = None
        self._front: list[tuple[float, int]] = []  # (seconds, headroom), fastest first
        self._rows: dict[bool, dict[object, float]] = {True: {}, False: {}}  # those with room; all

    def add(self, found: Estimate) -> None:
        self.fitting.append(found)
        self.lead = self.choice.lead(self.fitting)
        seconds = found.time.cautious
        self._front = _with_point(self._front, seconds, found.headroom)
        row = row_of(found)
        for needs_room, rows in self._rows.items():
            if self.choice.is_roomy(found) or not needs_room:
                rows[row] = min(seconds, rows.get(row, seconds))

    def is_beaten(self, bound: BoundedCandidate) -> bool:
        """Return True if a candidate is not first, not shown, and has no room that others lack.

        Ten are faster for sure, of those with room if it may have room itself, and one is about as
        fast with as much room.
        """
        room = self.capacity - bound.num_bytes
        if self.choice.may_lead(bound.candidate, bound.seconds, room, self.lead):
            return False
        rows = sorted(self._rows[room >= self.choice.room].values())
        if len(rows) < SHOWN or rows[SHOWN - 1] > bound.seconds:
            return False
        latest = bound.seconds * _SAME_TIME
        as_fast = itertools.takewhile(lambda point: point[0] <= latest, self._front)
        return any(headroom >= room - _SAME_ROOM * self.capacity for _, headroom in as_fast)


class _Search:
    """One search, and the estimates that it has made."""

    def __init__(
        self, planner: Planner, space: SearchSpace, watch: Watch = lambda state: None
    ) -> None:
        self.planner = planner
        self.space = space
        self.hardware = planner.hardware
        self.capacity = planner.hardware.device.memory_bytes
        self._watch = watch
        self._chains = offload_chains(planner, space)
        self._bounds = Bounds(planner, list(itertools.chain(*self._chains)))
        self._done: dict[Candidate, Estimate | None] = {}  # None: impossible after all
        self._considered = 0
        self._best: Estimate | None = None  # so far
        base = None if space.base is None else self._estimate(space.base)
        self.choice = Choice(self.hardware, space.headroom, base)

    def bounded(self) -> Iterator[BoundedCandidate]:
        """Yield all candidates of which something is known, with everything on the device."""
        for number, candidate in enumerate(candidates(self.planner, self.space, self._tell_way)):
            try:
                yield self._bounds.bound(number, candidate)
            except (KeyError, JobError):
                continue

    def _tell(self) -> None:
        self._watch(SearchState(len(self._done), self._considered, self._best))

    def _tell_way(self, tp: int, way: int, ways: int) -> None:
        self._watch(SearchState(len(self._done), self._considered, self._best, tp, way, ways))

    def _empty(self) -> JobError:
        return JobError(
            f"no configuration has {self.space.global_batch} samples per step on "
            f"{self.hardware.name}: the batch must be a multiple of the data-parallel ranks; give "
            "another batch or other devices"
        )

    # The fastest

    def fastest(self) -> SearchResult:
        """Estimate in the order of the bound on time, until no candidate that is left can matter.

        A candidate matters if it can come first, if it can be among the ten that are shown, or if
        it can be on the front of those that nothing beats in both time and headroom. Each way to
        divide layers may take a trace: between two of them some are estimated, so that whoever
        interrupts the next has an answer.
        """
        standing = _Standing(self.choice, self.capacity)
        missed: list[_Missed] = []
        heap: list[BoundedCandidate] = []
        is_interrupted = False
        try:
            for _, bounds in itertools.groupby(self.bounded(), self._traced_apart):
                for bound in bounds:
                    self._considered += 1
                    if bound.num_bytes <= self.capacity:
                        heapq.heappush(heap, bound)
                    else:
                        missed.append(_Missed(bound.num_bytes - self.capacity, bound))
                        self._push_offloads(heap, bound)
                self._drain(heap, standing, missed, most=SHOWN)
            self._drain(heap, standing, missed)
        except KeyboardInterrupt:
            if not standing.fitting and not self.choice.replaces:
                raise
            is_interrupted = True
        if not self._considered:
            raise self._empty()
        nearest = [] if is_interrupted else self._nearest(missed)
        found = self._result(self.choice.rows(standing.fitting), standing.fitting, nearest)
        keeps_base = standing.lead is None and self.choice.replaces
        return replace(found, keeps_base=keeps_base, is_interrupted=is_interrupted)

    def _traced_apart(self, bound: BoundedCandidate) -> int:
        """Return a number that is equal for candidates with one trace."""
        return bound.candidate.dims.tp

    def _drain(
        self,
        heap: list[BoundedCandidate],
        standing: _Standing,
        missed: list[_Missed],
        most: float = math.inf,
    ) -> None:
        """Estimate those of the candidates on a heap that matter, the fastest by bound first.

        At most `most` are estimated. What fits is added to `standing`, what does not to `missed`.
        """
        end = len(self._done) + most
        while heap and len(self._done) < end:
            bound = heapq.heappop(heap)
            if standing.is_beaten(bound):
                continue
            self._tell()
            tried = self._try(bound.candidate)
            if tried is None:
                continue
            found, lacks = tried
            if found is None:
                missed.append(_Missed(lacks, bound))
            else:
                standing.add(found)
                self._best = None if standing.lead is None else standing.lead.first
            if found is None or not self.choice.is_roomy(found):
                self._push_offloads(heap, bound)

    def _push_offloads(self, heap: list[BoundedCandidate], bound: BoundedCandidate) -> None:
        """Consider a candidate with states elsewhere, or with more of them there.

        Of each way to offload that is the least share of the states with which it may fit.
        """
        candidate = bound.candidate
        placement = candidate.placement
        for chain in self._chains:
            is_other_way = replace(placement, fraction=1.0) != chain[-1]
            if candidate.offloads and is_other_way:
                continue
            for more in chain:
                if candidate.offloads and more.fraction <= placement.fraction:
                    continue
                if self.planner.why_not_placed(replace(candidate, placement=more)):
                    break
                self._considered += 1
                if self._bounds.least_bytes(bound.number, candidate, more) <= self.capacity:
                    heapq.heappush(heap, self._bounds.at(bound.number, candidate, more))
                    break

    # The cheapest change

    def cheapest_change(self) -> SearchResult:
        """Estimate candidates with ever more changes, until ten of them fit."""
        base = self.space.base
        if base is None:
            raise JobError(
                "the cheapest change is one of something: give the configuration that the job asks "
                "for"
            )
        groups = self._by_changes(base)
        if not groups:
            raise self._empty()
        fitting: list[Estimate] = []
        missed: list[_Missed] = []
        is_interrupted = False
        try:
            for key in sorted(groups):
                self._try_group(sorted(groups[key]), fitting, missed)
                if len(fitting) >= SHOWN and any(map(self.choice.is_roomy, fitting)):
                    break
        except KeyboardInterrupt:
            if not fitting:
                raise
            is_interrupted = True

        def cost(found: Estimate) -> tuple[bool, int, float, str]:
            is_tight = not self.choice.is_roomy(found)
            changed = changes(base, found.candidate)
            return is_tight, changed, found.time.cautious, str(found.candidate)

        nearest = [] if is_interrupted else self._nearest(missed)
        found = self._result(distinct(sorted(fitting, key=cost)), fitting, nearest)
        return replace(found, is_interrupted=is_interrupted)

    def _try_group(
        self,
        bounds: Sequence[BoundedCandidate],
        fitting: list[Estimate],
        missed: list[_Missed],
    ) -> None:
        """Estimate candidates with as many changes, but for those that ten others beat.

        What fits is added to `fitting`, what does not to `missed`.
        """
        for bound in bounds:
            room = self.capacity - bound.num_bytes
            if room < 0:
                missed.append(_Missed(-room, bound))
                continue
            with_room = [each for each in fitting if self.choice.is_roomy(each)]
            rivals = with_room if room >= self.choice.room else fitting
            if _is_slower(bound, rivals):
                continue
            self._best = next(iter(with_room or fitting), None)
            self._tell()
            tried = self._try(bound.candidate)
            if tried is None:
                continue
            found, lacks = tried
            if found is None:
                missed.append(_Missed(lacks, bound))
            else:
                fitting.append(found)

    def _by_changes(self, base: Candidate) -> dict[int, list[BoundedCandidate]]:
        """Return all candidates by the number of keys that differ."""
        elsewhere = self._bounds.placements[1:]
        groups: dict[int, list[BoundedCandidate]] = {}
        for first in self.bounded():
            others = [
                self._bounds.at(first.number, first.candidate, placement)
                for placement in elsewhere
                if not self.planner.why_not_placed(replace(first.candidate, placement=placement))
            ]
            for bound in (first, *others):
                self._considered += 1
                groups.setdefault(changes(base, bound.candidate), []).append(bound)
        return groups

    # Estimates

    def _try(self, candidate: Candidate) -> tuple[Estimate | None, int] | None:
        """Estimate a candidate if it may fit.

        Returns:
            the estimate, None if the candidate does not fit; and the bytes that it lacks. None
            alone: the candidate is impossible after all.
        """
        try:
            lacks = self.planner.overshoot(candidate)
        except JobError:
            self._done[candidate] = None
            return None
        if lacks > 0:
            return None, lacks  # known without the rest of the estimate
        found = self._estimate(candidate)
        if found is None:
            return None, lacks
        if not found.fits:
            return None, _overshoot(found, self.hardware)  # of a host's memory, or of its disks
        return found, 0

    def _estimate(self, candidate: Candidate) -> Estimate | None:
        """Return the estimate; None where it is impossible after all."""
        if candidate not in self._done:
            try:
                self._done[candidate] = self.planner.estimate(
                    candidate, traffic=False, all_stages=False
                )
            except JobError:
                self._done[candidate] = None
        return self._done[candidate]

    def _nearest(self, missed: Sequence[_Missed]) -> list[Estimate]:
        """Return estimates of those that lack least, as far as their bounds tell."""
        least = heapq.nsmallest(2 * SHOWN, missed)
        near = [self._estimate(each.bound.candidate) for each in least]
        return [found for found in near if found is not None]

    def _result(
        self,
        ordered: Sequence[Estimate],
        fitting: Sequence[Estimate],
        rejected: Iterable[Estimate],
    ) -> SearchResult:
        """Return what was found, complete with traffic.

        `ordered` are the estimates that fit, best first, and `fitting` the same, for the front;
        `rejected` are the nearest that do not fit.
        """

        def by_overshoot(found: Estimate) -> tuple[float, float, str]:
            lacks = _overshoot(found, self.hardware)
            return lacks, found.time.seconds, str(found.candidate)

        def complete(found: Iterable[Estimate]) -> tuple[Estimate, ...]:
            planner = self.planner
            return tuple(
                replace(
                    each,
                    traffic=planner.traffic(each.candidate),
                    sent_apart=planner.sent_apart(each.candidate),
                    moved=planner.moved(each.candidate),
                )
                for each in found
            )

        tried = sum(found is not None for found in self._done.values())
        return SearchResult(
            best=complete(ordered[:SHOWN]),
            pareto=complete(_pareto(fitting)),
            rejected=complete(distinct(sorted(rejected, key=by_overshoot))[:SHOWN]),
            tried=tried,
            pruned=self._considered - len(self._done),
        )


def _is_slower(bound: BoundedCandidate, fitting: Sequence[Estimate]) -> bool:
    """Return True if ten that need no more changes are faster for sure."""
    if len(fitting) < SHOWN:
        return False
    fastest = sorted(each.time.cautious for each in fitting)
    return fastest[SHOWN - 1] <= bound.seconds


def _with_point(
    front: list[tuple[float, int]], seconds: float, headroom: int
) -> list[tuple[float, int]]:
    """Return the front of what nothing beats in both seconds and headroom, with one more point."""
    if any(other <= seconds and room >= headroom for other, room in front):
        return front
    left = [(other, room) for other, room in front if other < seconds or room > headroom]
    bisect.insort(left, (seconds, headroom))
    return left


def _pareto(fitting: Iterable[Estimate]) -> list[Estimate]:
    """Return what nothing beats in both time and headroom, fastest first."""

    def by_time(found: Estimate) -> tuple[float, int, str]:
        return found.time.cautious, -found.headroom, str(found.candidate)

    front: list[Estimate] = []
    for found in sorted(fitting, key=by_time):
        if not front or found.headroom > front[-1].headroom:
            front.append(found)
    return front


def _overshoot(found: Estimate, hardware: Hardware) -> int:
    """Return the most bytes that a device, a node's memory or its disks lack."""
    host = 0
    if not hardware.shares_memory:
        host = found.host_bytes - hardware.host_bytes
    if hardware.offload_bytes is not None:
        host = max(host, offloaded_bytes(found.host_parts) - hardware.offload_bytes)
    ranks = min(hardware.devices_per_node, found.candidate.dims.world_size)
    disk = max(rank.disk for rank in found.ranks) * ranks
    if disk:
        disk -= hardware.disk_bytes
    return max(-found.headroom, host, disk)
