"""Messages of pipelines where nothing tells them apart but their order, as on NCCL."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

import pytest

from zrun_core.pipeline.actions import Action, ActionKind
from zrun_core.pipeline.messages import Message, carrier, check_messages, received, sent
from zrun_core.pipeline.schedule import stage_actions
from zrun_core.spine.sections.schedules import SCHEDULES

PIPELINES = [name for name in SCHEDULES if name != "layer_major"]


def orders_of(schedule: str, stages: int, virtual: int, micros: int) -> list[tuple[Action, ...]]:
    return [stage_actions(schedule, stage, stages, virtual, micros) for stage in range(stages)]


@pytest.mark.parametrize("schedule", PIPELINES)
@pytest.mark.parametrize("stages", range(1, 9))
def test_every_schedule_comes_through_without_tags(schedule: str, stages: int) -> None:
    virtuals = range(2, 5) if schedule == "interleaved" else [1]
    for virtual, micros in itertools.product(virtuals, (1, 2, 3, 4, 8, 17)):
        check_messages(orders_of(schedule, stages, virtual, micros))


def one_group_for_each_kind(message: Message) -> Hashable:
    """As with a process group for activations and one for gradients, whichever way they go."""
    return (message.is_grad, *sorted((message.sender, message.receiver)))


def one_communicator_for_each_kind(message: Message) -> Hashable:
    """As where process groups are made with `device_id`."""
    return message.is_grad


@pytest.mark.parametrize(("virtual", "micros"), [*itertools.product((2, 3), (2, 4, 8))])
def test_interleaved_stages_that_share_both_ways_stop(virtual: int, micros: int) -> None:
    orders = orders_of("interleaved", 2, virtual, micros)
    with pytest.raises(ValueError, match="the stages wait for each other: stage 0 at activations"):
        check_messages(orders, one_group_for_each_kind)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_with_device_id_interleaved_stages_stop(stages: int) -> None:
    with pytest.raises(ValueError, match="the stages wait for each other"):
        check_messages(orders_of("interleaved", stages, 2, 4), one_communicator_for_each_kind)


def test_longer_pipelines_need_no_group_for_the_way_back_to_the_first_stage() -> None:
    assert [carrier(2, chunk, is_grad=False) for chunk in (1, 2, 3)] == [
        "pipe",
        "pipe_wrap",
        "pipe",
    ]
    assert [carrier(2, chunk, is_grad=True) for chunk in (1, 2)] == ["pipe_back", "pipe_back_wrap"]
    assert {carrier(3, chunk, is_grad=False) for chunk in range(1, 9)} == {"pipe"}


def test_a_stage_that_expects_another_message_is_found() -> None:
    """Stage 1 takes the second micro-batch first: with tags it would only wait."""
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    first = [Action(forward, 0, 0), Action(forward, 0, 1)]
    second = [Action(forward, 1, 1), Action(forward, 1, 0)]
    with pytest.raises(ValueError, match="stage 1 expects activations of micro-batch 1 before"):
        check_messages([first, second])
    assert received(second[0], 2, 1) == sent(first[1], 2, 1)
    assert received(Action(backward, 1, 0), 2, 1) is None, "it begins with the loss"
