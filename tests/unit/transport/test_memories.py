"""What several ranks tell of their memory, as one event and taken apart again."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from recorded_ranks import Simulated

from zrun.transport.memories import MEMORIES, apart, together
from zrun_core.spine.events import encode


def there_and_back(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return apart(json.loads(encode(together(events))))


def told(rank: int, **fields: Any) -> dict[str, Any]:
    return {"type": "memory", "time": 5.0 + rank, "rank": rank, "step": 7, **fields}


@pytest.mark.parametrize(
    "ranks", [Simulated(8, 1), Simulated(8, 1, on_gpu=False), Simulated(8, 1, stages=4)]
)
def test_nothing_is_lost(ranks: Simulated) -> None:
    events = [json.loads(encode(ranks.memory(rank, 10))) for rank in range(8)]
    assert there_and_back(events) == events
    assert list(map(list, there_and_back(events))) == list(map(list, events)), "nor the order"
    whole = sum(len(encode(event)) for event in events)
    assert len(encode(together(events))) < whole / 2


def test_one_event_is_itself() -> None:
    event = told(3, split={}, kept_bytes={"host": 1}, process_bytes=None)
    assert there_and_back([event]) == [event]


@pytest.mark.parametrize(
    "values",
    [
        (1, 1.0),
        (1, True),
        (None, 0),
        ({}, {"host": 1}),
        ({}, {}),
        ({"a": {"b": 1}}, {"a": {"b": 2}}),
        ({"a": 1}, {"a": {"b": 2}}),
        ([1, 2], [1, 2]),
        ([], []),
        ([{"a": 1}], [{"a": 1}]),
        ("nan", "inf"),
        (1 << 60, (1 << 60) + 1),
    ],
)
def test_values_of_any_shape_stay_what_they_are(values: tuple[Any, Any]) -> None:
    events = [told(rank, value=value) for rank, value in enumerate(values)]
    again = there_and_back(events)
    assert again == events
    assert [type(event["value"]) for event in again] == [type(value) for value in values]


def test_ranks_with_other_fields_may_be_together() -> None:
    events = [told(0, a=1), told(1, b=2), told(2, a=1, b={"c": [None]})]
    assert there_and_back(events) == events


def test_anything_made_of_json_comes_back() -> None:
    noise = random.Random(0)

    def anything(depth: int) -> Any:
        if depth == 0 or noise.random() < 0.4:
            return noise.choice([0, 1, 1.0, True, None, "x", 0.1, -5])
        if noise.random() < 0.5:
            return [anything(depth - 1) for _ in range(noise.randrange(3))]
        return {noise.choice("abc"): anything(depth - 1) for _ in range(noise.randrange(3))}

    for _ in range(2000):
        events = [told(rank, x=anything(3), y=anything(2)) for rank in range(noise.randrange(1, 4))]
        assert repr(there_and_back(events)) == repr(events)


def test_it_is_known_by_its_type_and_its_first_rank() -> None:
    event = together([told(4, a=1), told(5, a=1)])
    about = {"type": MEMORIES, "time": 9.0, "rank": 4, "step": 7, "ranks": 2}
    assert {key: event[key] for key in about} == about
