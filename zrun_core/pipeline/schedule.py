"""The order in which ranks compute the forwards and backwards of a step: lists of actions.

The trainer executes such lists, the planner times and weighs the same ones, and `zrun check --grid`
draws them. 1F1B on 3 stages with 4 micro-batches (F0 is the forward of micro-batch 0):

    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3

`stage_actions` has the list of a stage by the name of its schedule. The backwards of a chunk come
in the order of the micro-batches, whatever the schedule: its gradients are added up as without a
pipeline, to the last bit. What sets schedules apart says `spine/sections/schedules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from zrun_core.pipeline.actions import Action, ActionKind, validated
from zrun_core.spine.sections.schedules import PLAIN, SCHEDULES

_F, _B, _W, _U = ActionKind

# Of a window of PipeDream, at most: with p stages draining takes (p - 1) / (17 p - 1) of the time.
STEPS_PER_STAGE = 16


# Schedules by name


def stage_actions(
    schedule: str, stage: int, stages: int, virtual: int, micro_batches: int
) -> tuple[Action, ...]:
    """Return the order of one stage.

    Args:
        schedule: by name.
        stage: of `stages`, from 0; it has every `stages`-th chunk from this number.
        stages: of the pipeline; with 1 nothing waits for others, and no order is better than
            F0 B0 F1 B1 ...
        virtual: chunks that each stage has; with layer_major the slices of the model.
    """
    facts = SCHEDULES[schedule]
    if virtual > 1 and not (facts.has_chunks or facts.goes_in_slices):
        raise ValueError(f"{schedule} has one chunk on each stage, not {virtual}")
    return _actions(schedule, stage, stages, virtual, micro_batches)


@lru_cache(maxsize=256)
def _actions(
    schedule: str, stage: int, stages: int, virtual: int, micro_batches: int
) -> tuple[Action, ...]:
    return validated(_GENERATORS[schedule](stage, stages, virtual, micro_batches))


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
    """
    micros = range(micro_batches)
    down = [Action(_F, part, micro) for part in range(slices - 1) for micro in micros]
    turn = [Action(kind, slices - 1, micro) for micro in micros for kind in (_F, _B)]
    up = [Action(_B, part, micro) for part in reversed(range(slices - 1)) for micro in micros]
    return validated([*down, *turn, *up])


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the order of 1F1B: a stage runs ahead by the stages after it, then alternates.

    Narayanan et al. 2021, figure 3 (PipeDream-Flush).

    Args:
        stage: of `stages`, from 0; it has the chunk of this number.
    """
    return validated(_alternated(*_passes([stage], range(micro_batches)), stages - 1 - stage))


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the order of GPipe (Huang et al. 2019): all forwards, then all backwards.

    The paper's backwards come in the opposite order of the forwards; here in the same one.

    Args:
        stage: of `stages`, from 0; it has the chunk of this number.
    """
    if stages == 1:
        return [*no_pipeline(micro_batches)]
    forwards, backwards = _passes([stage], range(micro_batches))
    return forwards + backwards


def interleaved(stage: int, stages: int, virtual: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the order of interleaved 1F1B (Narayanan et al. 2021, figure 4).

    Micro-batches go through the chunks in groups of `stages`. Where the last group is not full, it
    is the order of a full one without what it lacks. No micro-batch needs anything of another, so
    that stages wait for each other no more than with full groups.

    Args:
        stage: of `stages`, from 0; it has every `stages`-th chunk from this number.
        virtual: chunks that each stage has.
    """
    own = range(stage, stages * virtual, stages)
    forwards: list[Action] = []
    backwards: list[Action] = []
    for first in range(0, micro_batches, stages):
        there, back = _passes(own, range(first, first + stages))
        forwards += there
        backwards += back
    ahead = 2 * (stages - 1 - stage) + (virtual - 1) * stages
    actions = _alternated(forwards, backwards, ahead)
    return validated(action for action in actions if action.micro < micro_batches)


def zero_bubble(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the order of ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.3).

    It is 1F1B with the weights' gradients apart from the inputs'. Stage s makes them s
    micro-batches late, so that as many are under way on every stage, and where 1F1B waits at the
    end, there is something left to do.

    Args:
        stage: of `stages`, from 0; it has the chunk of this number.
    """
    actions = []
    for action in one_forward_one_backward(stage, stages, micro_batches):
        actions.append(action)
        if stages > 1 and action.kind is _B and action.micro >= stage:
            actions.append(Action(_W, stage, action.micro - stage))
    late = range(max(0, micro_batches - stage), micro_batches)
    return [*actions, *(Action(_W, stage, micro) for micro in late)]


def pipedream(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the order of PipeDream (Narayanan et al. 2019): 1F1B, and an update per micro-batch.

    With vertical sync the order is the same; other versions of the weights are used: see
    `version_used`.

    Args:
        stage: of `stages`, from 0; it has the chunk of this number.
        micro_batches: until the pipeline is drained.
    """
    actions = []
    for action in one_forward_one_backward(stage, stages, micro_batches):
        actions.append(action)
        if action.kind is _B:
            actions.append(Action(_U, stage, action.micro))
    return actions


def _layer_major(stage: int, stages: int, virtual: int, micro_batches: int) -> Iterable[Action]:
    if stages > 1:
        raise ValueError(f"layer_major is for the whole model on a rank, not {stages} stages")
    return layer_major(virtual, micro_batches)


_Generator = Callable[[int, int, int, int], Iterable[Action]]

# (stage, stages, virtual, micro-batches) -> its actions
_GENERATORS: Mapping[str, _Generator] = MappingProxyType(
    {
        PLAIN: lambda s, p, _, m: one_forward_one_backward(s, p, m),
        "gpipe": lambda s, p, _, m: gpipe(s, p, m),
        "interleaved": interleaved,
        "zero_bubble": lambda s, p, _, m: zero_bubble(s, p, m),
        "layer_major": _layer_major,
        "pipedream": lambda s, p, _, m: pipedream(s, p, m),
        "pipedream_vertical": lambda s, p, _, m: pipedream(s, p, m),
    }
)


def _passes(own: Sequence[int], micros: range) -> tuple[list[Action], list[Action]]:
    """Return the forwards of micro-batches through a stage's chunks, and the backwards."""
    forwards = [Action(_F, chunk, micro) for chunk in own for micro in micros]
    backwards = [Action(_B, chunk, micro) for chunk in reversed(own) for micro in micros]
    return forwards, backwards


def _alternated(
    forwards: Sequence[Action],
    backwards: Sequence[Action],
    ahead: int,
) -> list[Action]:
    """Return `ahead` forwards, then a forward and a backward in turn, then the other backwards."""
    ahead = min(ahead, len(forwards))
    actions = [*forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += [forward, backward]
    return [*actions, *backwards[len(forwards) - ahead :]]


# Versions of the weights


def version_used(schedule: str, stage: int, stages: int, micro: int) -> int:
    """Return with which version of the weights a stage computes a micro-batch: after how many
    updates.

    Args:
        schedule: by name. Only the PipeDreams update before the pipeline is drained.
        stage: of `stages`, from 0.
        micro: number of the micro-batch since the pipeline was drained.
    """
    facts = SCHEDULES[schedule]
    if not facts.updates_each:
        return 0
    later = stages - 1
    if not facts.keeps_version:
        later -= stage
    return max(0, micro - later)


def num_flowing(schedule: str, stages: int, micro_batches: int) -> int:
    """Return how many micro-batches go through a pipeline before it is drained.

    Those of a step, except of the PipeDreams, whose steps are one each: a window of them, at most.

    Args:
        schedule: by name.
    """
    if SCHEDULES[schedule].updates_each:
        return STEPS_PER_STAGE * stages
    return micro_batches


def num_versions(schedule: str, stage: int, stages: int) -> int:
    """Return how many versions of the weights a stage holds at most, the newest among them.

    With vertical sync all stages hold as many: the version with which a micro-batch entered the
    pipeline is used on every stage that it comes to.

    Args:
        schedule: by name.
        stage: of `stages`, from 0.
    """
    facts = SCHEDULES[schedule]
    if not facts.updates_each:
        return 1
    return stages if facts.keeps_version else stages - stage
