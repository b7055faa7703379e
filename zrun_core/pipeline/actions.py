"""Lists of actions: what a rank computes in which order, and whether ranks can do so together.

    F0 B0 F1 B1                    of a rank that has the whole model

`validated` holds for the list of one rank, `check_together` for those of all stages, `play` runs
them as stages do that wait for each other. The lists themselves come from `schedule.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import pairwise, product
from typing import NamedTuple


class ActionKind(Enum):
    """The kinds of actions.

    Where a list has weights, a backward makes the gradients of inputs only, and the weights' come
    later. Where it has updates, each micro-batch is a step of its own.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    UPDATE = "U"


class Action(NamedTuple):
    """One thing to compute.

    Attributes:
        chunk: part of the model, counted from its beginning over all stages: also a slice.
        micro: number of the micro-batch in the step.
    """

    kind: ActionKind
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.micro}"


_F, _B, _W, _U = ActionKind


def validated(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return `actions` of one rank, which can be executed in this order.

    Raises:
        ValueError: an action is missing, comes twice, or before the one that it follows.
    """
    found = tuple(actions)
    there = {action.kind for action in found}
    kinds = (_F, _B, *(kind for kind in (_W, _U) if kind in there))
    follows = dict(pairwise(reversed(kinds)))
    done = set()
    for action in found:
        kind, chunk, micro = action
        if action in done:
            raise ValueError(f"{action} comes twice")
        if kind in follows and Action(follows[kind], chunk, micro) not in done:
            raise ValueError(f"{action} comes early")
        done.add(action)
    wanted = [Action(kind, chunk, micro) for first, chunk, micro in found for kind in kinds]
    missing = [action for action in wanted if action not in done]
    if missing:
        raise ValueError(f"{min(missing, key=lambda action: action[1:])} is missing")
    return found


def check_together(orders: Sequence[Sequence[Action]]) -> None:
    """Prove that the stages of a pipeline can execute their lists, and add up gradients in order.

    Args:
        orders: the list of each stage.

    Raises:
        ValueError: a list cannot be executed, stages lack parts of each other's micro-batches or
            wait for each other, or backwards, weights or updates of a chunk are out of order.
    """
    kinds = {frozenset(kind for kind, _, _ in validated(order)) for order in orders}
    parts = [(chunk, micro) for order in orders for kind, chunk, micro in order if kind is _F]
    chunks, micros = (range(1 + max(each, default=-1)) for each in zip(*parts, strict=True))
    if sorted(parts) != list(product(chunks, micros)):
        raise ValueError("some chunk is on no stage or on several, or lacks a micro-batch")
    if len(kinds) > 1:
        raise ValueError("some stages have weights or updates that others lack")
    for order in orders:
        last: dict[tuple[ActionKind, int], Action] = {}
        for action in order:
            before = last.get(action[:2])
            if action.kind is not _F and before is not None and before.micro > action.micro:
                raise ValueError(f"{action} comes after {before}: gradients add up in order")
            last[action[:2]] = action
    for _ in play(orders):
        pass


def play(orders: Sequence[Sequence[Action]]) -> Iterator[tuple[int, Action]]:
    """Run the lists of all stages together, with room for all that one sends to another.

    Args:
        orders: the list of each stage.

    Yields:
        Stages and their actions, each after everything that it needs.

    Raises:
        ValueError: stages wait for each other.
    """
    last_chunk = max((action.chunk for order in orders for action in order), default=0)
    done: set[Action | None] = {None}
    cursors = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while cursors[stage] < len(order) and needs(order[cursors[stage]], last_chunk) in done:
                action = order[cursors[stage]]
                yield stage, action
                done.add(action)
                cursors[stage] += 1
                moved = True
    stuck = [order[at] for order, at in zip(orders, cursors, strict=True) if at < len(order)]
    if stuck:
        what = ", ".join(f"{action} for {needs(action, last_chunk)}" for action in stuck)
        raise ValueError(f"the stages wait for each other: {what}")


def ends_of(
    orders: Sequence[Sequence[Action]], seconds: Mapping[Action, float]
) -> dict[Action, float]:
    """Return when each action ends, if messages take no time.

    Args:
        seconds: that each action takes.

    Raises:
        ValueError: the lists wait for each other.
    """
    last_chunk = max(action.chunk for action in seconds)
    free = [0.0] * len(orders)
    ends: dict[Action, float] = {}
    for stage, action in play(orders):
        needed = needs(action, last_chunk)
        arrives = 0.0 if needed is None else ends[needed]
        ends[action] = free[stage] = max(free[stage], arrives) + seconds[action]
    return ends


def needs(action: Action, last_chunk: int) -> Action | None:
    """Return the action whose result this one waits for; None: there is none.

    Args:
        last_chunk: number of the chunk whose forward ends in the loss.
    """
    kind, chunk, micro = action
    if kind is _F:
        return None if chunk == 0 else Action(_F, chunk - 1, micro)
    if kind is _B:
        at_turn = chunk == last_chunk
        return Action(_F, chunk, micro) if at_turn else Action(_B, chunk + 1, micro)
    return Action(_B, chunk, micro)


class Waiting(NamedTuple):
    """Most passes of chunks that are under way on a stage.

    Attributes:
        forwards: forwards that wait for their backwards.
        weights: backwards whose weights' gradients are still to be made: inputs of layers, and
            gradients of their outputs, are kept for them.
        both: of both kinds at a time.
    """

    forwards: int
    weights: int
    both: int


def most_waiting(actions: Iterable[Action]) -> Waiting:
    """Return what waits on a stage at most, by what it waits for."""
    found = tuple(actions)
    has_weights = any(kind is _W for kind, _, _ in found)
    forwards = weights = 0
    most = Waiting(0, 0, 0)
    for kind, _, _ in found:
        if kind is _F:
            forwards += 1
        elif kind is _B:
            forwards -= 1
            weights += has_weights
        elif kind is _W:
            weights -= 1
        now = Waiting(forwards, weights, forwards + weights)
        most = Waiting(*map(max, most, now))
    return most


def max_in_flight(actions: Iterable[Action]) -> int:
    """Return the largest number of forwards that wait for their backwards at a time."""
    return most_waiting(actions).forwards
