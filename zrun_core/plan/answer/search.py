"""The search for the best configuration, and for the cheapest change of a job that makes it fit.

Every candidate of the space is considered. Two bounds that cost next to nothing, on its memory and
on its time (`bounds.py`), decide which of them must be estimated; the result is that of estimating
all of them. States leave the device only where they do not fit on it, and no more of them than
needed. The order is fixed, so that the answer is, too.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from zrun_core.errors import JobError
from zrun_core.hardware.hardware import Hardware
from zrun_core.plan.answer.bounds import BoundedCandidate, Bounds
from zrun_core.plan.answer.outcome import Estimate, SearchResult, offloaded_bytes
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.answer.search_space import SearchSpace, candidates, offload_chains
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.question.transformer import TransformerShape
from zrun_core.plan.trace.profile import Profile

__all__ = ["SHOWN", "SearchGoal", "SearchResult", "SearchSpace", "changes", "search"]

SearchGoal = Literal["fit", "best"]
SHOWN = 10
_SAME_ROOM = 0.01  # of the capacity: headroom that differs by less is the same
_SAME_TIME = 1.01  # and so are seconds, where both matter


def search(
    subject: Profile | TransformerShape | Planner,
    hardware: Hardware,
    space: SearchSpace,
    goal: SearchGoal,
) -> SearchResult:
    """Search a space for the fastest configuration that fits, or for the cheapest change that does.

    The cheapest change of `space.base` is the one with the fewest keys changed, then the one that
    slows a step least.

    Args:
        subject: the model, or a planner of it.
        hardware: to run it on.
        space: the configurations to choose from.
        goal: "best" or "fit".

    Raises:
        JobError: the space leaves nothing to choose from, or has no base to change.
    """
    planner = subject if isinstance(subject, Planner) else Planner(subject, hardware)
    if goal == "fit":
        return _Search(planner, space).cheapest_change()
    return _Search(planner, space).fastest()


class _Fitting(NamedTuple):
    """An estimate that fits. Ordered by time, then headroom, then enumeration."""

    seconds: float
    lacking_room: int  # minus the headroom
    number: int
    variant: int  # with the number, no two are equal
    estimate: Estimate


class _Missed(NamedTuple):
    """A candidate that does not fit. Ordered by the bytes that it lacks."""

    num_bytes: float
    bound: BoundedCandidate


class _Search:
    """One search, and the estimates that it has made."""

    def __init__(self, planner: Planner, space: SearchSpace) -> None:
        self.planner = planner
        self.space = space
        self.hardware = planner.hardware
        self.capacity = planner.hardware.device.memory_bytes
        self._chains = offload_chains(planner, space)
        self._bounds = Bounds(planner, list(itertools.chain(*self._chains)))
        self._done: dict[Candidate, Estimate | None] = {}  # None: impossible after all
        self._considered = 0

    def bounded(self) -> Iterator[BoundedCandidate]:
        """Yield all candidates of which something is known, with everything on the device."""
        for number, candidate in enumerate(candidates(self.planner, self.space)):
            try:
                yield self._bounds.bound(number, candidate)
            except (KeyError, JobError):
                continue

    def _empty(self) -> JobError:
        return JobError(
            f"no configuration has {self.space.global_batch} samples per step on "
            f"{self.hardware.name}: the batch must be a multiple of the data-parallel ranks; give "
            "another batch or other devices"
        )

    # The fastest

    def fastest(self) -> SearchResult:
        """Estimate in the order of the bound on time, until no candidate that is left can matter.

        A candidate matters if it can be among the ten fastest, or if it can be on the front of
        those that nothing beats in both time and headroom.
        """
        bounds = list(self.bounded())
        if not bounds:
            raise self._empty()
        self._considered = len(bounds)
        heap: list[BoundedCandidate] = []
        missed: list[_Missed] = []
        for bound in bounds:
            if bound.num_bytes <= self.capacity:
                heapq.heappush(heap, bound)
            else:
                missed.append(_Missed(bound.num_bytes - self.capacity, bound))
                self._push_offloads(heap, bound)

        fitting: list[_Fitting] = []
        front: list[tuple[float, int]] = []  # (seconds, headroom), fastest first
        while heap:
            bound = heapq.heappop(heap)
            if self._is_beaten(bound, fitting, front):
                continue
            tried = self._try(bound.candidate)
            if tried is None:
                continue
            found, lacks = tried
            if found is None:
                missed.append(_Missed(lacks, bound))
                self._push_offloads(heap, bound)
                continue
            seconds = found.time.seconds
            fitted = _Fitting(seconds, -found.headroom, bound.number, bound.variant, found)
            bisect.insort(fitting, fitted)
            front = _with_point(front, seconds, found.headroom)
        ordered = [each.estimate for each in fitting]
        return self._result(ordered, ordered, self._nearest(missed))

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

    def _is_beaten(
        self,
        bound: BoundedCandidate,
        fitting: Sequence[_Fitting],
        front: Sequence[tuple[float, int]],
    ) -> bool:
        """Return True if ten are faster for sure, and one is about as fast with as much room."""
        if len(fitting) < SHOWN or fitting[SHOWN - 1].seconds > bound.seconds:
            return False
        room = self.capacity - bound.num_bytes - _SAME_ROOM * self.capacity
        latest = bound.seconds * _SAME_TIME
        as_fast = itertools.takewhile(lambda point: point[0] <= latest, front)
        return any(headroom >= room for _, headroom in as_fast)

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
        for key in sorted(groups):
            for bound in sorted(groups[key]):
                if bound.num_bytes > self.capacity:
                    missed.append(_Missed(bound.num_bytes - self.capacity, bound))
                    continue
                if _is_slower(bound, fitting):
                    continue
                tried = self._try(bound.candidate)
                if tried is None:
                    continue
                found, lacks = tried
                if found is None:
                    missed.append(_Missed(lacks, bound))
                else:
                    fitting.append(found)
            if len(fitting) >= SHOWN:
                break
        ordered = sorted(fitting, key=lambda each: _cost(base, each))
        return self._result(ordered, fitting, self._nearest(missed))

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
                self._done[candidate] = self.planner.estimate(candidate, traffic=False)
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

        Args:
            ordered: the estimates that fit, best first.
            fitting: the same, for the front.
            rejected: the nearest that do not fit.
        """

        def by_overshoot(found: Estimate) -> tuple[float, float, str]:
            lacks = _overshoot(found, self.hardware)
            return lacks, found.time.seconds, str(found.candidate)

        def complete(found: Iterable[Estimate]) -> tuple[Estimate, ...]:
            traffic = self.planner.traffic
            moved = self.planner.moved
            return tuple(
                replace(each, traffic=traffic(each.candidate), moved=moved(each.candidate))
                for each in found
            )

        tried = sum(found is not None for found in self._done.values())
        return SearchResult(
            best=complete(ordered[:SHOWN]),
            pareto=complete(_pareto(fitting)),
            rejected=complete(sorted(rejected, key=by_overshoot)[:SHOWN]),
            tried=tried,
            pruned=self._considered - len(self._done),
        )


def changes(base: Candidate, other: Candidate) -> int:
    """Return how many keys of a job differ; the accumulation follows from the others."""
    keys: tuple[Callable[[Candidate], object], ...] = (
        lambda c: c.stage,
        lambda c: c.micro,
        lambda c: c.checkpoint,
        lambda c: c.precision,
        lambda c: c.placement,
        lambda c: c.dims.tp,
        lambda c: c.sequence_parallel,
        lambda c: (c.dims.pp, c.dims.virtual),
        lambda c: c.dims.world_size,
        lambda c: c.stage > 0 and c.dims.shard_size < c.dims.dp,
        lambda c: c.init,
    )
    return sum(key(base) != key(other) for key in keys)


def _cost(base: Candidate, found: Estimate) -> tuple[int, float, str]:
    """Return the price of a change, to be compared: keys, seconds."""
    return changes(base, found.candidate), found.time.seconds, str(found.candidate)


def _is_slower(bound: BoundedCandidate, fitting: Sequence[Estimate]) -> bool:
    """Return True if ten that need no more changes are faster for sure."""
    if len(fitting) < SHOWN:
        return False
    fastest = sorted(each.time.seconds for each in fitting)
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
        return found.time.seconds, -found.headroom, str(found.candidate)

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
