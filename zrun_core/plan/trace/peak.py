"""The peak of a traced micro-batch: the moment at which most memory is in use.

It is a maximum over live sets, and never a sum of categories: of any micro-batch, or of a pipeline
stage with several micro-batches in flight. Nothing here needs torch.

A model of n blocks has n + 1 segments: segment k ends with block k, segment n follows the last one.
A chunk of a pipeline is a range of them, and what it shares with its neighbours arrives when its
pass begins, and leaves when that ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zrun_core.plan.trace.rows import (
    EVENT_KINDS,
    PHASE_NUMBER,
    PHASES,
    Numbering,
    Rows,
    TracePhase,
    distinct,
    values_at,
)

if TYPE_CHECKING:
    from zrun_core.plan.trace.profile import Trace

_NUM_HOLDERS = 3
_BLOCK_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_PLURALS = {"activation": "activations", "temp": "temporaries", "grad": "gradients"}


@dataclass(frozen=True)
class Peak:
    """The moment at which most memory is in use.

    Attributes:
        num_bytes: in use, `steady` included.
        phase: in which it is.
        module: that runs then.
        holders: largest groups of live tensors and their bytes, largest first; without `steady`.
        dynamic: bytes of live tensors, without `steady`.
    """

    num_bytes: int
    phase: TracePhase
    module: str
    holders: tuple[tuple[str, int], ...]
    dynamic: int = 0


class Course(NamedTuple):
    """Memory in use through a forward, a backward and what follows, event by event.

    Attributes:
        num_bytes: after each event, what is there anyway included.
        phases: in which each event is.
        modules: that run then; "" outside of them.
    """

    num_bytes: tuple[int, ...]
    phases: tuple[TracePhase, ...]
    modules: tuple[str, ...]


class Moment(NamedTuple):
    """A pass through a chunk of a pipeline stage, and what waits there meanwhile.

    Attributes:
        is_forward: or backward.
        chunk: of the stage, counted among its own.
        held: by chunk of the stage, other micro-batches between their forward and their backward.
        weights: by chunk of the stage, micro-batches whose weights' gradients are still to be made.
    """

    is_forward: bool
    chunk: int
    held: tuple[int, ...]
    weights: tuple[int, ...]


ONE_AT_A_TIME = (Moment(True, 0, (0,), (0,)), Moment(False, 0, (0,), (0,)))


class ChunkEvents(NamedTuple):
    """The events of one chunk, in order, and the tensors that they are about."""

    # By tensor
    alloc: NDArray[np.int64]  # event with which it comes
    free: NDArray[np.int64]  # event with which it goes; number of events if it stays
    size: NDArray[np.float64]  # [tensors, 2], affine
    group: NDArray[np.int64]  # number of the name under which it is counted
    # By event
    tensor: NDArray[np.int64]
    sign: NDArray[np.float64]  # +1 where the tensor comes, -1 where it goes
    phase: NDArray[np.int64]
    module: NDArray[np.int64]

    forward_end: int  # number of events before the backward pass

    @classmethod
    def nothing(cls) -> ChunkEvents:
        """Return those of a chunk in which nothing happens."""
        numbers = np.zeros(0, dtype=np.int64)
        values = np.zeros(0, dtype=np.float64)
        sizes = np.zeros((0, 2), dtype=np.float64)
        return cls(numbers, numbers, sizes, numbers, numbers, values, numbers, numbers, 0)


class Lifetimes:
    """The times at which tensors of a trace come and go, for the whole model and for parts of it.

    Attributes:
        modules: names of modules, by number.
        groups: names under which tensors are counted, by number.
    """

    def __init__(self, events: Rows, modules: Sequence[str]) -> None:
        """
        Args:
            events: rows of memory that comes or goes.
            modules: names that the numbers in their `module` stand for.
        """
        self.modules = modules
        self._blocks = events["block"].astype(np.int64)
        num_events = len(events)
        comes = np.flatnonzero(events["alloc"])
        goes = np.flatnonzero(~events["alloc"])
        # Tensors are numbered anew, in the order in which they come.
        place_of = np.zeros(int(events["tensor"].max(initial=-1)) + 1, dtype=np.int64)
        place_of[events["tensor"][comes]] = np.arange(len(comes))
        tensor = place_of[events["tensor"]]
        free = np.full(len(comes), num_events, dtype=np.int64)
        free[tensor[goes]] = goes
        backward = np.flatnonzero(events["phase"] == PHASE_NUMBER[TracePhase.BACKWARD])
        allocs = events[comes]
        self.groups, group = _groups(allocs, modules)
        self._accumulates = allocs["accumulates"]
        self._all = ChunkEvents(
            alloc=comes,
            free=free,
            size=np.ascontiguousarray(allocs["size"]),
            group=group,
            tensor=tensor,
            sign=np.where(events["alloc"], 1.0, -1.0),
            phase=events["phase"].astype(np.int64),
            module=events["module"].astype(np.int64),
            forward_end=int(backward[0]) if len(backward) else num_events,
        )
        self._chunks: dict[tuple[range | None, bool], ChunkEvents] = {}

    def chunk(self, segments: range | None, accumulating: bool) -> ChunkEvents:
        """Return the events that a chunk of the model sees.

        Args:
            segments: those of the chunk; None: all of the model.
            accumulating: whether gradients are added to those of earlier micro-batches.
        """
        key = (segments, accumulating)
        found = self._chunks.get(key)
        if found is None:
            found = self._chunks[key] = self._cut(segments, accumulating)
        return found

    def _cut(self, segments: range | None, accumulating: bool) -> ChunkEvents:
        everything = self._all
        keep = np.ones(len(everything.alloc), dtype=bool)
        if not accumulating:
            keep = ~self._accumulates
        if segments is None and keep.all():
            return everything
        num_events = len(everything.phase)
        split = everything.forward_end
        is_here = np.ones(num_events + 1, dtype=bool)  # the last one stands for "never goes"
        if segments is not None:
            owners = self._segments
            is_here[:num_events] = (owners >= segments.start) & (owners < segments.stop)
        here = np.flatnonzero(is_here[:num_events])
        if not len(here):
            return ChunkEvents.nothing()
        alloc = everything.alloc
        free = everything.free
        stays = free >= num_events
        comes_here = is_here[alloc]
        goes_here = is_here[np.minimum(free, num_events)] & ~stays
        keep &= comes_here | goes_here
        # The gradient of a tied parameter waits for its other use in the whole model; here stages
        # add theirs up at the step's end.
        waits = self._waits_for_others
        keep &= comes_here | ~waits

        # A tensor that a neighbour makes arrives when the pass begins here; one that a neighbour
        # frees leaves when the pass ends here. What a backward begins with is held by it.
        passes = [part for part in (here[here < split], here[here >= split]) if len(part)]
        forward = passes[0]
        backward = passes[-1]  # the same one, where the stage has events of one of them only
        in_backward = alloc >= split
        arrival = np.where(in_backward, backward[0], forward[0])
        departure = np.where(in_backward, backward[-1], forward[-1])
        alloc = np.where(comes_here, alloc, np.minimum(arrival, free))
        is_given = in_backward & ~comes_here
        leaves_early = (goes_here & ~is_given) | stays
        free = np.where(leaves_early, free, np.maximum(departure, alloc))
        free = np.where(waits & ~goes_here, np.minimum(free, alloc + 1), free)
        alloc = alloc[keep]
        free = free[keep]

        # Number the events anew: those that are left, arrivals before departures at one moment.
        leaves = np.flatnonzero(free < num_events)
        moments = np.concatenate([alloc, free[leaves]])
        signs = np.concatenate([np.ones(len(alloc)), -np.ones(len(leaves))])
        tensors = np.concatenate([np.arange(len(alloc)), leaves])
        order = np.lexsort((-signs, moments))
        places = np.empty(len(order), dtype=np.int64)
        places[order] = np.arange(len(order))
        place_of_free = np.full(len(alloc), len(order), dtype=np.int64)
        place_of_free[leaves] = places[len(alloc) :]
        times = moments[order]
        return ChunkEvents(
            alloc=places[: len(alloc)],
            free=place_of_free,
            size=everything.size[keep],
            group=everything.group[keep],
            tensor=tensors[order],
            sign=signs[order],
            phase=everything.phase[times],
            module=everything.module[times],
            forward_end=int(np.searchsorted(times, split)),
        )

    @cached_property
    def _waits_for_others(self) -> NDArray[np.bool_]:
        """Mark tensors of backward that pass by whole segments, of no micro-batch's size."""
        everything = self._all
        num_events = len(everything.phase)
        segments = np.append(self._segments, -1)
        made = segments[everything.alloc]
        gone = segments[np.minimum(everything.free, num_events)]
        in_backward = everything.alloc >= everything.forward_end
        passes_by = (everything.free < num_events) & (made - gone > 1)
        found: NDArray[np.bool_] = in_backward & passes_by & (everything.size[:, 1] == 0)
        return found

    @cached_property
    def _segments(self) -> NDArray[np.int64]:
        """The segment of each event.

        What lies outside of blocks goes with the block that comes next in forward, and in backward
        with the one before it. With 3 blocks:

            forward    embedding  0  1  2  head loss     backward   loss head  2  1  0  embedding
            segment            0  0  1  2     3    3                   3    3  2  1  0          0
        """
        found = self._blocks.copy()
        split = self._all.forward_end
        after = int(self._blocks.max(initial=-1)) + 1
        # In forward as in backward, but from its end.
        for part in (slice(split - 1, None, -1) if split else slice(0, 0), slice(split, None)):
            blocks = found[part]
            place = np.where(blocks >= 0, np.arange(len(blocks)), -1)
            last_inside = np.maximum.accumulate(place)
            found[part] = np.where(last_inside >= 0, blocks[np.maximum(last_inside, 0)], after)
        return found


def _groups(allocs: Rows, modules: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """Return the names under which tensors are counted, and the number of each tensor's one."""
    is_in_block = allocs["block"] >= 0
    traits = [allocs["module"], allocs["kind"], allocs["phase"], is_in_block]
    different, which = distinct(np.stack(traits, axis=1))
    names = Numbering[str]()
    numbers = [
        names.number_of(
            _group_name(modules[module], EVENT_KINDS[kind], PHASES[phase], bool(is_inside))
        )
        for module, kind, phase, is_inside in different.tolist()
    ]
    return names.values, np.array(numbers, dtype=np.int64)[which]


def _group_name(module: str, kind: str, phase: TracePhase, is_in_block: bool) -> str:
    """Return such as "activations of blocks.*.mlp"."""
    place = module or "the model itself"
    if is_in_block:
        place = _BLOCK_NUMBER.sub("*", place)
    elif phase is TracePhase.LOSS and not module:
        place = "the loss"
    return f"{_PLURALS[kind]} of {place}"


@dataclass(frozen=True)
class Passes:
    """The passes of a step in which memory is looked at: through which chunk, beside what.

    Attributes:
        passes: each with the bytes that wait meanwhile, by group, and whether it is a forward.
        steady: bytes that are in use anyway, by phase. A phase that is missing there and has no
            events is left out.
        beside: bytes of messages that are under way.
    """

    passes: tuple[tuple[_Chunk, NDArray[np.float64], bool], ...]
    steady: Mapping[TracePhase, int]
    beside: int = 0

    @classmethod
    def whole(
        cls,
        trace: Trace,
        micro: int,
        *,
        segments: range | None = None,
        waiting: range | None = None,
        in_flight: float = 1,
        steady: Mapping[TracePhase, int],
        accumulating: bool = False,
        align: int = 1,
    ) -> Passes:
        """Return those of one micro-batch.

        Args:
            segments: of the model, that run. None: all.
            waiting: segments whose activations are held of earlier micro-batches. None: all that
                run.
            in_flight: micro-batches whose activations are held when the last of them runs.
            accumulating: whether gradients are added to those of earlier micro-batches.
            align: bytes to which each allocation is rounded up: 512 on CUDA.
        """
        trace = trace.of(micro)
        here = _Chunk.of(trace, segments, micro, accumulating=accumulating, align=align)
        kept = here.kept
        if waiting is not None:
            kept = _Chunk.of(trace, waiting, micro, accumulating=accumulating, align=align).kept
        others = max(0, in_flight - 1) * kept
        return cls(((here, others, True), (here, others, False)), steady)

    @classmethod
    def of_stage(
        cls,
        trace: Trace,
        micro: int,
        chunks: Sequence[range],
        moments: Iterable[Moment],
        *,
        steady: Mapping[TracePhase, int],
        beside: int = 0,
        accumulating: bool = False,
        align: int = 1,
    ) -> Passes:
        """Return those of a pipeline stage.

        Args:
            trace: of a micro-batch; what its backward leaves waits for weights' gradients.
            chunks: of the stage: the segments of each.
            moments: that there are in a step.
            accumulating: as of `whole`.
            align: as of `whole`.
        """
        trace = trace.of(micro)
        parts = [
            _Chunk.of(trace, segments, micro, accumulating=accumulating, align=align)
            for segments in chunks
        ]
        found = []
        for moment in moments:
            others = np.zeros(len(trace.lifetimes.groups))
            for part, held, weights in zip(parts, moment.held, moment.weights, strict=True):
                others += held * part.kept + weights * part.left
            found.append((parts[moment.chunk], others, moment.is_forward))
        return cls(tuple(found), steady, beside)

    def peak(self) -> Peak:
        """Return the most memory that is in use at any moment of these passes."""
        found = (
            chunk.peak(others, is_forward, self.steady, self.beside)
            for chunk, others, is_forward in self.passes
        )
        return _largest(found, self.steady)

    def course(self) -> Course:
        """Return what is in use through the chunk with the largest moment.

        Its forward and its backward are drawn when most waits beside each.
        """
        fullest = max(self.passes, key=self._most)[0]
        num_bytes: list[int] = []
        phases: list[TracePhase] = []
        modules: list[str] = []
        for is_forward in (True, False):
            ways = [each for each in self.passes if each[0] is fullest and each[2] == is_forward]
            if ways:
                _, others, _ = max(ways, key=self._most)
                found = fullest.course(others, is_forward, self.steady, self.beside)
                num_bytes += found.num_bytes
                phases += found.phases
                modules += found.modules
        for phase, there in self.steady.items():
            if phase not in phases:
                num_bytes.append(there)
                phases.append(phase)
                modules.append("")
        return Course(tuple(num_bytes), tuple(phases), tuple(modules))

    def _most(self, way: tuple[_Chunk, NDArray[np.float64], bool]) -> int:
        chunk, others, is_forward = way
        found = chunk.peak(others, is_forward, self.steady, self.beside)
        return -1 if found is None else found.num_bytes


def peak_of(trace: Trace, micro: int, *, steady: Mapping[TracePhase, int], **more: Any) -> Peak:
    """Return the most memory that is in use at any moment of a micro-batch: see `Passes.whole`."""
    return Passes.whole(trace, micro, steady=steady, **more).peak()


def _largest(found: Iterable[Peak | None], steady: Mapping[TracePhase, int]) -> Peak:
    """Return the largest of peaks; what is there anyway, if that is more."""
    best = Peak(-1, TracePhase.FORWARD, "", ())
    others = (Peak(num_bytes, phase, "", ()) for phase, num_bytes in steady.items())
    for peak in (*found, *others):
        if peak is not None and peak.num_bytes > best.num_bytes:
            best = peak
    return best


def _sizes(events: ChunkEvents, micro: int, align: int) -> NDArray[np.float64]:
    """Return the bytes of each tensor."""
    sizes = values_at(events.size, micro)
    return np.ceil(sizes / align) * align if align > 1 else sizes


@dataclass(frozen=True)
class _Chunk:
    """A chunk for micro-batches of one size.

    Attributes:
        lifetimes: of the trace.
        events: of the chunk.
        sizes: bytes of its tensors.
        in_use: bytes of one micro-batch after each event.
        kept: by group, the bytes that a micro-batch keeps from its forward pass.
        left: by group, those that its backward pass makes and leaves.
    """

    lifetimes: Lifetimes
    events: ChunkEvents
    sizes: NDArray[np.float64]
    in_use: NDArray[np.float64]
    kept: NDArray[np.float64]
    left: NDArray[np.float64]

    @classmethod
    def of(
        cls, trace: Trace, segments: range | None, micro: int, *, accumulating: bool, align: int
    ) -> _Chunk:
        """Return the chunk of these segments, for `micro` samples."""
        lifetimes = trace.lifetimes
        events = lifetimes.chunk(segments, accumulating)
        sizes = _sizes(events, micro, align)
        in_forward = events.alloc < events.forward_end
        kept = np.zeros(len(lifetimes.groups))
        left = np.zeros(len(lifetimes.groups))
        for chosen, sums in (
            (in_forward & (events.free >= events.forward_end), kept),
            (~in_forward & (events.free >= len(events.phase)), left),
        ):
            np.add.at(sums, events.group[chosen], sizes[chosen])
        in_use = np.cumsum(sizes[events.tensor] * events.sign)
        return cls(lifetimes, events, sizes, in_use, kept, left)

    def peak(
        self,
        held: NDArray[np.float64],
        is_forward: bool,
        steady: Mapping[TracePhase, int],
        beside: int = 0,
    ) -> Peak | None:
        """Return the largest moment of a forward or a backward; None: nothing happens in it.

        `held`, [groups], are the bytes of the other micro-batches, and `beside` those of other
        things; `steady` is as of `peak_of`.
        """
        events = self.events
        part = self._events_of(is_forward)
        phases = events.phase[part]
        if not len(phases):
            return None
        in_use = self.in_use[part] + (float(held.sum()) + beside)
        total = in_use + _by_number(steady)[phases]
        moment = int(np.argmax(total)) + (0 if is_forward else events.forward_end)

        is_alive = (events.alloc <= moment) & (events.free > moment)
        names = self.lifetimes.groups
        alive = np.bincount(
            events.group[is_alive], weights=self.sizes[is_alive], minlength=len(names)
        )
        sums = held + alive
        largest_first = sorted(range(len(sums)), key=lambda group: (-sums[group], names[group]))
        return Peak(
            num_bytes=round(float(total.max())),
            phase=PHASES[int(events.phase[moment])],
            module=self.lifetimes.modules[int(events.module[moment])],
            holders=tuple(
                (names[group], round(sums[group]))
                for group in largest_first[:_NUM_HOLDERS]
                if sums[group] > 0
            ),
            dynamic=round(float(in_use[np.argmax(total)])),
        )

    def course(
        self,
        held: NDArray[np.float64],
        is_forward: bool,
        steady: Mapping[TracePhase, int],
        beside: int,
    ) -> Course:
        """Return what is in use through a forward or a backward; arguments as of `peak`."""
        part = self._events_of(is_forward)
        phases = self.events.phase[part]
        total = self.in_use[part] + (float(held.sum()) + beside) + _by_number(steady)[phases]
        names = self.lifetimes.modules
        return Course(
            tuple(map(round, total.tolist())),
            tuple(PHASES[number] for number in phases.tolist()),
            tuple(names[number] for number in self.events.module[part].tolist()),
        )

    def _events_of(self, is_forward: bool) -> slice:
        end = self.events.forward_end
        return slice(end) if is_forward else slice(end, None)


def _by_number(steady: Mapping[TracePhase, int]) -> NDArray[np.float64]:
    """Return the bytes of each phase, by its number."""
    return np.array([float(steady.get(phase, 0)) for phase in PHASES])
