"""Streams and pipelines in time: pure arithmetic on seconds.

Two schedules make up a step. `run_pass` is one micro-batch's forward or backward on one rank: parts
of the model are computed one after the other while other streams bring what comes next and take
away what is done. `replay` is a pipeline: micro-batches of known times through stages, in the very
order of `zrun_core/pipeline/schedule.py`, so that unequal stages and transfers between them have
their true price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from zrun_core.pipeline.actions import Action, ActionKind, needs, play
from zrun_core.pipeline.schedule import stage_actions


@dataclass(frozen=True)
class Stream:
    """Transfers of one kind, one at a time, in the order of issue; arrivals go first.

    Attributes:
        before: seconds of the transfer that each part waits for; empty: of none.
        after: seconds of the transfer that follows each part.
        contention: share of a transfer's time that it takes from computation beside it; 1: nothing
            overlaps.
    """

    before: Sequence[float] = ()
    after: Sequence[float] = ()
    contention: float = 0.0


@dataclass(frozen=True)
class PassTime:
    """One micro-batch's forward or backward on one rank.

    Attributes:
        seconds: until the last part is computed.
        tail: seconds after that until the last transfer is over.
    """

    seconds: float
    tail: float


def run_pass(
    compute: Sequence[float],
    streams: Sequence[Stream],
    *,
    ahead: int,
    ready: Sequence[float] | None = None,
) -> PassTime:
    """Compute parts in order, with transfers beside them.

    Args:
        compute: seconds of each part.
        ahead: parts that may have arrived before they are needed: room is constant.
        ready: moments before which a part is not there to be fetched.
    """
    count = len(compute)
    busy = sum(compute)
    streams = [stream for stream in streams if any(stream.before) or any(stream.after)]
    ready = ready or [0.0] * count
    # Transfers that take all of the cores from computation run before or after it, not beside it.
    serial = sum(sum(s.before) + sum(s.after) for s in streams if s.contention >= 1)
    streams = [stream for stream in streams if stream.contention < 1]
    slowdown = _slowdown(streams, busy)

    clocks = [0.0] * len(streams)  # when each stream is done with all that it has begun
    ends = [0.0] * count  # of the computation of each part
    arrived = list(ready)

    def bring(number: int) -> None:
        room = ends[number - 1 - ahead] if number > ahead else 0.0  # an earlier part has to leave
        for index, stream in enumerate(streams):
            if stream.before and stream.before[number]:
                clocks[index] = max(clocks[index], room, ready[number]) + stream.before[number]
                arrived[number] = max(arrived[number], clocks[index])

    for number in range(min(ahead + 1, count)):
        bring(number)
    now = 0.0
    for number in range(count):
        now = ends[number] = max(now, arrived[number]) + compute[number] * slowdown
        if number + 1 + ahead < count:
            bring(number + 1 + ahead)
        for index, stream in enumerate(streams):
            if stream.after and stream.after[number]:
                clocks[index] = max(clocks[index], now) + stream.after[number]
    return PassTime(now + serial, max(0.0, max(clocks, default=0.0) - now))


def _slowdown(streams: Sequence[Stream], busy: float) -> float:
    """Return by what factor transfers beside it slow computation down.

    `busy` are the seconds of computation alone.
    """
    if not busy:
        return 1.0
    taken = sum(stream.contention * (sum(stream.before) + sum(stream.after)) for stream in streams)
    most = max((stream.contention for stream in streams), default=0.0)
    return 1 + min(taken / busy, most)


# Pipelines


class ChunkTime(NamedTuple):
    """Seconds that a chunk of the model takes for one micro-batch.

    Attributes:
        forward: of its forward.
        backward: of the gradients of its inputs; also of its weights', where they are not apart.
        weight: of the gradients of its weights. Where the schedule makes both in one backward, it
            is added to that.
        update: of its update, where each micro-batch has one.
    """

    forward: float
    backward: float
    weight: float = 0.0
    update: float = 0.0


def replay(
    schedule: str,
    chunks: Sequence[ChunkTime],
    stages: int,
    micro_batches: int,
    send: float,
) -> tuple[float, ...]:
    """Return when each stage has done its last action.

    Args:
        schedule: by its name in `zrun_core/pipeline/schedule.py`.
        chunks: of the model, in its order. There are `stages`, or a multiple of it, of which
            stage s has every `stages`-th from s.
        send: seconds that a tensor takes from one stage to the next.
    """
    return _replay(schedule, tuple(chunks), stages, micro_batches, send)


# Places in `ChunkTime`.
_KINDS = {
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD: 1,
    ActionKind.WEIGHT: 2,
    ActionKind.UPDATE: 3,
}
_STEADY = 6  # rounds of `stages` micro-batches after which a pipeline only repeats itself


@lru_cache(maxsize=4096)
def _replay(
    schedule: str,
    chunks: tuple[ChunkTime, ...],
    stages: int,
    micro_batches: int,
    send: float,
) -> tuple[float, ...]:
    enough = _STEADY * stages
    if micro_batches <= enough + stages:
        return _play(schedule, chunks, stages, micro_batches, send)
    short = enough + micro_batches % stages
    some, more = (_play(schedule, chunks, stages, count, send) for count in (short, short + stages))
    rounds = (micro_batches - short) // stages
    return tuple(low + (high - low) * rounds for low, high in zip(some, more, strict=True))


def _play(
    schedule: str,
    chunks: tuple[ChunkTime, ...],
    stages: int,
    micro_batches: int,
    send: float,
) -> tuple[float, ...]:
    """Play all actions of all stages, each as soon as its stage is free and its input is there."""
    steps = _steps(schedule, stages, len(chunks) // stages, micro_batches)
    seconds = list(chunks)
    if not any(kind == _KINDS[ActionKind.WEIGHT] for _, _, kind, _, _ in steps):
        seconds = [each._replace(backward=each.backward + each.weight) for each in chunks]
    clocks = [0.0] * stages
    ends = [0.0]  # of each action, and, in front of them, of what needs nothing
    for stage, chunk, kind, source, is_far in steps:
        ready = ends[source] + send if is_far else ends[source]
        clocks[stage] = max(clocks[stage], ready) + seconds[chunk][kind]
        ends.append(clocks[stage])
    return tuple(clocks)


@lru_cache(maxsize=64)
def _steps(
    schedule: str, stages: int, virtual: int, micro_batches: int
) -> list[tuple[int, int, int, int, bool]]:
    """Return the actions of all stages in an order in which none waits for a later one.

    Returns:
        of each: stage, chunk, the place of its seconds in `ChunkTime`, the number of the action
        whose result it waits for (from 1; 0: of none), and whether this comes from another stage.
    """
    orders = [
        stage_actions(schedule, stage, stages, virtual, micro_batches) for stage in range(stages)
    ]
    last_chunk = stages * virtual - 1
    numbers: dict[Action, int] = {}
    steps = []
    for stage, action in play(orders):
        source = needs(action, last_chunk)
        is_far = source is not None and source.chunk % stages != stage
        number = 0 if source is None else numbers[source]
        steps.append((stage, action.chunk, _KINDS[action.kind], number, is_far))
        numbers[action] = len(steps)
    return steps
