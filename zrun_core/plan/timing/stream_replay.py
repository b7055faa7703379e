"""Streams and pipelines in time: what runs beside what, and who waits. Pure arithmetic on seconds.

Two schedules make up a step. `run_pass` is one micro-batch's forward or backward on one rank: parts of the model are
computed one after the other while other streams bring what comes next and take away what is done. `replay` is a
pipeline: micro-batches of known times through stages, in the very order of `zrun_core/pipeline/schedule.py`, so that
unequal stages and transfers between them have their true price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from zrun_core.pipeline.schedule import Action, ActionKind, stage_order


@dataclass(frozen=True)
class Stream:
    """Transfers of one kind, one at a time, in the order of issue: what arrives goes before what leaves.

    Attributes:
        before: seconds of the transfer that each part waits for; empty: of none.
        after: seconds of the transfer that follows each part.
        contention: share of a transfer's time that it takes from computation beside it; 1: nothing overlaps.
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
    count, busy = len(compute), sum(compute)
    streams = [stream for stream in streams if any(stream.before) or any(stream.after)]
    ready = ready or [0.0] * count
    serial = sum(sum(s.before) + sum(s.after) for s in streams if s.contention >= 1)
    streams = [stream for stream in streams if stream.contention < 1]
    taken = sum(stream.contention * (sum(stream.before) + sum(stream.after)) for stream in streams)
    slow = 1 + min(taken / busy, max((s.contention for s in streams), default=0.0)) if busy else 1.0
    clocks, ends = [0.0] * len(streams), [0.0] * count
    arrived = list(ready)

    def bring(number: int) -> None:
        room = ends[number - 1 - ahead] if number > ahead else 0.0
        for index, stream in enumerate(streams):
            if stream.before and stream.before[number]:
                clocks[index] = max(clocks[index], room, ready[number]) + stream.before[number]
                arrived[number] = max(arrived[number], clocks[index])

    for number in range(min(ahead + 1, count)):
        bring(number)
    now = 0.0
    for number in range(count):
        now = ends[number] = max(now, arrived[number]) + compute[number] * slow
        if number + 1 + ahead < count:
            bring(number + 1 + ahead)
        for index, stream in enumerate(streams):
            if stream.after and stream.after[number]:
                clocks[index] = max(clocks[index], now) + stream.after[number]
    return PassTime(now + serial, max(0.0, max(clocks, default=0.0) - now))


# Pipelines


def replay(
    forward: Sequence[float],
    backward: Sequence[float],
    stages: int,
    micro_batches: int,
    send: float,
) -> tuple[float, ...]:
    """When each stage has done its last backward.

    Args:
        forward, backward: seconds of each chunk of the model for one micro-batch, in the model's order. There are
            `stages` chunks, or a multiple of it, of which stage s has every `stages`-th from s.
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
    chunks = len(forward)
    orders = _orders(stages, chunks // stages, micro_batches)
    there: list[list[float | None]] = [
        [None] * micro_batches for _ in range(chunks)
    ]  # when a forward is done
    back: list[list[float | None]] = [[None] * micro_batches for _ in range(chunks)]
    clock, cursor = [0.0] * stages, [0] * stages
    waiting = list(range(stages))
    while waiting:
        moved = False
        for stage in waiting:
            order, now, place = orders[stage], clock[stage], cursor[stage]
            while place < len(order):
                kind, chunk, number = order[place]
                is_backward = kind is ActionKind.BACKWARD
                if not is_backward:
                    source = there[chunk - 1][number] if chunk else 0.0
                    lag = send if chunk and stages > 1 else 0.0
                elif chunk == chunks - 1:
                    source, lag = there[chunk][number], 0.0
                else:
                    source, lag = back[chunk + 1][number], send if stages > 1 else 0.0
                if source is None:
                    break
                now = max(now, source + lag) + (backward if is_backward else forward)[chunk]
                (back if is_backward else there)[chunk][number] = now
                place += 1
                moved = True
            clock[stage], cursor[stage] = now, place
        waiting = [stage for stage in waiting if cursor[stage] < len(orders[stage])]
        assert moved, "a pipeline schedule waits for itself"
    return tuple(clock)
