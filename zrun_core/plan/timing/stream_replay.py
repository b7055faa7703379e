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

from zrun_core.pipeline.schedule import Action, ActionKind, stage_order


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

    Args:
        streams: of the transfers.
        busy: seconds of computation alone.
    """
    if not busy:
        return 1.0
    taken = sum(stream.contention * (sum(stream.before) + sum(stream.after)) for stream in streams)
    most = max((stream.contention for stream in streams), default=0.0)
    return 1 + min(taken / busy, most)


# Pipelines


def replay(
    forward: Sequence[float],
    backward: Sequence[float],
    stages: int,
    micro_batches: int,
    send: float,
) -> tuple[float, ...]:
    """Return when each stage has done its last backward.

    Args:
        forward, backward: seconds of each chunk of the model for one micro-batch, in the model's
            order. There are `stages` chunks, or a multiple of it, of which stage s has every
            `stages`-th from s.
        send: seconds that a tensor takes from one chunk to the next.
    """
    return _replay(tuple(forward), tuple(backward), stages, micro_batches, send)


_STEADY = 1  # rounds of `stages` micro-batches after which a pipeline only repeats itself


@lru_cache(maxsize=4096)
def _replay(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    stages: int,
    micro_batches: int,
    send: float,
) -> tuple[float, ...]:
    enough = (_STEADY + 1) * stages
    if micro_batches <= enough + stages:
        return _play(forward, backward, stages, micro_batches, send)
    short = enough + micro_batches % stages
    some, more = (
        _play(forward, backward, stages, count, send) for count in (short, short + stages)
    )
    rounds = (micro_batches - short) // stages
    return tuple(low + (high - low) * rounds for low, high in zip(some, more, strict=True))


@lru_cache(maxsize=16)
def _orders(stages: int, virtual: int, micro_batches: int) -> list[tuple[Action, ...]]:
    return [stage_order(stage, stages, virtual, micro_batches) for stage in range(stages)]


def _play(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    stages: int,
    micro_batches: int,
    send: float,
) -> tuple[float, ...]:
    """Play all actions of all stages, each as soon as its stage is free and its input is there."""
    chunks = len(forward)
    orders = _orders(stages, chunks // stages, micro_batches)
    lag = send if stages > 1 else 0.0
    # By chunk and micro-batch: when its forward, and its backward, is done; None: not yet.
    forward_done: list[list[float | None]] = [[None] * micro_batches for _ in range(chunks)]
    backward_done: list[list[float | None]] = [[None] * micro_batches for _ in range(chunks)]
    clocks = [0.0] * stages
    cursors = [0] * stages

    def input_ready(action: Action) -> float | None:
        """Return when the input of an action has arrived; None: not yet."""
        kind, chunk, number = action
        if kind is ActionKind.BACKWARD:
            if chunk == chunks - 1:
                return forward_done[chunk][number]  # the loss is on the same stage
            source = backward_done[chunk + 1][number]
        elif chunk == 0:
            return 0.0
        else:
            source = forward_done[chunk - 1][number]
        return None if source is None else source + lag

    def advance(stage: int) -> bool:
        """Play the actions of a stage up to one whose input is missing; return True for any."""
        order = orders[stage]
        first = cursor = cursors[stage]
        now = clocks[stage]
        while cursor < len(order):
            ready = input_ready(order[cursor])
            if ready is None:
                break
            kind, chunk, number = order[cursor]
            if kind is ActionKind.BACKWARD:
                now = backward_done[chunk][number] = max(now, ready) + backward[chunk]
            else:
                now = forward_done[chunk][number] = max(now, ready) + forward[chunk]
            cursor += 1
        clocks[stage] = now
        cursors[stage] = cursor
        return cursor > first

    waiting = list(range(stages))
    while waiting:
        moved = [advance(stage) for stage in waiting]
        waiting = [stage for stage in waiting if cursors[stage] < len(orders[stage])]
        assert any(moved), "a pipeline schedule waits for itself"
    return tuple(clocks)
