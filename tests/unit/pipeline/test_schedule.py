"""Orders of forwards and backwards, as data."""

from __future__ import annotations

import itertools

import pytest

from zrun_core.pipeline.actions import (
    Action,
    ActionKind,
    check_together,
    max_in_flight,
    most_waiting,
    validated,
)
from zrun_core.pipeline.schedule import (
    SCHEDULES,
    interleaved,
    layer_major,
    no_pipeline,
    num_versions,
    one_forward_one_backward,
    stage_actions,
    version_used,
)

PIPELINES = [name for name in SCHEDULES if name != "layer_major"]


Actions = tuple[Action, ...]


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


def orders_of(schedule: str, stages: int, virtual: int, micro_batches: int) -> list[Actions]:
    """The lists of all stages."""
    return [
        stage_actions(schedule, stage, stages, virtual, micro_batches) for stage in range(stages)
    ]


def test_gpipe_turns_round_once_and_goes_back_in_order() -> None:
    assert [micros(order) for order in orders_of("gpipe", 2, 1, 3)] == ["F0 F1 F2 B0 B1 B2"] * 2


def test_weights_come_as_late_as_the_stage_is() -> None:
    """ZB-H1, as Qi et al. 2023 draw it in figure 3 (top)."""
    assert [micros(order) for order in orders_of("zero_bubble", 3, 1, 5)] == [
        "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4",
    ]


def test_pipedream_updates_after_each_backward() -> None:
    for schedule in ("pipedream", "pipedream_vertical"):
        assert micros(stage_actions(schedule, 0, 2, 1, 3)) == "F0 F1 B0 U0 F2 B1 U1 B2 U2"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_one_stage_waits_for_nobody(schedule: str) -> None:
    assert stage_actions(schedule, 0, 1, 1, 5) == no_pipeline(5)


@pytest.mark.parametrize("schedule", PIPELINES)
@pytest.mark.parametrize("stages", range(1, 9))
def test_no_stage_waits_for_one_that_waits_for_it(schedule: str, stages: int) -> None:
    virtuals = range(2, 5) if schedule == "interleaved" else [1]
    for virtual, micro_batches in itertools.product(virtuals, range(1, 18)):
        check_together(orders_of(schedule, stages, virtual, micro_batches))


def test_slices_are_executable_too() -> None:
    assert stage_actions("layer_major", 0, 1, 3, 2) == layer_major(3, 2)
    for slices, micro_batches in itertools.product(range(1, 6), range(1, 9)):
        check_together([stage_actions("layer_major", 0, 1, slices, micro_batches)])


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 17])
def test_stages_keep_as_much_as_their_schedule_says(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        waiting = {
            name: most_waiting(stage_actions(name, stage, stages, 1, micro_batches))
            for name in ("gpipe", "1f1b", "zero_bubble")
        }
        few = min(micro_batches, stages - stage)
        assert waiting["gpipe"] == (micro_batches, 0, micro_batches)
        assert waiting["1f1b"] == (few, 0, few)
        late = min(micro_batches, stage + 1)
        assert waiting["zero_bubble"] == (few, late, min(micro_batches, stages))


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_vertical"])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_versions_are_those_that_there_are(schedule: str, stages: int) -> None:
    """Each is made before it is used, and none but the ones held is used until then."""
    for stage in range(stages):
        held = num_versions(schedule, stage, stages)
        newest = 0
        in_use: dict[int, int] = {}  # versions by micro-batch under way
        kept = []
        for kind, _, micro in stage_actions(schedule, stage, stages, 1, 20):
            if kind is ActionKind.UPDATE:
                newest += 1
                assert newest == micro + 1
            elif kind is ActionKind.FORWARD:
                in_use[micro] = version_used(schedule, stage, stages, micro)
                assert in_use[micro] <= newest
                if schedule == "pipedream":
                    assert in_use[micro] == newest, "a forward uses the newest weights"
                kept.append(newest - min(in_use.values()) + 1)
            else:
                del in_use[micro]
        assert max(kept) == held
        if schedule == "pipedream_vertical":
            assert version_used(schedule, stage, stages, 9) == version_used(schedule, 0, stages, 9)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble"])
def test_what_updates_at_the_end_of_a_step_has_one_version(schedule: str) -> None:
    assert (num_versions(schedule, 0, 4), version_used(schedule, 0, 4, 7)) == (1, 0)


def test_schedules_have_chunks_that_they_know() -> None:
    with pytest.raises(ValueError, match="gpipe has one chunk on each stage, not 2"):
        stage_actions("gpipe", 0, 2, 2, 4)
    with pytest.raises(ValueError, match="not 2 stages"):
        stage_actions("layer_major", 0, 2, 1, 4)


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ("F0 F0 B0", "F0.0 comes twice"),
        ("F0 B0 F0", "F0.0 comes twice"),
        ("F0 B0 B0", "B0.0 comes twice"),
        ("B0 F0", "B0.0 comes early"),
        ("F0 F1 B0", "B0.1 is missing"),
        ("F0 W0 B0", "W0.0 comes early"),
        ("F0 F1 B0 W0 B1", "W0.1 is missing"),
        ("F0 U0 B0", "U0.0 comes early"),
        ("F0 B0 U0 F1 B1", "U0.1 is missing"),
    ],
)
def test_what_cannot_be_executed_is_refused(order: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        validated(read(order))


def test_forwards_that_wait_are_counted() -> None:
    assert max_in_flight(read("F0 B0 F1 F2 F3 B2 B1 B3")) == 3
    assert max_in_flight(one_forward_one_backward(1, 4, 16)) == 3
    assert max_in_flight(interleaved(0, 4, 2, 8)) == 11, "ten run ahead, and one is done between"


def chunks(text: str) -> Actions:
    """Actions of several chunks, as `F0.0 B0.0`."""
    found = (word[1:].split(".") for word in text.split())
    kinds = (ActionKind(word[0]) for word in text.split())
    return tuple(
        Action(kind, int(chunk), int(micro))
        for kind, (chunk, micro) in zip(kinds, found, strict=True)
    )


@pytest.mark.parametrize(
    ("orders", "problem"),
    [
        (
            ["F0.0 F0.1 B0.0 B0.1", "F1.1 B1.1 F1.0 B1.0"],
            "B1.0 comes after B1.1: gradients add up in order",
        ),
        (
            ["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"],
            "wait for each other: B0.0 for B1.0, F1.1 for F0.1",
        ),
        (["F0.0 B0.0", "F1.0 F1.1 B1.0 B1.1"], "lacks a micro-batch"),
        (["F0.0 B0.0", "F0.0 B0.0"], "on no stage or on several"),
        (["F0.0 B0.0", "F2.0 B2.0"], "on no stage or on several"),
        (["F0.0 B0.0 W0.0", "F1.0 B1.0"], "weights or updates that others lack"),
        (["F0.0 B0.0", "F1.0"], "B1.0 is missing"),
    ],
)
def test_stages_that_cannot_work_together_are_refused(orders: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_together([chunks(order) for order in orders])
