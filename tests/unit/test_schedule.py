"""Orders of forwards and backwards, as data."""

from __future__ import annotations

import itertools

import pytest

from zrun_core.pipeline.schedule import (
    Action,
    ActionKind,
    interleaved,
    layer_major,
    max_in_flight,
    no_pipeline,
    one_forward_one_backward,
    stage_order,
    validated,
)


def read(text: str) -> list[Action]:
    """Actions of one chunk, as `F0 B0`."""
    return [Action(ActionKind(word[0]), 0, int(word[1:])) for word in text.split()]


def micros(actions: tuple[Action, ...]) -> str:
    return " ".join(f"{action.kind.value}{action.micro}" for action in actions)


def test_without_a_pipeline_each_backward_follows_its_forward() -> None:
    assert micros(no_pipeline(3)) == "F0 B0 F1 B1 F2 B2"
    assert max_in_flight(no_pipeline(3)) == 1


def test_stages_run_ahead_by_those_after_them() -> None:
    orders = [micros(one_forward_one_backward(stage, 3, 4)) for stage in range(3)]
    assert orders == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert micros(one_forward_one_backward(0, 4, 2)) == "F0 F1 B0 B1", "there are no more"


def test_all_micro_batches_go_through_a_slice_and_turn_round_in_the_last() -> None:
    words = " ".join(map(str, layer_major(3, 2)))
    assert words == "F0.0 F0.1 F1.0 F1.1 F2.0 B2.0 F2.1 B2.1 B1.0 B1.1 B0.0 B0.1"
    assert layer_major(1, 3) == no_pipeline(3)


def test_interleaved_stages_are_those_of_the_papers_figure() -> None:
    """Narayanan et al. 2021, figure 4: four devices, two chunks each, eight micro-batches."""
    first, last = interleaved(0, 4, 2, 8), interleaved(3, 4, 2, 8)
    forwards = "F0.0 F0.1 F0.2 F0.3 F4.0 F4.1 F4.2 F4.3 F0.4 F0.5"
    assert " ".join(map(str, first[:10])) == forwards
    assert [str(action) for action in first[10:14]] == ["F0.6", "B4.0", "F0.7", "B4.1"]
    assert [str(action) for action in last[:6]] == ["F3.0", "F3.1", "F3.2", "F3.3", "F7.0", "B7.0"]
    with pytest.raises(ValueError, match="6 micro-batches are no groups of 4"):
        interleaved(0, 4, 2, 6)


def test_every_stage_does_every_part_of_every_micro_batch_once() -> None:
    for virtual, micro_batches in ((1, 7), (2, 8), (4, 12)):
        for stage in range(4):
            order = stage_order(stage, 4, virtual, micro_batches)
            chunks = range(stage, 4 * virtual, 4)
            wanted = itertools.product(ActionKind, chunks, range(micro_batches))
            assert sorted(map(str, order)) == sorted(str(Action(*each)) for each in wanted)
            assert order[-1].kind is ActionKind.BACKWARD


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ("F0 F0 B0", "F0.0 comes twice"),
        ("F0 B0 F0", "F0.0 comes twice"),
        ("F0 B0 B0", "B0.0 comes twice"),
        ("B0 F0", "B0.0 comes early"),
        ("F0 F1 B0", "B0.1 is missing"),
    ],
)
def test_what_cannot_be_executed_is_refused(order: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        validated(read(order))


def test_forwards_that_wait_are_counted() -> None:
    assert max_in_flight(read("F0 B0 F1 F2 F3 B2 B1 B3")) == 3
    assert max_in_flight(one_forward_one_backward(1, 4, 16)) == 3
    assert max_in_flight(interleaved(0, 4, 2, 8)) == 11, "ten run ahead, and one is done between"
