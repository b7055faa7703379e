"""The peak of a traced micro-batch: the moment at which most memory is in use.

It is a maximum over live sets, and never a sum of categories: of any micro-batch, of a pipeline
stage, or of several micro-batches in flight. Nothing here needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

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


class StageEvents(NamedTuple):
    """The events of one pipeline stage, in order, and the tensors that they are about."""

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
    def nothing(cls) -> StageEvents:
        """Return those of a stage on which nothing happens."""
        numbers = np.zeros(0, dtype=np.int64)
        values = np.zeros(0, dtype=np.float64)
        sizes = np.zeros((0, 2), dtype=np.float64)
        return cls(numbers, numbers, sizes, numbers, numbers, values, numbers, numbers, 0)


class Lifetimes:
    """The times at which tensors of a trace come and go, for the whole model and for stages of it.

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
        self._all = StageEvents(
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
        self._stages: dict[tuple[range | None, bool], StageEvents] = {}

    def stage(self, blocks: range | None, accumulating: bool) -> StageEvents:
        """Return the events that the stage with these blocks sees.

        Args:
            blocks: those of the stage; None: all of the model.
            accumulating: whether gradients are added to those of earlier micro-batches.
        """
        key = (blocks, accumulating)
        found = self._stages.get(key)
        if found is None:
            found = self._stages[key] = self._cut(blocks, accumulating)
        return found

    def _cut(self, blocks: range | None, accumulating: bool) -> StageEvents:
        everything = self._all
        keep = np.ones(len(everything.alloc), dtype=bool)
        if not accumulating:
            keep = ~self._accumulates
        if blocks is None and keep.all():
            return everything
        num_events = len(everything.phase)
        split = everything.forward_end
        is_here = np.ones(num_events + 1, dtype=bool)  # the last one stands for "never goes"
        if blocks is not None:
            owners = self._owners()
            is_here[:num_events] = (owners >= blocks.start) & (owners < blocks.stop)
        here = np.flatnonzero(is_here[:num_events])
        if not len(here):
            return StageEvents.nothing()
        alloc = everything.alloc
        free = everything.free
        stays = free >= num_events
        comes_here = is_here[alloc]
        goes_here = is_here[np.minimum(free, num_events)] & ~stays
        keep &= comes_here | goes_here

        # A tensor that a neighbour makes arrives when the pass begins here; one that a neighbour
        # frees leaves when the pass ends here.
        passes = [part for part in (here[here < split], here[here >= split]) if len(part)]
        forward = passes[0]
        backward = passes[-1]  # the same one, where the stage has events of one of them only
        in_backward = alloc >= split
        arrival = np.where(in_backward, backward[0], forward[0])
        departure = np.where(in_backward, backward[-1], forward[-1])
        alloc = np.where(comes_here, alloc, np.minimum(arrival, free))
        free = np.where(goes_here | stays, free, np.maximum(departure, alloc))
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
        return StageEvents(
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

    def _owners(self) -> NDArray[np.int64]:
        """Return the block with which each event goes where blocks are dealt out to stages.

        What lies outside of blocks goes with the block before it. At the ends there is none:

            forward    embedding  0  1  2  head loss     backward   loss head  2  1  0  embedding
            goes with          0  0  1  2     2    2                   2    2  2  1  0          0
        """
        owners = self._blocks.copy()
        split = self._all.forward_end
        last_block = max(0, int(self._blocks.max(initial=-1)))
        for part, before in ((slice(0, split), 0), (slice(split, None), last_block)):
            blocks = owners[part]
            if not len(blocks):
                continue
            last_inside = np.where(blocks >= 0, np.arange(len(blocks)), -1)
            last_inside = np.maximum.accumulate(last_inside)
            owners[part] = np.where(last_inside >= 0, blocks[np.maximum(last_inside, 0)], before)
        return owners


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


def peak_of(
    trace: Trace,
    micro: int,
    *,
    blocks: range | None = None,
    waiting: range | None = None,
    in_flight: float = 1,
    steady: Mapping[TracePhase, int],
    accumulating: bool = False,
    align: int = 1,
) -> Peak:
    """Return the most memory that is in use at any moment of a step.

    Args:
        trace: of a micro-batch.
        micro: samples of it.
        blocks: those of a pipeline stage. The first stage also has what comes before them, the
            last what comes after. None: all.
        waiting: of these blocks, those whose activations are held of earlier micro-batches. None:
            all of them.
        in_flight: micro-batches whose activations are held when the last of them runs.
        steady: bytes that are in use anyway, by phase. A phase that is missing there and has no
            events is left out.
        accumulating: whether gradients are added to those of earlier micro-batches.
        align: bytes to which each allocation is rounded up: 512 on CUDA.
    """
    trace = trace.of(micro)
    events = trace.lifetimes.stage(blocks, accumulating)
    best = Peak(-1, TracePhase.FORWARD, "", ())
    if len(events.tensor):
        others = events if waiting is None else trace.lifetimes.stage(waiting, accumulating)
        held = np.zeros(len(trace.lifetimes.groups))
        if in_flight > 1:
            held = (in_flight - 1) * _kept(trace.lifetimes, others, _sizes(others, micro, align))
        sizes = _sizes(events, micro, align)
        best = _peak_of_events(trace.lifetimes, events, sizes, held, steady)
    for phase, num_bytes in steady.items():
        if num_bytes > best.num_bytes:
            best = Peak(num_bytes, phase, "", ())
    return best


def _sizes(events: StageEvents, micro: int, align: int) -> NDArray[np.float64]:
    """Return the bytes of each tensor."""
    sizes = values_at(events.size, micro)
    return np.ceil(sizes / align) * align if align > 1 else sizes


def _kept(
    lifetimes: Lifetimes, events: StageEvents, sizes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return by group the bytes that a micro-batch keeps from its forward pass."""
    is_kept = (events.alloc < events.forward_end) & (events.free >= events.forward_end)
    kept = np.zeros(len(lifetimes.groups))
    np.add.at(kept, events.group[is_kept], sizes[is_kept])
    return kept


def _peak_of_events(
    lifetimes: Lifetimes,
    events: StageEvents,
    sizes: NDArray[np.float64],
    held: NDArray[np.float64],
    steady: Mapping[TracePhase, int],
) -> Peak:
    """Return the largest moment while the last micro-batch that is under way runs.

    Args:
        lifetimes: of which `events` are.
        events: at least one.
        sizes: [tensors], in bytes.
        held: [groups], bytes of the other micro-batches.
        steady: as of `peak_of`.
    """
    in_use = np.cumsum(sizes[events.tensor] * events.sign)
    held_by_others = float(held.sum())
    steady_by_phase = np.array([float(steady.get(phase, 0)) for phase in PHASES])
    total = in_use + held_by_others + steady_by_phase[events.phase]
    moment = int(np.argmax(total))

    is_alive = (events.alloc <= moment) & (events.free > moment)
    names = lifetimes.groups
    alive = np.bincount(events.group[is_alive], weights=sizes[is_alive], minlength=len(names))
    sums = held + alive
    largest_first = sorted(range(len(sums)), key=lambda group: (-sums[group], names[group]))
    return Peak(
        num_bytes=round(total[moment]),
        phase=PHASES[int(events.phase[moment])],
        module=lifetimes.modules[int(events.module[moment])],
        holders=tuple(
            (names[group], round(sums[group]))
            for group in largest_first[:_NUM_HOLDERS]
            if sums[group] > 0
        ),
        dynamic=round(in_use[moment] + held_by_others),
    )
