"""The order in which a rank computes the forwards and backwards of a step: lists of actions.

The trainer executes such a list, and the planner times and weighs the same ones. Each backward
comes after its forward, and the last backward is the last action: with it the gradients of the step
are complete. 1F1B on 3 stages with 4 micro-batches (F0 is the forward of micro-batch 0):

    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3

A rank that has the whole model can also go through it slice by slice, with all micro-batches of the
step: see `layer_major`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple


class ActionKind(Enum):
    """The kinds of actions."""

    FORWARD = "F"
    BACKWARD = "B"


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


def validated(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return `actions`, which can be executed in this order.

    Raises:
        ValueError: a forward or a backward is missing, comes twice, or a backward comes too early.
    """
    found = tuple(actions)
    under_way = set()
    done = set()
    for action in found:
        part = action.chunk, action.micro
        if action.kind is ActionKind.FORWARD:
            if part in under_way or part in done:
                raise ValueError(f"{action} comes twice")
            under_way.add(part)
        elif part in under_way:
            under_way.remove(part)
            done.add(part)
        else:
            problem = "comes twice" if part in done else "comes early"
            raise ValueError(f"{action} {problem}")
    if under_way:
        chunk, micro = min(under_way)
        raise ValueError(f"{Action(ActionKind.BACKWARD, chunk, micro)} is missing")
    return found


def max_in_flight(actions: Iterable[Action]) -> int:
    """Return the largest number of forwards that wait for their backwards at a time."""
    most = 0
    in_flight = 0
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            in_flight += 1
        else:
            in_flight -= 1
        most = max(most, in_flight)
    return most


@lru_cache(maxsize=16)
def no_pipeline(micro_batches: int) -> tuple[Action, ...]:
    """Return the order of a rank that has the whole model: F0 B0 F1 B1 ..."""
    return one_forward_one_backward(0, 1, micro_batches)


@lru_cache(maxsize=16)
def layer_major(slices: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the order in which all micro-batches go through a slice before the next one comes.

    Each micro-batch turns round in the last slice: what the loss needs is there for one of them at
    a time. With 3 slices and 2 micro-batches:

        slice 0   F0 F1                               B0 B1
        slice 1         F0 F1                   B0 B1
        slice 2               F0 B0 F1 B1

    Args:
        slices: parts of the model, one or more; with one it is the order of `no_pipeline`.
        micro_batches: of the step.
    """
    micros = range(micro_batches)
    down = [
        Action(ActionKind.FORWARD, part, micro) for part in range(slices - 1) for micro in micros
    ]
    turn = [Action(kind, slices - 1, micro) for micro in micros for kind in ActionKind]
    up = [
        Action(ActionKind.BACKWARD, part, micro)
        for part in reversed(range(slices - 1))
        for micro in micros
    ]
    return validated([*down, *turn, *up])


def stage_order(stage: int, stages: int, virtual: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the order of one stage of a pipeline: 1F1B for `virtual` 1, interleaved for more.

    Args:
        stage: of `stages`, from 0.
        virtual: chunks of the model that each stage has.
        micro_batches: of the step.
    """
    if virtual == 1:
        return one_forward_one_backward(stage, stages, micro_batches)
    return interleaved(stage, stages, virtual, micro_batches)


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the order of 1F1B: a stage runs ahead by the stages after it, then alternates.

    Args:
        stage: of `stages`, from 0; it has the chunk of this number.
        micro_batches: of the step.
    """
    forwards = [Action(ActionKind.FORWARD, stage, micro) for micro in range(micro_batches)]
    backwards = [Action(ActionKind.BACKWARD, stage, micro) for micro in range(micro_batches)]
    return _alternated(forwards, backwards, stages - 1 - stage)


def interleaved(stage: int, stages: int, virtual: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the order of interleaved 1F1B (Narayanan et al. 2021, figure 4).

    Args:
        stage: of `stages`, from 0; it has every `stages`-th chunk from this number.
        virtual: chunks that each stage has.
        micro_batches: of the step, in groups of `stages`.

    Raises:
        ValueError: these do not fill their groups.
    """
    if micro_batches % stages:
        raise ValueError(f"{micro_batches} micro-batches are no groups of {stages}")
    own = range(stage, stages * virtual, stages)
    forwards = []
    backwards = []
    for first in range(0, micro_batches, stages):
        group = range(first, first + stages)
        forwards += [Action(ActionKind.FORWARD, chunk, micro) for chunk in own for micro in group]
        backwards += [
            Action(ActionKind.BACKWARD, chunk, micro) for chunk in reversed(own) for micro in group
        ]
    ahead = 2 * (stages - 1 - stage) + (virtual - 1) * stages
    return _alternated(forwards, backwards, ahead)


def _alternated(
    forwards: Sequence[Action],
    backwards: Sequence[Action],
    ahead: int,
) -> tuple[Action, ...]:
    """Return `ahead` forwards, then a forward and a backward in turn, then the other backwards."""
    ahead = min(ahead, len(forwards))
    actions = [*forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += [forward, backward]
    return validated([*actions, *backwards[len(forwards) - ahead :]])
