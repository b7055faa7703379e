"""The staleness of pushes in words, and as the histogram of the report."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import pytest
from rich.console import Console

from zrun.pages.run_tables import staleness
from zrun.watch.panel import panel
from zrun.watch.panel_layout import Facts
from zrun.watch.pushes import Pushes, histogram, pushes_in_words
from zrun.watch.report import report_rows
from zrun.watch.run_state import RunState, fold
from zrun_core.spine.config import JobConfig


def window(**fields: Any) -> dict[str, Any]:
    return {
        "type": "pushes",
        "rank": 0,
        "time": 1.0,
        "step": 4,
        "steps": 4,
        "bound": None,
        "staleness": {"0": 3, "2": 4, "5": 1},
        "by_rank": [6, 2],
        "most_ahead": 4,
        **fields,
    }


def folded(*events: dict[str, Any]) -> RunState:
    state = RunState()
    for event in events:
        state = fold(state, event)
    return state


def test_windows_add_up() -> None:
    state = folded(window(), window(step=8, staleness={"0": 1, "1": 7}, most_ahead=2))
    pushes = state.pushes
    assert pushes is not None
    assert pushes.staleness == {0: 4, 1: 7, 2: 4, 5: 1}
    assert pushes.by_rank == (12, 4)
    assert pushes.count == 16
    assert pushes_in_words(pushes) == [
        "mean 1.25 updates",
        "most 5",
        "pushes by rank 12 4",
        "up to 4 ahead of the slowest (no bound)",
    ]
    assert ("staleness", "; ".join(pushes_in_words(pushes))) in report_rows(state)
    out = io.StringIO()
    Console(file=out, width=120).print(panel(state, Facts("job", "run", ("a", "a")), 120))
    assert "mean 1.25 updates" in out.getvalue()


def test_what_was_left_out_is_told() -> None:
    state = folded(window(left_out=2), window(step=8, left_out=1))
    assert pushes_in_words(state.pushes)[-1] == "3 left out"


def test_the_label_is_told_wherever_a_run_is() -> None:
    what = "sync: async_server, staleness 3"
    start = {"type": "start", "rank": 0, "time": 0.0, "total_steps": 8, "changes_numerics": what}
    for events in ([start], [start, window()]):
        state = folded(*events)
        out = io.StringIO()
        Console(file=out, width=120).print(panel(state, Facts("job", "run", ("a", "a")), 120))
        assert f"changes numerics ({what})" in out.getvalue()
        assert ("numerics", f"changes numerics ({what})") in report_rows(state)
    assert not any(name == "numerics" for name, _ in report_rows(folded(window())))


@pytest.mark.parametrize(
    ("keys", "label"),
    [
        ({"sync": "async_server", "staleness": 3}, "sync: async_server, staleness 3"),
        ({"sync": "async_server", "staleness": "any"}, "sync: async_server, staleness any"),
        ({"sync": "async_server"}, ""),
        ({"sync": "server"}, ""),
        ({"parallel": {"pp": 2, "schedule": "pipedream"}}, "parallel.schedule: pipedream"),
        ({"parallel": {"pp": 2}}, ""),
    ],
)
def test_the_label_names_the_key(keys: dict[str, Any], label: str) -> None:
    job = {"name": "a", "model": "a.py:b", "data": "a.py:c", "steps": 4, "batch": 8, "zero": 0}
    assert JobConfig.model_validate({**job, **keys}).changes_numerics == label


def test_a_histogram_has_few_bars_of_one_width() -> None:
    pushes = folded(window()).pushes
    assert pushes is not None
    assert [(each.name, each.number) for each in histogram(pushes)] == [
        ("0", 3),
        ("1", 0),
        ("2", 4),
        ("3", 0),
        ("4", 0),
        ("5", 1),
    ]
    many = folded(window(staleness={str(n): 1 for n in range(0, 100, 9)})).pushes
    assert many is not None
    bins = histogram(many)
    assert len(bins) <= 12
    assert bins[0].name == "0 to 8"
    assert sum(each.number for each in bins) == 12


def test_the_page_has_it_only_where_there_are_pushes() -> None:
    drawn = staleness(folded(window(bound=3)))
    assert "2 updates late" in drawn
    assert "4 (50%)" in drawn
    assert "(bound 3)" in drawn
    assert staleness(RunState()) == ""
    assert pushes_in_words(None) == []
    assert pushes_in_words(Pushes(Counter(), (), 0, None)) == []
